// Mutex and condition variable that clang's -Wthread-safety can follow.
//
// Threading: that is what they are for. Guarded data says HCACHE_GUARDED_BY(mutex), a function that
// wants the lock held says HCACHE_REQUIRES(mutex). Under other compilers the macros are empty.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#if defined(__clang__)
#define HCACHE_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define HCACHE_THREAD_ANNOTATION(x)
#endif

#define HCACHE_CAPABILITY HCACHE_THREAD_ANNOTATION(capability("mutex"))
#define HCACHE_SCOPED_CAPABILITY HCACHE_THREAD_ANNOTATION(scoped_lockable)
#define HCACHE_GUARDED_BY(m) HCACHE_THREAD_ANNOTATION(guarded_by(m))
#define HCACHE_PT_GUARDED_BY(m) HCACHE_THREAD_ANNOTATION(pt_guarded_by(m))
#define HCACHE_REQUIRES(...) HCACHE_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define HCACHE_EXCLUDES(...) HCACHE_THREAD_ANNOTATION(locks_excluded(__VA_ARGS__))
#define HCACHE_ACQUIRE(...) HCACHE_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define HCACHE_TRY_ACQUIRE(...) HCACHE_THREAD_ANNOTATION(try_acquire_capability(__VA_ARGS__))
#define HCACHE_RELEASE(...) HCACHE_THREAD_ANNOTATION(release_capability(__VA_ARGS__))
#define HCACHE_ACQUIRED_AFTER(...) HCACHE_THREAD_ANNOTATION(acquired_after(__VA_ARGS__))
#define HCACHE_ASSERT_CAPABILITY(x) HCACHE_THREAD_ANNOTATION(assert_capability(x))
// For a function that takes a lock for its caller to release later; a comment says who does.
#define HCACHE_NO_THREAD_SAFETY_ANALYSIS HCACHE_THREAD_ANNOTATION(no_thread_safety_analysis)

namespace hcache {

class HCACHE_CAPABILITY Mutex {
 public:
  void lock() HCACHE_ACQUIRE() { mutex_.lock(); }
  [[nodiscard]] bool try_lock() HCACHE_TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() HCACHE_RELEASE() { mutex_.unlock(); }
  // Tells the analysis what it can't see: the lock is held here. Does nothing.
  void assert_held() const HCACHE_ASSERT_CAPABILITY(this) {}

 private:
  friend class CondVar;
  std::mutex mutex_;
};

// Holds a Mutex for a scope; may be released and taken again inside it.
class HCACHE_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) HCACHE_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() HCACHE_RELEASE() {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void unlock() HCACHE_RELEASE() {
    mutex_.unlock();
    held_ = false;
  }
  void lock() HCACHE_ACQUIRE() {
    mutex_.lock();
    held_ = true;
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

// Wakes may be spurious: wait in a loop that checks the condition.
class CondVar {
 public:
  void wait(Mutex& mutex) HCACHE_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    cv_.wait(lock);
    lock.release();
  }
  // Waits at most `ns` nanoseconds of real time.
  void wait_for_ns(Mutex& mutex, std::int64_t ns) HCACHE_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    cv_.wait_for(lock, std::chrono::nanoseconds(ns));
    lock.release();
  }
  void notify_one() { cv_.notify_one(); }
  void notify_all() { cv_.notify_all(); }

 private:
  std::condition_variable cv_;
};

}  // namespace hcache
