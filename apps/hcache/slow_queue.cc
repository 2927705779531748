#include "slow_queue.h"

#include <utility>

#include "base/status.h"

namespace hcache::cli {

SlowQueue::SlowQueue(Env& env, model::Device& device, const std::atomic<int64_t>& graph_ns)
    : env_(env), backend_(device.compute()), graph_ns_(graph_ns), thread_([this] { work(); }) {}

SlowQueue::~SlowQueue() {
  {
    const MutexLock lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

uint64_t SlowQueue::give(std::function<void()> work) {
  const MutexLock lock(mutex_);
  given_.push_back(std::move(work));
  changed_.notify_all();
  return ++n_given_;
}

uint64_t SlowQueue::n_given() const {
  const MutexLock lock(mutex_);
  return n_given_;
}

bool SlowQueue::done(uint64_t number) const {
  const MutexLock lock(mutex_);
  return n_done_ >= number;
}

void SlowQueue::wait(uint64_t number) {
  const MutexLock lock(mutex_);
  while (n_done_ < number) changed_.wait(mutex_);
}

void SlowQueue::work() {
  MutexLock lock(mutex_);
  for (;;) {
    while (given_.empty() && !stop_) changed_.wait(mutex_);
    if (given_.empty()) return;
    const std::function<void()> work = std::move(given_.front());
    given_.pop_front();
    lock.unlock();
    work();
    lock.lock();
    ++n_done_;
    changed_.notify_all();
  }
}

void SlowQueue::synchronize() {
  const MutexLock lock(mutex_);
  while (n_done_ < n_given_) changed_.wait(mutex_);
}

ggml_status SlowQueue::run(ggml_cgraph* graph) {
  give([this, graph, ns = graph_ns_.load()] {
    if (ggml_backend_graph_compute(backend_, graph) != GGML_STATUS_SUCCESS) {
      die("a graph of the benchmark failed on its device");
    }
    env_.sleep_ns(ns);
  });
  return GGML_STATUS_SUCCESS;
}

void SlowQueue::upload(ggml_tensor* dst, const void* src, size_t n_bytes) {
  give([=] { ggml_backend_tensor_set(dst, src, 0, n_bytes); });
}

void SlowQueue::download(const ggml_tensor* src, void* dst, size_t n_bytes) {
  give([=] { ggml_backend_tensor_get(src, dst, 0, n_bytes); });
}

void SlowQueue::copy(ggml_tensor* src, ComputeQueue& to, ggml_tensor* dst) {
  synchronize();
  if (&to != this) to.synchronize();
  ggml_backend_tensor_copy(src, dst);
}

engine::CopyQueue::Ticket SlowCopyQueue::upload(ggml_tensor* dst, size_t offset, const void* src,
                                                size_t n_bytes) {
  return queue_.give([=] { ggml_backend_tensor_set(dst, src, offset, n_bytes); });
}

engine::CopyQueue::Ticket SlowCopyQueue::download(const ggml_tensor* src, size_t offset, void* dst,
                                                  size_t n_bytes) {
  return queue_.give([=] { ggml_backend_tensor_get(src, dst, offset, n_bytes); });
}

engine::DeviceQueues slow_queues(Env& env, model::Device& device,
                                 const std::atomic<int64_t>& graph_ns) {
  auto compute = std::make_unique<SlowQueue>(env, device, graph_ns);
  auto copy = std::make_unique<SlowCopyQueue>(*compute);
  return {std::move(compute), std::move(copy)};
}

}  // namespace hcache::cli
