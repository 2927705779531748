#include "policy/miss_cost.h"

#include <algorithm>

namespace hcache::policy {
namespace {

// Of all layers, all alike or each with costs of its own.
template <typename Seconds>
double sum_layers(const RestoreCosts& costs, Seconds seconds) {
  if (costs.layers.size() == 1) return costs.n_layer * seconds(costs.layers[0]);
  double sum = 0;
  for (const LayerCosts& layer : costs.layers) sum += seconds(layer);
  return sum;
}

// Of the device's layers that take longest, where several compute at once.
template <typename Seconds>
double slowest_device(const RestoreCosts& costs, Seconds seconds) {
  if (costs.device_layers.size() <= 1) return sum_layers(costs, seconds);
  double slowest = 0;
  int32_t l = 0;
  for (const int32_t n : costs.device_layers) {
    double sum = 0;
    for (const int32_t end = l + n; l < end; ++l) sum += seconds(costs.layer(l));
    slowest = std::max(slowest, sum);
  }
  return slowest;
}

}  // namespace

SavedRows saved_rows(const SavePlan& plan, int64_t first, int64_t rows) {
  SavedRows saved{.first = first, .rows = rows};
  saved.bytes = static_cast<double>(plan.bytes_per_token * rows);
  for (const Encoding has : plan.layers) {
    if ((has & kHasHidden) != 0) {
      ++saved.projected;
    } else if ((has & kHasKv) != 0) {
      ++saved.copied;
    }
  }
  return saved;
}

double recompute_rows_s(const RestoreCosts& costs, int64_t first, int64_t rows) {
  const auto n = static_cast<double>(rows);
  const double keys = static_cast<double>(first) + (n + 1) / 2;
  const double share = n / static_cast<double>(costs.batch_rows);
  return sum_layers(costs, [&](const LayerCosts& layer) {
    return share *
           (layer.dense.at(costs.batch_rows) + layer.attn_per_key.at(costs.batch_rows) * keys);
  });
}

double restore_rows_s(const RestoreCosts& costs, const SavedRows& saved, double bytes_per_s) {
  const double read_s = bytes_per_s > 0 ? saved.bytes / bytes_per_s : 0;
  const double share = static_cast<double>(saved.rows) / static_cast<double>(costs.slice_rows);
  const double layers = costs.n_layer;
  const double compute_s = share * slowest_device(costs, [&](const LayerCosts& layer) {
                             return (saved.projected * layer.project.at(costs.slice_rows) +
                                     saved.copied * layer.load_kv.at(costs.slice_rows)) /
                                    layers;
                           });
  return std::max(read_s, compute_s);
}

double TierCosts::without_s(const SavedRows& saved) const {
  const double recompute_s = recompute_rows_s(costs, saved.first, saved.rows);
  if (below_bytes_per_s <= 0) return recompute_s;
  return std::min(recompute_s, restore_rows_s(costs, saved, below_bytes_per_s));
}

double TierCosts::miss_s(const SavedRows& saved) const {
  return std::max(0.0, without_s(saved) - restore_rows_s(costs, saved, bytes_per_s));
}

}  // namespace hcache::policy
