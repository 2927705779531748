// What a restore's engine calls take, and when each layer's are.
//
// Threading: the engine's thread.
#pragma once

#include <cstdint>
#include <utility>

#include "base/env.h"
#include "policy/restore_record.h"

namespace hcache::state {

class RestoreTimer {
 public:
  // `record` outlives it, and has its layers before any of them is timed.
  RestoreTimer(Env& env, policy::RestoreRecord& record) : env_(env), record_(record) {}

  // From now on; what is timed before counts from the clock's beginning.
  void start() { start_ns_ = env_.monotonic_ns(); }
  [[nodiscard]] int64_t start_ns() const { return start_ns_; }
  [[nodiscard]] double elapsed() const { return elapsed(start_ns_); }
  [[nodiscard]] double elapsed(int64_t since_ns) const {
    return static_cast<double>(env_.monotonic_ns() - since_ns) * 1e-9;
  }

  // Runs an engine call and counts its time as compute.
  template <typename F>
  auto timed(F&& call) {
    const int64_t begin_ns = env_.monotonic_ns();
    auto result = call();
    record_.compute_busy_s += elapsed(begin_ns);
    return result;
  }
  // The same for layers [begin, end) of the restore.
  template <typename F>
  auto timed_layers(int begin, int end, F&& call) {
    const double begin_s = elapsed();
    auto result = timed(std::forward<F>(call));
    for (int layer = begin; layer < end; ++layer) {
      policy::RestoredLayer& times = record_.layers[layer];
      if (times.compute_end_s == 0) times.compute_begin_s = begin_s;
      times.compute_end_s = elapsed();
    }
    return result;
  }
  // The same for rows of one layer that are projected.
  template <typename F>
  auto timed_projection(int layer, F&& call) {
    const double before_s = record_.compute_busy_s;
    auto result = timed_layers(layer, layer + 1, std::forward<F>(call));
    record_.project_busy_s += record_.compute_busy_s - before_s;
    return result;
  }

 private:
  Env& env_;
  policy::RestoreRecord& record_;
  int64_t start_ns_ = 0;
};

}  // namespace hcache::state
