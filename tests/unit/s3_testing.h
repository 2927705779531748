// An S3 server in memory, behind the client's interface, for tests that need no network.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "base/sync.h"
#include "patience.h"
#include "s3/s3_client.h"

namespace hcache::store::testing {

// The bucket. Threading: any thread.
class FakeBucket {
 public:
  Result<std::string> answer(const S3Call& call) HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    ++requests_[call.method];
    if (call.method == "PUT") {
      objects_[call.key] = *call.body;
      return std::string();
    }
    const auto at = objects_.find(call.key);
    if (at == objects_.end()) return not_found(call.key + " is not there");
    if (call.method == "DELETE") {
      objects_.erase(at);
      return std::string();
    }
    bytes_read_ += call.bytes > 0 ? call.bytes : at->second.size();
    if (call.bytes == 0) return at->second;
    if (call.offset >= at->second.size()) return data_loss(call.key + " is shorter");
    std::string part = at->second.substr(call.offset, call.bytes);
    if (part.size() < call.bytes && !call.at_most) return data_loss(call.key + " is shorter");
    return part;
  }
  std::map<std::string, std::string> objects() HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return objects_;
  }
  void put(const std::string& key, std::string body) HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    objects_[key] = std::move(body);
  }
  // Of a method, so far.
  int requests(const std::string& method) HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return requests_[method];
  }
  std::uint64_t bytes_read() HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    return bytes_read_;
  }

 private:
  Mutex mutex_;
  std::map<std::string, std::string> objects_ HCACHE_GUARDED_BY(mutex_);
  std::map<std::string, int> requests_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t bytes_read_ HCACHE_GUARDED_BY(mutex_) = 0;
};

// Answers on a thread of its own, one call after the other, like the real one.
class FakeS3Client : public S3Client {
 public:
  explicit FakeS3Client(std::shared_ptr<FakeBucket> bucket) : bucket_(std::move(bucket)) {
    thread_ = std::thread([this] { run(); });
  }
  ~FakeS3Client() override {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      wake_.notify_all();
    }
    thread_.join();
    for (const S3Call& call : calls_) call.done(cancelled("the client is gone"));
  }
  FakeS3Client(const FakeS3Client&) = delete;
  FakeS3Client& operator=(const FakeS3Client&) = delete;

  void call(S3Call call) override HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    calls_.push_back(std::move(call));
    wake_.notify_all();
  }
  [[nodiscard]] bool available() const override { return true; }
  // Until resume() nothing that is called is answered.
  void pause() HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    paused_ = true;
  }
  void resume() HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    paused_ = false;
    wake_.notify_all();
  }
  // Waits until so many calls are held by pause().
  [[nodiscard]] bool holds(std::size_t n) {
    return hcache::test::eventually([&]() HCACHE_EXCLUDES(mutex_) {
      MutexLock lock(mutex_);
      return calls_.size() >= n;
    });
  }

 private:
  void run() HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    while (!stop_) {
      if (calls_.empty() || paused_) {
        wake_.wait(mutex_);
        continue;
      }
      const S3Call call = std::move(calls_.front());
      calls_.pop_front();
      lock.unlock();
      call.done(bucket_->answer(call));
      lock.lock();
    }
  }

  const std::shared_ptr<FakeBucket> bucket_;
  Mutex mutex_;
  CondVar wake_;
  std::deque<S3Call> calls_ HCACHE_GUARDED_BY(mutex_);
  bool paused_ HCACHE_GUARDED_BY(mutex_) = false;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace hcache::store::testing
