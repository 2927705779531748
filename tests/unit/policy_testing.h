// Cost models and a slow, independent reference for the planner's tests.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "policy/restore_plan.h"

namespace hcache::policy::testing {

// A multi-head layer in units where one row of hidden states takes 1 us on the link and
// `projection` us to project; KV is twice the bytes, a full layer six times the work (§3.2).
inline RestoreCosts multi_head(int32_t n_layer, double projection) {
  LayerCosts layer;
  layer.project = CostCurve::affine(0, projection * 1e-6);
  layer.dense = CostCurve::affine(0, 6 * projection * 1e-6);
  layer.hidden_bytes = 1000;
  layer.kv_bytes = 2000;
  RestoreCosts costs;
  costs.n_layer = n_layer;
  costs.layers = {layer};
  costs.link.bytes_per_s = 1e9;
  costs.slice_rows = 64;
  costs.batch_rows = 64;
  return costs;
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  double real(double lo, double hi) {
    return std::uniform_real_distribution<double>(lo, hi)(engine_);
  }
  int64_t integer(int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(engine_);
  }
  bool coin(double p = 0.5) { return real(0, 1) < p; }

  CostCurve curve(double scale) {
    if (coin(0.3)) return {};
    if (coin()) return CostCurve::affine(real(0, 20) * scale, real(0, 1) * scale);
    std::vector<CostCurve::Point> points;
    double seconds = 0;
    for (int64_t rows = integer(1, 8); points.size() < 4; rows *= integer(2, 4)) {
      seconds += real(0, 40) * scale;
      points.push_back({rows, seconds});
    }
    return CostCurve::table(std::move(points)).value();
  }

  RestoreCosts costs(int32_t n_layer) {
    RestoreCosts c;
    c.n_layer = n_layer;
    const auto kinds = coin(0.7) ? 1 : static_cast<size_t>(n_layer);
    for (size_t i = 0; i < kinds; ++i) {
      LayerCosts layer;
      layer.project = curve(1e-6);
      layer.load_kv = curve(2e-7);
      layer.dense = curve(5e-6);
      layer.attn_per_key = curve(1e-8);
      layer.hidden_bytes = integer(100, 1500);
      layer.kv_bytes = integer(100, 2500);
      if (coin(0.3)) layer.upload_bytes_per_s = real(2e8, 5e9);
      c.layers.push_back(layer);
    }
    c.link.bytes_per_s = real(2e8, 5e9);
    c.link.request_s = coin() ? 0 : real(0, 2e-5);
    c.link.request_bytes = integer(1000, 40000);
    c.link.upload_bytes_per_s = coin() ? 0 : real(2e8, 5e9);
    c.link.start_s = coin() ? 0 : real(0, 1e-4);
    c.slice_rows = integer(8, 40);
    c.batch_rows = integer(8, 40);
    c.finish_s = coin() ? 0 : real(0, 1e-4);
    c.re_tail_projects = coin();
    c.compute_share = coin() ? 1 : real(0.1, 1);
    return c;
  }

  // Runs of up to 50 tokens; a cell lacks both encodings with probability `missing`.
  Availability availability(int32_t n_layer, int64_t runs, double missing) {
    Availability a;
    for (int64_t r = 0; r < runs; ++r) {
      AvailableRun run;
      run.tokens = integer(1, 50);
      for (int32_t l = 0; l < n_layer; ++l) {
        run.layers.push_back(coin(missing) ? kNoEncoding : static_cast<Encoding>(integer(1, 3)));
      }
      // Some from host memory, some from the remote tier.
      if (coin(0.3)) run.slowness.assign(static_cast<size_t>(n_layer), coin() ? 0 : real(1, 5));
      a.runs.push_back(std::move(run));
    }
    return a;
  }

 private:
  std::mt19937 engine_;
};

// Makespan of a plan, event by event: every slice is an object, every time is looked up.
inline double reference_makespan(const RestoreCosts& costs, const Plan& plan) {
  struct Slice {
    double io = 0, lag = 0, compute = 0;
    int64_t bytes = 0;
    double read_end = 0, done = 0, release = 0;
  };
  std::vector<Slice> slices;
  double link_free = costs.link.start_s;
  double compute_free = 0;
  auto prefill_batch = [&](const LayerCosts& layer, int64_t at) {
    int64_t n = std::min(costs.batch_rows, plan.prefill_tokens - at);
    if (n <= 0) return;
    compute_free += layer.dense.at(n) +
                    layer.attn_per_key.at(n) * (static_cast<double>(plan.restored_tokens + at) +
                                                (static_cast<double>(n) + 1) / 2);
  };
  for (int32_t l = 0; l < plan.n_layer; ++l) {
    const LayerCosts& layer = costs.layer(l);
    if (l < plan.recompute_layers) {
      const double begin = compute_free;
      if (costs.re_tail_projects && l == plan.recompute_layers - 1) {
        for (int64_t at = 0; at < plan.restored_tokens; at += costs.slice_rows) {
          compute_free += layer.project.at(std::min(costs.slice_rows, plan.restored_tokens - at));
        }
      } else {
        for (int64_t at = 0; at < plan.restored_tokens; at += costs.batch_rows) {
          int64_t n = std::min(costs.batch_rows, plan.restored_tokens - at);
          compute_free +=
              layer.dense.at(n) + layer.attn_per_key.at(n) *
                                      (static_cast<double>(at) + (static_cast<double>(n) + 1) / 2);
        }
      }
      compute_free = begin + (compute_free - begin) / costs.compute_share;
    } else {
      // Row by row: a slice ends at slice_rows or where the method changes.
      std::vector<Method> rows;
      std::vector<double> slowness;
      for (const PlanRun& run : plan.runs) {
        rows.insert(rows.end(), static_cast<size_t>(run.tokens),
                    run.layers[static_cast<size_t>(l)]);
        slowness.insert(slowness.end(), static_cast<size_t>(run.tokens),
                        run.slowness.empty() ? 1 : run.slowness[static_cast<size_t>(l)]);
      }
      for (size_t at = 0; at < rows.size();) {
        // Neighbours with one method are read at their mean speed.
        size_t first = at;
        size_t last = at;
        while (first > 0 && rows[first - 1] == rows[at]) --first;
        while (last < rows.size() && rows[last] == rows[at]) ++last;
        const double slow =
            std::accumulate(slowness.begin() + static_cast<std::ptrdiff_t>(first),
                            slowness.begin() + static_cast<std::ptrdiff_t>(last), 0.0) /
            static_cast<double>(last - first);
        size_t end = at;
        while (end < rows.size() && rows[end] == rows[at] &&
               end - at < static_cast<size_t>(costs.slice_rows)) {
          ++end;
        }
        const auto n = static_cast<int64_t>(end - at);
        const bool hidden = rows[at] == Method::kHidden;
        Slice s;
        s.bytes = n * (hidden ? layer.hidden_bytes : layer.kv_bytes);
        double read = 0;
        for (int64_t left = s.bytes; left > 0; left -= costs.link.request_bytes) {
          read += costs.link.request_s;
        }
        read = slow * (read + static_cast<double>(s.bytes) / costs.link.bytes_per_s);
        const double upload_rate =
            layer.upload_bytes_per_s > 0 ? layer.upload_bytes_per_s : costs.link.upload_bytes_per_s;
        double upload = upload_rate > 0 ? static_cast<double>(s.bytes) / upload_rate : 0;
        s.io = std::max(read, upload);
        s.lag = std::min(read, upload);
        s.compute = (hidden ? layer.project : layer.load_kv).at(n) / costs.compute_share;
        // The ring: the read waits until what is held in front leaves room, oldest first.
        double begin = link_free;
        if (costs.ring_bytes > 0) {
          int64_t held = s.bytes;
          for (size_t i = slices.size(); i-- > 0;) {
            held += slices[i].bytes;
            if (held > costs.ring_bytes) {
              for (size_t k = 0; k <= i; ++k) begin = std::max(begin, slices[k].release);
              break;
            }
          }
        }
        s.read_end = begin + s.io;
        link_free = s.read_end;
        compute_free = std::max(compute_free, s.read_end + s.lag) + s.compute;
        s.done = compute_free;
        s.release = s.compute > 0 ? s.done : s.read_end + s.lag;
        slices.push_back(s);
        at = end;
      }
    }
    prefill_batch(layer, 0);
  }
  // Batches behind the first one run through all layers, one after the other.
  for (int64_t at = costs.batch_rows; at < plan.prefill_tokens; at += costs.batch_rows) {
    for (int32_t l = 0; l < plan.n_layer; ++l) prefill_batch(costs.layer(l), at);
  }
  return compute_free + (plan.new_tokens > 0 ? costs.finish_s : 0);
}

// The plan whose first `runs` runs are restored with `recompute` RE layers; pick(cell) decides
// every cell that is saved both ways, in the order layer by layer, run by run.
template <typename Pick>
Plan make_plan(const RestoreCosts& costs, const RestoreRequest& request, size_t runs,
               int32_t recompute, Pick pick) {
  Plan plan;
  plan.n_layer = costs.n_layer;
  plan.new_tokens = request.new_tokens;
  plan.recompute_layers = runs > 0 ? recompute : 0;
  for (size_t k = 0; k < runs; ++k) {
    const AvailableRun& saved = request.available.runs[k];
    plan.runs.push_back(
        {plan.restored_tokens, saved.tokens,
         std::vector<Method>(static_cast<size_t>(costs.n_layer), Method::kRecompute),
         saved.slowness});
    plan.restored_tokens += saved.tokens;
  }
  plan.prefill_tokens = request.available.tokens() - plan.restored_tokens + request.new_tokens;
  size_t cell = 0;
  for (auto l = static_cast<size_t>(recompute); l < static_cast<size_t>(costs.n_layer); ++l) {
    for (size_t k = 0; k < runs; ++k) {
      Encoding e = request.available.runs[k].layers[l];
      Method m = e == kHasKv ? Method::kKv : Method::kHidden;
      if (e == kHasBoth && pick(cell++)) m = Method::kKv;
      plan.runs[k].layers[l] = m;
    }
  }
  return plan;
}

// The fastest of all plans there are, by the reference.
inline double brute_force(const RestoreCosts& costs, const RestoreRequest& request) {
  const auto& runs = request.available.runs;
  double best =
      reference_makespan(costs, make_plan(costs, request, 0, 0, [](size_t) { return false; }));
  for (size_t r = 1; r <= runs.size(); ++r) {
    for (int32_t a = 0; a < costs.n_layer; ++a) {
      size_t free = 0;
      bool possible = true;
      for (auto l = static_cast<size_t>(a); l < static_cast<size_t>(costs.n_layer); ++l) {
        for (size_t k = 0; k < r; ++k) {
          possible = possible && runs[k].layers[l] != kNoEncoding;
          if (runs[k].layers[l] == kHasBoth) ++free;
        }
      }
      if (!possible) continue;
      for (uint64_t bits = 0; bits < (uint64_t{1} << free); ++bits) {
        Plan plan =
            make_plan(costs, request, r, a, [&](size_t cell) { return ((bits >> cell) & 1) != 0; });
        best = std::min(best, reference_makespan(costs, plan));
      }
    }
  }
  return best;
}

}  // namespace hcache::policy::testing
