// Threads that run tasks one after the other, in the order given.
//
// Threading: any thread.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "base/sync.h"

namespace hcache {

class WorkQueue {
 public:
  // With one thread, tasks never run at the same time.
  explicit WorkQueue(int n_threads) {
    for (int i = 0; i < n_threads; ++i) threads_.emplace_back([this] { work(); });
  }
  // Runs what was given, then ends.
  ~WorkQueue() {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      wake_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
  }
  WorkQueue(const WorkQueue&) = delete;
  WorkQueue& operator=(const WorkQueue&) = delete;

  void post(std::function<void()> task) {
    MutexLock lock(mutex_);
    tasks_.push_back(std::move(task));
    wake_.notify_one();
  }
  [[nodiscard]] size_t size() const {
    MutexLock lock(mutex_);
    return tasks_.size();
  }

 private:
  void work() {
    MutexLock lock(mutex_);
    while (true) {
      while (tasks_.empty() && !stop_) wake_.wait(mutex_);
      if (tasks_.empty()) return;
      std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // what it holds goes before the lock is taken again
      lock.lock();
    }
  }

  mutable Mutex mutex_;
  CondVar wake_;
  std::deque<std::function<void()>> tasks_ HCACHE_GUARDED_BY(mutex_);
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace hcache
