// A compute queue with a thread of its own, which takes as long over a graph as a slower device
// would: what a pipeline gains can be measured on a machine with few cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>

#include "base/env.h"
#include "base/sync.h"
#include "engine/compute_queue.h"

namespace hcache::cli {

// Threading: one thread, the engine's, calls it; the device computes on the queue's own.
class SlowQueue : public engine::ComputeQueue {
 public:
  // *graph_ns: added to every graph that is given from then on. env, device and it must outlive it.
  SlowQueue(Env& env, model::Device& device, const std::atomic<int64_t>& graph_ns);
  ~SlowQueue() override;
  SlowQueue(const SlowQueue&) = delete;
  SlowQueue& operator=(const SlowQueue&) = delete;

  ggml_status run(ggml_cgraph* graph) override;
  void upload(ggml_tensor* dst, const void* src, size_t n_bytes) override;
  void download(const ggml_tensor* src, void* dst, size_t n_bytes) override;
  void copy(ggml_tensor* src, ComputeQueue& to, ggml_tensor* dst) override;
  void synchronize() override;
  bool is_async() const override { return true; }
  ggml_backend_t backend() const override { return backend_; }

 private:
  void give(std::function<void()> work);
  void work();

  Env& env_;
  ggml_backend_t backend_;
  const std::atomic<int64_t>& graph_ns_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> given_ HCACHE_GUARDED_BY(mutex_);
  bool busy_ HCACHE_GUARDED_BY(mutex_) = false;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace hcache::cli
