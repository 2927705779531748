// What a remote tier has under way in the background and what it has done: one account for every
// kind of tier, behind its write limit, flush() and stat().
//
// Threading: any thread.
#pragma once

#include <cstdint>
#include <string>

#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"
#include "store/store.h"

namespace hcache::store {

class TierAccount {
 public:
  // `name` is the tier's in messages; at most `queue_bytes` may wait to be written.
  TierAccount(Env& env, std::string name, std::uint64_t queue_bytes)
      : env_(env), name_(std::move(name)), queue_bytes_(queue_bytes) {}

  // ---- Background work

  // Pages that are to be written. False: the tier does not answer or too much waits already; they
  // count as skipped. What is accepted ends with written() or dropped().
  [[nodiscard]] bool accept(std::uint64_t pages, std::uint64_t bytes, bool available)
      HCACHE_EXCLUDES(mutex_);
  void written(std::uint64_t pages, std::uint64_t bytes) HCACHE_EXCLUDES(mutex_);
  // Accepted, and not written after all.
  void dropped(std::uint64_t bytes) HCACHE_EXCLUDES(mutex_);

  // A piece of work begins; what follows from it begins before it ends.
  void begin() HCACHE_EXCLUDES(mutex_);
  // kCancelled is no failure.
  void end(const Status& status) HCACHE_EXCLUDES(mutex_);

  // ---- Reads

  void begin_read() HCACHE_EXCLUDES(mutex_);
  // kCancelled and kNotFound are no failures.
  void end_read(const Status& status, std::uint64_t bytes) HCACHE_EXCLUDES(mutex_);

  // ---- All of it

  // Waits until no work is under way. unavailable at the deadline (monotonic).
  [[nodiscard]] Status flush(std::int64_t deadline_ns) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] RemoteStat stat(bool available) const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  Env& env_;
  const std::string name_;
  const std::uint64_t queue_bytes_;
  mutable Mutex mutex_;
  CondVar idle_;
  RemoteStat stat_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t work_ HCACHE_GUARDED_BY(mutex_) = 0;   // begun, not ended
  std::uint64_t reads_ HCACHE_GUARDED_BY(mutex_) = 0;  // in flight
  std::int64_t reading_since_ns_ HCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace hcache::store
