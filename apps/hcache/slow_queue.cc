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

void SlowQueue::give(std::function<void()> work) {
  const MutexLock lock(mutex_);
  given_.push_back(std::move(work));
  changed_.notify_all();
}

void SlowQueue::work() {
  MutexLock lock(mutex_);
  for (;;) {
    while (given_.empty() && !stop_) changed_.wait(mutex_);
    if (given_.empty()) return;
    const std::function<void()> work = std::move(given_.front());
    given_.pop_front();
    busy_ = true;
    lock.unlock();
    work();
    lock.lock();
    busy_ = false;
    changed_.notify_all();
  }
}

void SlowQueue::synchronize() {
  const MutexLock lock(mutex_);
  while (busy_ || !given_.empty()) changed_.wait(mutex_);
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

}  // namespace hcache::cli
