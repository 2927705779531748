// A compute queue that does nothing before it has to: graphs, and what goes with them, wait for a
// synchronisation, or for a copy that is fenced behind them. Code that reuses what they are made of
// any earlier computes garbage, or crashes.
#pragma once

#include <ggml-backend.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <utility>

#include "engine/compute_queue.h"

namespace hcache::engine::testing {

// Threading: one thread.
class LateComputeQueue : public ComputeQueue {
 public:
  struct Stats {
    int graphs = 0;
    size_t most_waiting = 0;  // of what was given, at once
  };
  // On the CPU. `stats` may be null; it outlives the queue otherwise.
  explicit LateComputeQueue(model::Device& device, Stats* stats = nullptr)
      : backend_(device.compute()), stats_(stats) {}

  ggml_status run(ggml_cgraph* graph) override {
    if (stats_ != nullptr) ++stats_->graphs;
    give([this, graph] {
      if (ggml_backend_graph_compute(backend_, graph) != GGML_STATUS_SUCCESS) {
        die("a graph that was given to the late queue failed");
      }
    });
    return GGML_STATUS_SUCCESS;
  }
  void upload(ggml_tensor* dst, const void* src, size_t n_bytes) override {
    give([=] { ggml_backend_tensor_set(dst, src, 0, n_bytes); });
  }
  void download(const ggml_tensor* src, void* dst, size_t n_bytes) override {
    give([=] { ggml_backend_tensor_get(src, dst, 0, n_bytes); });
  }
  void copy(ggml_tensor* src, ComputeQueue& to, ggml_tensor* dst) override {
    synchronize();
    if (&to != this) to.synchronize();
    ggml_backend_tensor_copy(src, dst);
  }
  void synchronize() override { run_to(n_given_); }
  bool is_async() const override { return true; }
  ggml_backend_t backend() const override { return backend_; }

  // For a copy queue: what happens in the order of the graphs.
  void give(std::function<void()> work) {
    waiting_.push_back(std::move(work));
    ++n_given_;
    if (stats_ != nullptr) stats_->most_waiting = std::max(stats_->most_waiting, waiting_.size());
  }
  [[nodiscard]] uint64_t n_given() const { return n_given_; }
  // Does the first n of all that was given.
  void run_to(uint64_t n) {
    while (n_given_ - waiting_.size() < n) {
      const std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      work();
    }
  }

 private:
  ggml_backend_t backend_;
  Stats* stats_;
  std::deque<std::function<void()>> waiting_;
  uint64_t n_given_ = 0;
};

}  // namespace hcache::engine::testing
