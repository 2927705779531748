#include "pipeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "policy/read_order.h"

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
  const double upload_s =
      link.upload_bytes_per_s > 0 ? static_cast<double>(g.bytes) / link.upload_bytes_per_s : 0;
  const bool own_links = costs.device_layers.size() > 1;
  if (own_links) {
    link.upload_bytes_per_s = 0;
    g.upload = upload_s;
  }
  g.io = link_s(link, g.bytes);
  if (!own_links && upload_s > 0) {
    // Read and upload overlap across slices: the slower one is `io`, the faster one delays.
    LinkCosts read = link;
    read.upload_bytes_per_s = 0;
    g.lag = std::min(link_s(read, g.bytes), upload_s);
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
    if (method == Method::kNone) {
      ++i;
      continue;
    }
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

SliceTimes read_and_compute(const SliceGroup& g, Ring* ring, double* link_free,
                            DeviceState* device) {
  SliceTimes t;
  t.read_begin = ring->wait_for_room(g.bytes, *link_free);
  *link_free = t.read_begin + g.io;
  t.usable = *link_free + g.lag;
  if (g.upload > 0) {
    device->upload = std::max(device->upload, *link_free) + g.upload;
    t.usable = device->upload;
  }
  t.compute_begin = std::max(device->compute, t.usable);
  device->compute = t.compute_begin + g.compute;
  // What takes no compute is consumed as it arrives.
  ring->hold(g.bytes, g.compute > 0 ? device->compute : t.usable);
  return t;
}

std::vector<std::pair<int32_t, int32_t>> device_ranges(const RestoreCosts& costs) {
  if (costs.device_layers.empty()) return {{0, costs.n_layer}};
  std::vector<std::pair<int32_t, int32_t>> ranges;
  int32_t begin = 0;
  for (const int32_t n : costs.device_layers) {
    ranges.emplace_back(begin, begin + n);
    begin += n;
  }
  return ranges;
}

namespace {

// A plan on its way through the link and the devices.
class Simulation {
 public:
  Simulation(const RestoreCosts& costs, const Plan& plan)
      : costs_(costs),
        plan_(plan),
        rows_(plan.restored_tokens),
        ring_(costs.ring_bytes),
        link_free_(costs.link.start_s),
        groups_(static_cast<size_t>(plan.n_layer)),
        restored_(static_cast<size_t>(plan.n_layer), rows_ == 0) {
    timeline_.layers.resize(static_cast<size_t>(plan.n_layer));
    for (const auto& [begin, end] : device_ranges(costs)) lanes_.push_back({begin, end});
  }

  Timeline run() {
    follow();
    if (rows_ > 0) {
      for (int32_t l = 0; l < plan_.recompute_layers; ++l) recompute(l);
      restore();
    }
    prefill_the_rest();
    return std::move(timeline_);
  }

 private:
  // A device's layers, and the slice of them that comes next.
  struct Lane {
    int32_t begin = 0;
    int32_t end = 0;
    DeviceState device = {};
    int32_t layer = 0;
    size_t group = 0;
    int64_t slice = 0;
  };

  [[nodiscard]] Lane& lane_of(int32_t l) {
    return *std::find_if(lanes_.begin(), lanes_.end(), [&](const Lane& x) { return l < x.end; });
  }
  [[nodiscard]] LayerTimes& times(int32_t l) { return timeline_.layers[static_cast<size_t>(l)]; }

  void recompute(int32_t l) {
    Lane& lane = lane_of(l);
    Prediction& total = timeline_.total;
    const double seconds = recompute_layer_s(costs_, l, plan_.recompute_layers, rows_);
    times(l).compute_begin = std::max(lane.device.compute, recomputed_s_);
    recomputed_s_ = lane.device.compute = times(l).compute_begin + seconds;
    total.compute_busy_s += seconds * costs_.compute_share;
    if (plan_.recompute_layers > 1) total.project_busy_s += seconds * costs_.compute_share;
    end_layer(l, lane);
  }

  void restore() {
    std::vector<Segment> segments;
    std::vector<ReadOrder::Lane> wanted;
    for (Lane& lane : lanes_) {
      ReadOrder::Lane& sum = wanted.emplace_back();
      lane.layer = std::max(lane.begin, plan_.recompute_layers);
      for (int32_t l = lane.layer; l < lane.end; ++l) {
        segments.clear();
        for (const PlanRun& run : plan_.runs) {
          segments.push_back(
              {run.layers[static_cast<size_t>(l)], run.tokens, slowness_of(run.slowness, l)});
        }
        std::vector<SliceGroup>& groups = groups_[static_cast<size_t>(l)];
        groups = cut_slices(costs_, costs_.layer(l), segments);
        for (const SliceGroup& g : groups) {
          sum.pieces += g.count;
          sum.bytes += g.count * g.bytes;
        }
      }
    }
    ReadOrder order(std::move(wanted));
    for (int32_t i = order.next(); i >= 0; i = order.next()) {
      order.advance(i, restore_slice(lanes_[static_cast<size_t>(i)]));
    }
  }

  // Gives its bytes.
  int64_t restore_slice(Lane& lane) {
    const std::vector<SliceGroup>& groups = groups_[static_cast<size_t>(lane.layer)];
    const SliceGroup& g = groups[lane.group];
    LayerTimes& layer = times(lane.layer);
    Prediction& total = timeline_.total;
    const SliceTimes t = read_and_compute(g, &ring_, &link_free_, &lane.device);
    if (lane.group == 0 && lane.slice == 0) {
      layer.io_begin = t.read_begin;
      layer.compute_begin = t.compute_begin;
    }
    layer.io_end = t.usable;
    total.io_busy_s += g.io;
    const double busy_s = g.compute * costs_.compute_share;
    total.compute_busy_s += busy_s;
    if (g.method == Method::kHidden) total.project_busy_s += busy_s;
    if (g.io > 0) total.bytes_read += g.bytes;
    if (++lane.slice == g.count) {
      lane.slice = 0;
      ++lane.group;
    }
    if (lane.group == groups.size()) {
      lane.group = 0;
      end_layer(lane.layer++, lane);
    }
    return g.bytes;
  }

  void end_layer(int32_t l, const Lane& lane) {
    times(l).compute_end = lane.device.compute;
    timeline_.total.restored_s = std::max(timeline_.total.restored_s, lane.device.compute);
    restored_[static_cast<size_t>(l)] = true;
    follow();
  }

  // The prefill's first batch runs through the layers that are restored.
  void follow() {
    for (; following_ < plan_.n_layer && restored_[static_cast<size_t>(following_)]; ++following_) {
      DeviceState& device = lane_of(following_).device;
      LayerTimes& layer = times(following_);
      if (rows_ == 0) layer.compute_begin = layer.compute_end = device.compute;
      const double prefill =
          following_prefill_s(costs_, costs_.layer(following_), plan_.prefill_tokens, rows_);
      if (prefill > 0) {
        device.compute = std::max(device.compute, followed_s_) + prefill;
        layer.prefill_end = device.compute;
      }
      followed_s_ = std::max(followed_s_, device.compute);
      timeline_.total.compute_busy_s += prefill;
    }
  }

  void prefill_the_rest() {
    Prediction& total = timeline_.total;
    const int64_t followed = std::min(plan_.prefill_tokens, costs_.batch_rows);
    double end_s = followed_s_;
    for (int32_t l = 0; l < plan_.n_layer; ++l) {
      const double prefill = prefill_layer_s(costs_.layer(l), plan_.prefill_tokens - followed,
                                             rows_ + followed, costs_.batch_rows);
      end_s += prefill;
      total.compute_busy_s += prefill;
    }
    if (plan_.new_tokens > 0) {
      end_s += costs_.finish_s;
      total.compute_busy_s += costs_.finish_s;
    }
    total.makespan_s = end_s;
  }

  const RestoreCosts& costs_;
  const Plan& plan_;
  const int64_t rows_;
  Ring ring_;
  double link_free_;
  std::vector<std::vector<SliceGroup>> groups_;  // per layer
  std::vector<bool> restored_;                   // per layer
  std::vector<Lane> lanes_;
  double recomputed_s_ = 0;  // when the last recomputed layer is through
  int32_t following_ = 0;    // the layer that the prefill's first batch comes to next
  double followed_s_ = 0;    // when it is through those before
  Timeline timeline_;
};

}  // namespace

Result<Timeline> simulate(const RestoreCosts& costs, const Plan& plan) {
  HCACHE_RETURN_IF_ERROR(validate(costs));
  HCACHE_RETURN_IF_ERROR(check_plan(costs, plan));
  return Simulation(costs, plan).run();
}

}  // namespace hcache::policy
