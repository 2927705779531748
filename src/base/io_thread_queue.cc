// IoQueue over a few threads with blocking transfers, where there is no io_uring or what reads is
// not the system.
#include <algorithm>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "base/sync.h"
#include "posix_io.h"

namespace hcache {
namespace {

constexpr std::size_t kThreads = 4;

class ThreadQueue final : public IoQueue {
 public:
  ThreadQueue(std::size_t depth, ReadFunction read) : depth_(depth), read_(std::move(read)) {
    const std::size_t n = std::min(depth_, kThreads);
    for (std::size_t i = 0; i < n; ++i) threads_.emplace_back([this] { work(); });
  }
  ~ThreadQueue() override {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      wake_.notify_all();
    }
    for (std::thread& t : threads_) t.join();
  }

  Status submit(const IoRequest& request) override {
    if (in_flight_ == depth_) return resource_exhausted("the I/O queue is full");
    MutexLock lock(mutex_);
    todo_.push_back(request);
    ++in_flight_;
    wake_.notify_one();
    return {};
  }

  Status reap(bool block, std::vector<IoCompletion>* out) override {
    MutexLock lock(mutex_);
    while (block && done_.empty() && in_flight_ > 0) finished_.wait(mutex_);
    in_flight_ -= done_.size();
    for (IoCompletion& c : done_) out->push_back(std::move(c));
    done_.clear();
    return {};
  }

  [[nodiscard]] std::size_t in_flight() const override { return in_flight_; }
  [[nodiscard]] std::size_t depth() const override { return depth_; }
  [[nodiscard]] const char* name() const override { return "threads"; }

 private:
  void work() {
    MutexLock lock(mutex_);
    while (true) {
      while (todo_.empty() && !stop_) wake_.wait(mutex_);
      if (todo_.empty()) return;
      const IoRequest request = todo_.front();
      todo_.pop_front();
      lock.unlock();
      IoCompletion done;
      done.tag = request.tag;
      if (request.op == IoOp::kRead) {
        auto got = read_ ? read_(request) : request.file->read_at(request.offset, request.buffer);
        done.status = got.status();
        if (got.ok()) done.bytes = *got;
      } else {
        done.status = request.file->write_at(request.offset, request.buffer);
        if (done.status.ok()) done.bytes = request.buffer.size();
      }
      lock.lock();
      done_.push_back(std::move(done));
      finished_.notify_one();
    }
  }

  const std::size_t depth_;
  const ReadFunction read_;
  std::size_t in_flight_ = 0;  // only the owner's thread counts
  Mutex mutex_;
  CondVar wake_;
  CondVar finished_;
  std::deque<IoRequest> todo_ HCACHE_GUARDED_BY(mutex_);
  std::vector<IoCompletion> done_ HCACHE_GUARDED_BY(mutex_);
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoQueue> new_thread_queue(std::size_t depth, ReadFunction read) {
  return std::make_unique<ThreadQueue>(depth == 0 ? 1 : depth, std::move(read));
}

}  // namespace hcache
