// The two-resource pipeline that the planner searches over, private to the policy module.
//
// A slice is read (link busy for `io`), usable `lag` later, then computed. Reads run back to back,
// compute runs in order, so a slice maps the state (A = link free, C = compute free) to
//   A' = A + io,   C' = max(C, A' + lag) + compute,
// an affine map over (max, +). Such maps compose, so a whole layer is one Step of three numbers and
// the search never touches slices.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "policy/restore_plan.h"

namespace hcache::policy {

struct PipelineState {
  double io = 0;       // A
  double compute = 0;  // C
};

// A' = A + io;  C' = max(C + work, A + through).
struct Step {
  double io = 0;
  double work = 0;
  double through = -std::numeric_limits<double>::infinity();

  // This step, then next.
  [[nodiscard]] Step then(const Step& next) const;
  [[nodiscard]] PipelineState apply(const PipelineState& s) const;
  // n >= 1 times this step.
  [[nodiscard]] Step repeated(int64_t n) const;
  static Step compute_only(double seconds) { return {0, seconds}; }
};

// Equal slices of one layer, read and consumed one after the other.
struct SliceGroup {
  Method method = Method::kKv;
  int64_t count = 0;
  int64_t bytes = 0;  // of one slice
  double io = 0;      // of one slice
  double lag = 0;
  double upload = 0;   // of one slice, where each of several devices has a link of its own
  double compute = 0;  // of one slice

  [[nodiscard]] Step step() const;
};

// Rows that one layer restores by one method.
struct Segment {
  Method method;
  int64_t rows;
  double slowness = 1;  // AvailableRun's, of this layer
};
[[nodiscard]] inline double slowness_of(const std::vector<double>& layers, int32_t l) {
  return layers.empty() ? 1 : layers[static_cast<size_t>(l)];
}

// Cuts the segments of one layer into slices. kRecompute segments do not appear here: their work is
// recompute_layer_s. Neighbours with the same method are cut as one, at their mean speed.
[[nodiscard]] std::vector<SliceGroup> cut_slices(const RestoreCosts& costs, const LayerCosts& layer,
                                                 const std::vector<Segment>& segments);
[[nodiscard]] Step steps(const std::vector<SliceGroup>& groups);

// Slices in flight: their bytes are held from the start of the read until they are consumed, and
// come free in the order of the reads. 0 bytes: no limit.
class Ring {
 public:
  explicit Ring(int64_t bytes) : limit_(bytes) {}

  // The earliest time from `from` on at which a read of `bytes` finds room.
  double wait_for_room(int64_t bytes, double from);
  void hold(int64_t bytes, double until);

 private:
  struct Held {
    int64_t bytes;
    double free_at;
  };
  int64_t limit_;
  int64_t held_bytes_ = 0;
  std::vector<Held> held_;
  size_t head_ = 0;  // older entries have been released
};

struct SliceTimes {
  double read_begin;
  double usable;
  double compute_begin;
};
// When a device is free.
struct DeviceState {
  double compute = 0;
  double upload = 0;  // its own link
};
// One slice of the group, the event-exact way; the link is free at *link_free.
SliceTimes read_and_compute(const SliceGroup& g, Ring* ring, double* link_free,
                            DeviceState* device);

// Layers [begin, end) of each device that computes beside the others.
[[nodiscard]] std::vector<std::pair<int32_t, int32_t>> device_ranges(const RestoreCosts& costs);

// kInvalidArgument naming what a request of a model of n_layer layers has wrong.
[[nodiscard]] Status validate(const RestoreRequest& request, int32_t n_layer);

// The prefill follows the restore layer by layer with its first batch; other batches come after.
[[nodiscard]] double following_prefill_s(const RestoreCosts& costs, const LayerCosts& layer,
                                         int64_t prefill_rows, int64_t history);

// History rows of layer l, every one through the whole layer.
[[nodiscard]] double recompute_whole_layer_s(const RestoreCosts& costs, int32_t l, int64_t rows);
// The same when the first recompute_layers layers are recomputed.
[[nodiscard]] double recompute_layer_s(const RestoreCosts& costs, int32_t l,
                                       int32_t recompute_layers, int64_t rows);

}  // namespace hcache::policy
