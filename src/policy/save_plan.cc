#include "policy/save_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace hcache::policy {

namespace {

constexpr std::array<std::string_view, 4> kSaveModeNames = {"plan", "hidden", "kv", "all"};

int64_t bytes_of(const RestoreCosts& costs, const std::vector<Encoding>& layers) {
  int64_t bytes = 0;
  for (int32_t l = 0; l < costs.n_layer; ++l) {
    Encoding e = layers[static_cast<size_t>(l)];
    if ((e & kHasHidden) != 0) bytes += costs.layer(l).hidden_bytes;
    if ((e & kHasKv) != 0) bytes += costs.layer(l).kv_bytes;
  }
  return bytes;
}

std::string save_schedule(const std::vector<Encoding>& layers) {
  std::string text;
  auto add = [&](Encoding encoding, std::string_view name) {
    auto n = std::count(layers.begin(), layers.end(), encoding);
    if (n == 0) return;
    if (!text.empty()) text += ' ';
    text += fmt::format("{}:{}", name, n);
  };
  add(kNoEncoding, "RE");
  add(kHasHidden, "H");
  add(kHasKv, "KV");
  add(kHasBoth, "H+KV");
  return text;
}

// Whether saving `layers` is something plan mode may do at all.
bool worth_saving(const RestoreCosts& costs, const std::vector<Encoding>& layers) {
  for (int32_t l = 0; l < costs.n_layer; ++l) {
    const LayerCosts& layer = costs.layer(l);
    Encoding e = layers[static_cast<size_t>(l)];
    if (e == kHasBoth) return false;
    if (e == kHasHidden && layer.hidden_bytes > layer.kv_bytes) return false;
  }
  return true;
}

Result<SavePlan> describe(const RestoreCosts& costs, const SaveRequest& request,
                          std::vector<Encoding> layers) {
  SavePlan plan;
  plan.mode = request.mode;
  plan.bytes_per_token = bytes_of(costs, layers);
  plan.kv_bytes_per_token =
      bytes_of(costs, std::vector<Encoding>(static_cast<size_t>(costs.n_layer), kHasKv));
  plan.schedule = save_schedule(layers);
  HCACHE_ASSIGN_OR_RETURN(Plan restore, plan_restore_of(costs, request, request.history, layers));
  plan.predicted = restore.predicted;
  plan.layers = std::move(layers);
  return plan;
}

// Everything that plan mode may save.
std::vector<Encoding> saveable(const RestoreCosts& costs) {
  std::vector<Encoding> layers;
  for (int32_t l = 0; l < costs.n_layer; ++l) {
    const LayerCosts& layer = costs.layer(l);
    layers.push_back(layer.hidden_bytes <= layer.kv_bytes ? kHasBoth : kHasKv);
  }
  return layers;
}

// Layers that restores would recompute here, and also with a faster link or a longer history.
Result<int32_t> unsaved_layers(const RestoreCosts& costs, const SaveRequest& request) {
  const std::vector<Encoding> everything = saveable(costs);
  const auto longer =
      static_cast<int64_t>(static_cast<double>(request.history) * request.history_headroom);
  int32_t unsaved = std::min(costs.n_layer, request.max_unsaved_layers);
  for (double link : {1.0, request.link_headroom}) {
    RestoreCosts faster = costs;
    faster.link.bytes_per_s *= link;
    for (int64_t history : {request.history, longer}) {
      HCACHE_ASSIGN_OR_RETURN(Plan plan, plan_restore_of(faster, request, history, everything));
      if (!plan.runs.empty()) unsaved = std::min(unsaved, plan.recompute_layers);
    }
  }
  return unsaved;
}

// Every contiguous split of H and KV behind `first` unsaved layers.
Status add_splits(const RestoreCosts& costs, const SaveRequest& request, size_t first,
                  std::vector<SavePlan>* candidates) {
  const auto n_layer = static_cast<size_t>(costs.n_layer);
  for (bool hidden_first : {true, false}) {
    for (size_t n_first = 0; n_first <= n_layer - first; ++n_first) {
      std::vector<Encoding> layers(n_layer, kNoEncoding);
      for (size_t l = first; l < n_layer; ++l) {
        layers[l] = (l - first < n_first) == hidden_first ? kHasHidden : kHasKv;
      }
      if (!worth_saving(costs, layers)) continue;
      HCACHE_ASSIGN_OR_RETURN(SavePlan plan, describe(costs, request, std::move(layers)));
      candidates->push_back(std::move(plan));
    }
  }
  return {};
}

// Of pages, per token.
int64_t budget_of(const RestoreCosts& costs, const SaveRequest& request) {
  const int64_t kv =
      bytes_of(costs, std::vector<Encoding>(static_cast<size_t>(costs.n_layer), kHasKv));
  const int64_t most = request.max_bytes_per_token > 0 ? request.max_bytes_per_token : kv;
  return std::min(most, kv) - request.overhead_bytes_per_token;
}

Result<SavePlan> choose(const RestoreCosts& costs, const SaveRequest& request) {
  HCACHE_ASSIGN_OR_RETURN(const int32_t unsaved, unsaved_layers(costs, request));
  std::vector<SavePlan> candidates;
  HCACHE_RETURN_IF_ERROR(add_splits(costs, request, static_cast<size_t>(unsaved), &candidates));
  if (unsaved == 0 && request.max_unsaved_layers > 0 && costs.re_tail_projects &&
      costs.n_layer > 1) {
    HCACHE_RETURN_IF_ERROR(add_splits(costs, request, 1, &candidates));
  }

  int64_t least = std::numeric_limits<int64_t>::max();
  for (const SavePlan& c : candidates) least = std::min(least, c.bytes_per_token);
  const int64_t budget = std::max(budget_of(costs, request), least);
  std::erase_if(candidates, [&](const SavePlan& c) { return c.bytes_per_token > budget; });
  double fastest = std::numeric_limits<double>::infinity();
  for (const SavePlan& c : candidates) fastest = std::min(fastest, c.predicted.makespan_s);
  const SavePlan* best = nullptr;
  for (const SavePlan& c : candidates) {
    if (c.predicted.makespan_s > fastest * (1 + request.tolerance)) continue;
    if (best == nullptr || c.bytes_per_token < best->bytes_per_token ||
        (c.bytes_per_token == best->bytes_per_token &&
         c.predicted.makespan_s < best->predicted.makespan_s)) {
      best = &c;
    }
  }
  return *best;
}

Status check_request(const SaveRequest& request) {
  if (request.history < 1 || request.new_tokens < 0 || request.max_bytes_per_token < 0 ||
      request.overhead_bytes_per_token < 0 || request.max_unsaved_layers < 0) {
    return invalid_argument(fmt::format(
        "save plan: history {}, new tokens {}, byte budget {}, overhead {}, unsaved layers {}",
        request.history, request.new_tokens, request.max_bytes_per_token,
        request.overhead_bytes_per_token, request.max_unsaved_layers));
  }
  for (double fraction : {request.min_gain, request.tolerance}) {
    if (!(fraction >= 0 && fraction < 1)) {
      return invalid_argument(fmt::format("save plan: {} is not a fraction below 1", fraction));
    }
  }
  for (double headroom : {request.link_headroom, request.history_headroom}) {
    if (!(headroom >= 1 && headroom <= 1e6)) {
      return invalid_argument(fmt::format("save plan: headroom {} (1 or more)", headroom));
    }
  }
  return {};
}

}  // namespace

std::string_view save_mode_name(SaveMode mode) {
  return kSaveModeNames.at(static_cast<size_t>(mode));
}

Result<SaveMode> parse_save_mode(std::string_view name) {
  for (size_t i = 0; i < kSaveModeNames.size(); ++i) {
    if (kSaveModeNames[i] == name) return static_cast<SaveMode>(i);
  }
  return invalid_argument(
      fmt::format("unknown save mode '{}' ({})", name, fmt::join(kSaveModeNames, ", ")));
}

Result<SavePlan> plan_save(const RestoreCosts& costs, const SaveRequest& request,
                           const SavePlan* previous) {
  HCACHE_RETURN_IF_ERROR(validate(costs));
  HCACHE_RETURN_IF_ERROR(check_request(request));
  const auto n_layer = static_cast<size_t>(costs.n_layer);
  switch (request.mode) {
    case SaveMode::kHidden:
      return describe(costs, request, std::vector<Encoding>(n_layer, kHasHidden));
    case SaveMode::kKv: return describe(costs, request, std::vector<Encoding>(n_layer, kHasKv));
    case SaveMode::kAll: return describe(costs, request, std::vector<Encoding>(n_layer, kHasBoth));
    case SaveMode::kPlan: break;
  }

  HCACHE_ASSIGN_OR_RETURN(SavePlan fresh, choose(costs, request));
  if (previous == nullptr || previous->mode != SaveMode::kPlan ||
      previous->layers.size() != n_layer || !worth_saving(costs, previous->layers) ||
      std::count(previous->layers.begin(), previous->layers.end(), kNoEncoding) >
          request.max_unsaved_layers) {
    return fresh;
  }
  HCACHE_ASSIGN_OR_RETURN(SavePlan kept, describe(costs, request, previous->layers));
  if (kept.bytes_per_token > std::max(budget_of(costs, request), fresh.bytes_per_token)) {
    return fresh;
  }
  const double slower = kept.predicted.makespan_s;
  const bool faster = fresh.predicted.makespan_s < slower * (1 - request.min_gain);
  const bool smaller = static_cast<double>(fresh.bytes_per_token) <
                           static_cast<double>(kept.bytes_per_token) * (1 - request.min_gain) &&
                       fresh.predicted.makespan_s <= slower * (1 + request.tolerance);
  return faster || smaller ? fresh : kept;
}

Result<Plan> plan_restore_of(const RestoreCosts& costs, const SaveRequest& request, int64_t history,
                             const std::vector<Encoding>& layers) {
  RestoreRequest restore;
  restore.available.runs.push_back({history, layers});
  restore.new_tokens = request.new_tokens;
  return plan_restore(costs, restore);
}

}  // namespace hcache::policy
