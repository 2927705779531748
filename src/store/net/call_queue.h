// The calls of a client that works on a thread of its own: handed over by any thread, held until
// each has ended, by its deadline at the latest, and put aside where they are to be tried again.
//
// Threading: push() and stop() from any thread, all else on the client's.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <memory>
#include <utility>
#include <vector>

#include "base/sync.h"

namespace hcache::store {

// What the queue must know of a call; times are monotonic nanoseconds.
struct QueuedCall {
  std::int64_t deadline_ns = 0;
  std::int64_t not_before_ns = 0;
  bool finished = false;  // its caller has heard
};

template <typename Call>  // a QueuedCall
class CallQueue {
 public:
  using Ptr = std::shared_ptr<Call>;

  // True: nothing was waiting to be taken, so the client's thread has to be woken.
  [[nodiscard]] bool push(Ptr call) HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    inbox_.push_back(std::move(call));
    return inbox_.size() == 1;
  }
  // The client's thread has to be woken.
  void stop() HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    stop_ = true;
  }

  // Appends what was pushed since, in order. False: stop() was called.
  [[nodiscard]] bool take(std::vector<Ptr>* fresh) HCACHE_EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    for (Ptr& call : inbox_) {
      open_.push_back(call);
      fresh->push_back(std::move(call));
    }
    inbox_.clear();
    return !stop_;
  }
  // To be taken as due from `not_before_ns` on.
  void again(Ptr call, std::int64_t not_before_ns) {
    call->not_before_ns = not_before_ns;
    again_.push_back(std::move(call));
  }
  // What is to be tried again by now; what has ended meanwhile is left out.
  [[nodiscard]] std::vector<Ptr> take_due(std::int64_t now_ns) {
    std::vector<Ptr> due;
    std::erase_if(again_, [&](Ptr& call) {
      if (call->not_before_ns > now_ns) return false;
      if (!call->finished) due.push_back(std::move(call));
      return true;
    });
    return due;
  }
  // Forgets what has ended and takes what is past its deadline: the caller ends that.
  [[nodiscard]] std::vector<Ptr> take_late(std::int64_t now_ns) {
    std::vector<Ptr> late;
    open_.remove_if([&](const Ptr& call) {
      if (!call->finished && now_ns < call->deadline_ns) return false;
      if (!call->finished) late.push_back(call);
      return true;
    });
    return late;
  }
  // All that has not ended, to be ended: at the client's end.
  [[nodiscard]] std::vector<Ptr> take_all() {
    again_.clear();
    std::vector<Ptr> out;
    for (Ptr& call : open_) {
      if (!call->finished) out.push_back(std::move(call));
    }
    open_.clear();
    return out;
  }
  // Nothing was taken that has not been forgotten.
  [[nodiscard]] bool empty() const { return open_.empty(); }
  // How long until something is due again, at most `longest_ns`.
  [[nodiscard]] std::int64_t nap_ns(std::int64_t now_ns, std::int64_t longest_ns) const {
    std::int64_t nap = longest_ns;
    for (const Ptr& call : again_) nap = std::min(nap, call->not_before_ns - now_ns);
    return std::max<std::int64_t>(nap, 0);
  }

 private:
  Mutex mutex_;
  std::vector<Ptr> inbox_ HCACHE_GUARDED_BY(mutex_);
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;

  // The client's thread's own.
  std::list<Ptr> open_;  // taken and not ended, wherever they are
  std::vector<Ptr> again_;
};

}  // namespace hcache::store
