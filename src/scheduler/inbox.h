// The side of the scheduler that other threads see: submissions and cancellations on their way in,
// who counts against which limit, and the last snapshot on its way out.
//
// Threading: any thread, except where a function says that it is the owner's.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/sync.h"
#include "scheduler/scheduler.h"
#include "task.h"

namespace hcache::scheduler {

// A chain whose rows are to be dropped; see Scheduler::forget().
struct ForgottenChain {
  SaltId salt;
  std::vector<int32_t> tokens;
  int64_t keep = 0;
};

class Inbox {
 public:
  // The limits are fixed; of the executor only now_ns() is used afterwards.
  Inbox(const Executor& executor, const SchedulerOptions& options);

  [[nodiscard]] Result<RequestId> submit(Request request, double* retry_after_s)
      HCACHE_EXCLUDES(mutex_);
  void cancel(RequestId id) HCACHE_EXCLUDES(mutex_);
  void forget(ForgottenChain chain) HCACHE_EXCLUDES(mutex_);
  void drain() HCACHE_EXCLUDES(mutex_);
  void stop_all(Status reason) HCACHE_EXCLUDES(mutex_);
  void wake() HCACHE_EXCLUDES(mutex_);
  struct Visit {
    SeqId seq = kNoSeq;
    bool release = false;
    IdleVisitor done;
  };
  void visit_idle(Visit visit) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] int64_t queued() const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] int64_t running() const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] Snapshot stats() const HCACHE_EXCLUDES(mutex_);

  // ---- Owner thread

  struct Delivery {
    std::vector<std::unique_ptr<Task>> submitted;
    std::vector<RequestId> cancelled;
    std::vector<Visit> visits;
    std::vector<ForgottenChain> forgotten;
    Status stop;  // not ok: end everything with it
  };
  [[nodiscard]] Delivery take() HCACHE_EXCLUDES(mutex_);
  bool wait(int64_t timeout_ns) HCACHE_EXCLUDES(mutex_);
  // Whether anything came since take().
  [[nodiscard]] bool signalled() const HCACHE_EXCLUDES(mutex_);

  // The way of a request: queued, running (and back, when preempted), ended.
  // Whether its key's limit allows one more to run.
  [[nodiscard]] bool may_run(const Task& task) const HCACHE_EXCLUDES(mutex_);
  void started(const Task& task) HCACHE_EXCLUDES(mutex_);
  void requeued(const Task& task) HCACHE_EXCLUDES(mutex_);
  void ended(const Task& task, bool was_running) HCACHE_EXCLUDES(mutex_);
  // The snapshot that stats() gives out; the counts that the inbox keeps itself are filled in.
  void publish(Snapshot snapshot) HCACHE_EXCLUDES(mutex_);

 private:
  struct Count {
    int64_t queued = 0;
    int64_t running = 0;
  };

  [[nodiscard]] Status check(const Request& request) const;
  // What its sequence is cut by; nothing is cut where that is not asked for, or not possible.
  [[nodiscard]] policy::TruncationLimits limits_of(const Request& request) const;
  // Of one that asks for it.
  [[nodiscard]] policy::TruncationLimits wanted_limits(const Request& request) const;
  [[nodiscard]] Status check_cuts(const Request& request) const;
  [[nodiscard]] Status check_room(const Request& request) HCACHE_REQUIRES(mutex_);
  // What a request counts against, beside the total.
  [[nodiscard]] Count& count_of(const Request& request) HCACHE_REQUIRES(mutex_);
  [[nodiscard]] double retry_after_s() const HCACHE_REQUIRES(mutex_);

  const Executor& executor_;
  const SchedulerOptions options_;
  const int64_t context_;
  const int64_t arena_cells_;
  const std::string why_no_cuts_;
  const bool chooses_;  // which rows stay, by attention
  const bool media_;

  mutable Mutex mutex_;
  CondVar changed_;
  Delivery delivery_ HCACHE_GUARDED_BY(mutex_);
  bool signalled_ HCACHE_GUARDED_BY(mutex_) = false;
  bool draining_ HCACHE_GUARDED_BY(mutex_) = false;
  RequestId last_id_ HCACHE_GUARDED_BY(mutex_) = 0;
  Count total_ HCACHE_GUARDED_BY(mutex_);
  Count background_ HCACHE_GUARDED_BY(mutex_);  // of the total: no limit counts them
  std::map<std::string, Count> keys_ HCACHE_GUARDED_BY(mutex_);   // the rest
  std::deque<int64_t> completions_ns_ HCACHE_GUARDED_BY(mutex_);  // the last few
  uint64_t refused_ HCACHE_GUARDED_BY(mutex_) = 0;
  Snapshot snapshot_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::scheduler
