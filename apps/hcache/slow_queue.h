// A device's queues with a thread of their own, which takes as long over a graph as a slower device
// would: what several devices gain can be measured on a machine with few cores.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <thread>

#include "base/env.h"
#include "base/sync.h"
#include "engine/compute_queue.h"
#include "engine/copy_queue.h"

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

  // For the copy queue. Gives the work's number, counted from 1.
  uint64_t give(std::function<void()> work);
  [[nodiscard]] uint64_t n_given() const;
  [[nodiscard]] bool done(uint64_t number) const;
  void wait(uint64_t number);

 private:
  void work();

  Env& env_;
  ggml_backend_t backend_;
  const std::atomic<int64_t>& graph_ns_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> given_ HCACHE_GUARDED_BY(mutex_);
  uint64_t n_given_ HCACHE_GUARDED_BY(mutex_) = 0;
  uint64_t n_done_ HCACHE_GUARDED_BY(mutex_) = 0;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// Copies in the order of the graphs, on the same thread: many backends take calls of one thread
// only.
class SlowCopyQueue : public engine::CopyQueue {
 public:
  // `queue` must outlive it.
  explicit SlowCopyQueue(SlowQueue& queue) : queue_(queue) {}

  Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) override;
  Ticket download(const ggml_tensor* src, size_t offset, void* dst, size_t n_bytes) override;
  // All is done in the order in which it is given.
  Mark mark_compute() override { return queue_.n_given(); }
  void after_compute(Mark /*mark*/) override {}
  void wait_compute(Mark mark) override { queue_.wait(mark); }
  void before_compute(Ticket /*ticket*/) override {}
  void wait(Ticket ticket) override { queue_.wait(ticket); }
  bool done(Ticket ticket) override { return queue_.done(ticket); }

 private:
  SlowQueue& queue_;
};

// Both queues of a device.
[[nodiscard]] engine::DeviceQueues slow_queues(Env& env, model::Device& device,
                                               const std::atomic<int64_t>& graph_ns);

}  // namespace hcache::cli
