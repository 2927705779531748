#include "pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

namespace hcache::policy {

Step Step::then(const Step& next) const {
  return {io + next.io, work + next.work, std::max(through + next.work, io + next.through)};
}

PipelineState Step::apply(const PipelineState& s) const {
  return {s.io + io, std::max(s.compute + work, s.io + through)};
}

Step Step::repeated(int64_t n) const {
  // The i-th repetition enters `through` after i reads and before n - 1 - i computations; that is
  // linear in i, so the maximum stands at one of the ends.
  double more = static_cast<double>(n - 1);
  return {io * static_cast<double>(n), work * static_cast<double>(n),
          through + more * std::max(io, work)};
}

Step SliceGroup::step() const { return Step{io, compute, io + lag + compute}.repeated(count); }

Step steps(const std::vector<SliceGroup>& groups) {
  Step total;
  for (const SliceGroup& g : groups) total = total.then(g.step());
  return total;
}

namespace {

SliceGroup make_group(const RestoreCosts& costs, const LayerCosts& layer, Method method,
                      int64_t rows, int64_t count, double slowness) {
  SliceGroup g;
  g.method = method;
  g.count = count;
  g.bytes = rows * (method == Method::kHidden ? layer.hidden_bytes : layer.kv_bytes);
  LinkCosts link = costs.link;
  if (layer.upload_bytes_per_s > 0) link.upload_bytes_per_s = layer.upload_bytes_per_s;
  if (slowness != 1) {
    // An upload to the device is as fast as ever.
    link.bytes_per_s =
        slowness > 0 ? link.bytes_per_s / slowness : std::numeric_limits<double>::infinity();
    link.request_s *= slowness;
  }
  g.io = link_s(link, g.bytes);
  if (link.upload_bytes_per_s > 0 && g.bytes > 0) {
    // Read and upload overlap across slices: the slower one is `io`, the faster one delays.
    LinkCosts read = link;
    read.upload_bytes_per_s = 0;
    g.lag = std::min(link_s(read, g.bytes), static_cast<double>(g.bytes) / link.upload_bytes_per_s);
  }
  g.compute =
      (method == Method::kHidden ? layer.project : layer.load_kv).at(rows) / costs.compute_share;
  return g;
}

}  // namespace

std::vector<SliceGroup> cut_slices(const RestoreCosts& costs, const LayerCosts& layer,
                                   const std::vector<Segment>& segments) {
  std::vector<SliceGroup> groups;
  for (size_t i = 0; i < segments.size();) {
    Method method = segments[i].method;
    int64_t rows = 0;
    double slow_rows = 0;
    for (; i < segments.size() && segments[i].method == method; ++i) {
      rows += segments[i].rows;
      slow_rows += segments[i].slowness * static_cast<double>(segments[i].rows);
    }
    const double slowness = rows > 0 ? slow_rows / static_cast<double>(rows) : 1;
    if (int64_t full = rows / costs.slice_rows; full > 0) {
      groups.push_back(make_group(costs, layer, method, costs.slice_rows, full, slowness));
    }
    if (int64_t rest = rows % costs.slice_rows; rest > 0) {
      groups.push_back(make_group(costs, layer, method, rest, 1, slowness));
    }
  }
  return groups;
}

double following_prefill_s(const RestoreCosts& costs, const LayerCosts& layer, int64_t prefill_rows,
                           int64_t history) {
  return prefill_layer_s(layer, std::min(prefill_rows, costs.batch_rows), history,
                         costs.batch_rows);
}

double recompute_whole_layer_s(const RestoreCosts& costs, int32_t l, int64_t rows) {
  return prefill_layer_s(costs.layer(l), rows, 0, costs.batch_rows) / costs.compute_share;
}

double recompute_layer_s(const RestoreCosts& costs, int32_t l, int32_t recompute_layers,
                         int64_t rows) {
  if (costs.re_tail_projects && l == recompute_layers - 1) {
    return sliced_s(costs.layer(l).project, rows, costs.slice_rows) / costs.compute_share;
  }
  return recompute_whole_layer_s(costs, l, rows);
}

namespace {

Status check_plan(const RestoreCosts& costs, const Plan& plan) {
  if (plan.n_layer != costs.n_layer) {
    return invalid_argument(
        fmt::format("plan of {} layers, costs of {}", plan.n_layer, costs.n_layer));
  }
  int64_t rows = 0;
  for (const PlanRun& run : plan.runs) {
    if (run.begin != rows || run.tokens < 1 ||
        run.layers.size() != static_cast<size_t>(plan.n_layer) ||
        (!run.slowness.empty() && run.slowness.size() != run.layers.size())) {
      return invalid_argument(fmt::format("plan: malformed run at row {}", run.begin));
    }
    for (int32_t l = 0; l < plan.n_layer; ++l) {
      if ((run.layers[static_cast<size_t>(l)] == Method::kRecompute) !=
          (l < plan.recompute_layers)) {
        return invalid_argument(fmt::format("plan: RE must be layers [0, {}), but layer {} is {}",
                                            plan.recompute_layers, l,
                                            method_name(run.layers[static_cast<size_t>(l)])));
      }
    }
    rows += run.tokens;
  }
  if (rows != plan.restored_tokens || plan.prefill_tokens < 0) {
    return invalid_argument(
        fmt::format("plan: runs cover {} of {} rows", rows, plan.restored_tokens));
  }
  return {};
}

}  // namespace

double Ring::wait_for_room(int64_t bytes, double from) {
  if (limit_ <= 0) return from;
  while (head_ < held_.size() && held_bytes_ + bytes > limit_) {
    from = std::max(from, held_[head_].free_at);
    held_bytes_ -= held_[head_].bytes;
    ++head_;
  }
  return from;
}

void Ring::hold(int64_t bytes, double until) {
  if (limit_ <= 0) return;
  held_.push_back({bytes, until});
  held_bytes_ += bytes;
}

SliceTimes read_and_compute(const SliceGroup& g, Ring* ring, PipelineState* state) {
  SliceTimes t;
  t.read_begin = ring->wait_for_room(g.bytes, state->io);
  state->io = t.read_begin + g.io;
  t.usable = state->io + g.lag;
  t.compute_begin = std::max(state->compute, t.usable);
  state->compute = t.compute_begin + g.compute;
  // What takes no compute is consumed as it arrives.
  ring->hold(g.bytes, g.compute > 0 ? state->compute : t.usable);
  return t;
}

Result<Timeline> simulate(const RestoreCosts& costs, const Plan& plan) {
  HCACHE_RETURN_IF_ERROR(validate(costs));
  HCACHE_RETURN_IF_ERROR(check_plan(costs, plan));
  Timeline timeline;
  timeline.layers.resize(static_cast<size_t>(plan.n_layer));
  Prediction& total = timeline.total;
  Ring ring(costs.ring_bytes);
  PipelineState state{costs.link.start_s, 0};
  const int64_t rows = plan.restored_tokens;
  std::vector<Segment> segments;

  for (int32_t l = 0; l < plan.n_layer; ++l) {
    LayerTimes& times = timeline.layers[static_cast<size_t>(l)];
    const LayerCosts& layer = costs.layer(l);
    times.compute_begin = state.compute;
    if (rows > 0 && l < plan.recompute_layers) {
      const double seconds = recompute_layer_s(costs, l, plan.recompute_layers, rows);
      state.compute += seconds;
      total.compute_busy_s += seconds * costs.compute_share;
      if (plan.recompute_layers > 1) total.project_busy_s += seconds * costs.compute_share;
    } else if (rows > 0) {
      segments.clear();
      for (const PlanRun& run : plan.runs) {
        segments.push_back(
            {run.layers[static_cast<size_t>(l)], run.tokens, slowness_of(run.slowness, l)});
      }
      bool first = true;
      for (const SliceGroup& g : cut_slices(costs, layer, segments)) {
        for (int64_t i = 0; i < g.count; ++i) {
          const SliceTimes t = read_and_compute(g, &ring, &state);
          if (first) {
            times.io_begin = t.read_begin;
            times.compute_begin = t.compute_begin;
            first = false;
          }
          times.io_end = t.usable;
          total.io_busy_s += g.io;
          const double busy_s = g.compute * costs.compute_share;
          total.compute_busy_s += busy_s;
          if (g.method == Method::kHidden) total.project_busy_s += busy_s;
          if (g.io > 0) total.bytes_read += g.bytes;
        }
      }
    }
    times.compute_end = state.compute;
    if (rows > 0) total.restored_s = state.compute;

    const double prefill = following_prefill_s(costs, layer, plan.prefill_tokens, rows);
    state.compute += prefill;
    total.compute_busy_s += prefill;
    times.prefill_end = prefill > 0 ? state.compute : 0;
  }
  const int64_t followed = std::min(plan.prefill_tokens, costs.batch_rows);
  for (int32_t l = 0; l < plan.n_layer; ++l) {
    const double prefill = prefill_layer_s(costs.layer(l), plan.prefill_tokens - followed,
                                           rows + followed, costs.batch_rows);
    state.compute += prefill;
    total.compute_busy_s += prefill;
  }
  if (plan.new_tokens > 0) {
    state.compute += costs.finish_s;
    total.compute_busy_s += costs.finish_s;
  }
  total.makespan_s = state.compute;
  return timeline;
}

}  // namespace hcache::policy
