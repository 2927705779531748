// Continuous batching with a restoration phase (HCache §4, §5): the life of every request
// between the server and the engine.
//
//   queued → fetching → restoring → prefill → decoding → done (or cancelled, failed)
//
// One thread owns a Scheduler and runs its loop:
//
//   while (serving) {
//     if (scheduler->run_once() != Activity::kWorked) scheduler->wait_for_work(1'000'000);
//   }
//
// What a request is answered never depends on what else happens to it: restored, forked, preempted
// or not, next() sees the logits of its own chain of tokens.
//
// Rules that callers may rely on (the decisions themselves are in policy/batching.h):
//  - A step has at most max_step_tokens rows: decode rows first, then prefill in order of arrival.
//  - While anything decodes, restores make a step at most restore.share longer; what one slice
//    overdraws is taken from the following steps. Restores in flight read at the same time and get
//    equal shares of the compute. With restore.exclusive nothing else is computed meanwhile.
//  - A restore that nothing else runs or waits beside has the device to itself, until something
//    arrives: it may wait for its bytes, and the prefill follows it layer by layer.
//  - What outgrows the context is refused, or cut where that is asked for (policy/truncation.h);
//    what a request is answered then depends on its tokens and limits alone, too.
//  - A sequence stays in the arena when its request ends, and a later request with the same salt
//    goes on from it. Idle sequences go, by the eviction policy, when room is wanted; what is not
//    durable yet is flushed first, while other work goes on.
//  - When decoding finds no room even so, the youngest request is preempted: it goes to the front
//    of the queue and is resumed later. A request is admitted only if the arena can hold its chain
//    beside those of the others, so this is rare.
//  - No request starves: the queue is in order of level and arrival, levels rise with waiting, and
//    a first request that does not fit keeps the others from overtaking.
//  - Background requests come after all others: in the queue, in the prefill of a step and in
//    restores. When another request finds no place, no room or too many restores in flight, the
//    youngest of them is preempted, and none is admitted while another waits for more than its
//    key's limit. They count against no limit of the queue or of a key, and may starve.
//
// Threading: submit, cancel, forget, drain, stop_all, wake, visit_idle, queued, running and stats
// may be called from any thread; everything else, construction and destruction included, belongs to
// the owner thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "policy/batching.h"
#include "policy/drafting.h"
#include "policy/eviction.h"
#include "policy/fetch.h"
#include "policy/queue.h"
#include "scheduler/executor.h"
#include "scheduler/request.h"

namespace hcache::scheduler {

struct SchedulerOptions {
  // max_step_tokens and max_sequences are cut to the Executor's limits.
  policy::BatchLimits batch = {};
  policy::RestoreLimits restore = {};
  policy::ReuseLimits reuse = {};
  policy::QueueLimits queue = {};
  // Tokens of answers that are guessed from their conversation, or by the drafter, computed along
  // with the next one and kept where they are what next() gives. Off unless set.
  policy::DraftLimits draft = {};
  // Which idle sequence leaves the arena.
  policy::EvictPolicy evict = policy::EvictPolicy::kSchedulerAware;
  // Of the arena: above it idle sequences leave whose state is durable (CaR §III-C.2 has 0.9).
  // Nothing has to be copied then, so keeping them until room is wanted (1) costs nothing either.
  // 0: none stays.
  double offload_above = 1;
  // What is read before its turn comes. The scheduler does kCarTimer's part, Executors the others'.
  policy::FetchPolicy fetch = policy::FetchPolicy::kOnDemand;
  int32_t max_restores = 4;  // in flight; each holds buffers of the Executor
  // Cells kept for every running request to decode into: the next one is admitted, and prefill goes
  // on, only beside them.
  int64_t decode_headroom = 32;
  int64_t max_queued = 256;
  int64_t max_queued_per_key = 0;   // 0: no such limit
  int64_t max_running_per_key = 0;  // 0: no such limit
  double aging_s = 30;              // waiting this long raises a request's level by one
  double flush_wait_s = 5;          // an eviction waits so long for a flush at most
};

enum class Activity : uint8_t {
  kWorked,   // call again at once
  kWaiting,  // requests wait for storage: call again in about a millisecond, or on wake()
  kIdle,     // nothing to do until something is submitted
};

enum class EvictionReason : uint8_t { kAdmission, kGrowth, kSlots, kOffload, kChores };
inline constexpr size_t kEvictionReasons = 5;
[[nodiscard]] std::string_view eviction_reason_name(EvictionReason reason);  // "admission", …

struct ResidentSequence {
  SeqId seq = kNoSeq;  // stays while the sequence does, whichever request uses it
  int64_t tokens = 0;  // rows it holds or has reserved
  bool idle = false;
};

// What an idle sequence holds.
struct IdleSequence {
  std::vector<int32_t> tokens;
  Salt salt;
  int64_t durable_tokens = 0;  // kNotSaving: no more will be
};
using IdleVisitor = std::function<void(Result<IdleSequence>)>;

// As of the end of the last run_once(); queued is up to date.
struct Snapshot {
  // Requests now.
  int64_t queued = 0;
  int64_t fetching = 0;
  int64_t restoring = 0;
  int64_t prefill = 0;
  int64_t decoding = 0;
  // Requests so far.
  uint64_t submitted = 0;
  uint64_t refused = 0;
  uint64_t done = 0;
  uint64_t cancelled = 0;
  uint64_t failed = 0;
  uint64_t preemptions = 0;
  // The arena, in cells.
  int64_t arena_cells = 0;
  int64_t active_cells = 0;
  int64_t idle_cells = 0;
  std::vector<ResidentSequence> resident;
  std::array<uint64_t, kEvictionReasons> evictions{};  // by EvictionReason
  uint64_t evicted_unsaved = 0;                        // of those: state that has to be recomputed
  // Steps so far, apart from those with a restore in flight.
  uint64_t steps = 0;
  double step_s = 0;
  uint64_t restore_steps = 0;   // steps with a restore in flight
  double restore_step_s = 0;    // their time, slices included
  double restore_slices_s = 0;  // slices in those steps
  double restore_alone_s = 0;   // slices in iterations without a step
  // The longest of the steps in which something decoded, slices included, over its time without.
  double restore_stretch_max = 0;
  // The same without what of the slices the machine ran something else in (base/stall.h).
  double restore_stretch_own_max = 0;
  uint64_t failed_steps = 0;
  uint64_t decode_rows = 0;  // of tokens that were kept
  uint64_t prefill_rows = 0;
  uint64_t drafts = 0;  // steps of a sequence with guessed tokens
  uint64_t drafted_tokens = 0;
  uint64_t accepted_tokens = 0;
};

class Inbox;
class Core;
class Drafter;

class Scheduler {
 public:
  // Executor and drafter (null: none) must outlive the scheduler. kInvalidArgument names the
  // option.
  static Result<std::unique_ptr<Scheduler>> create(Executor& executor,
                                                   const SchedulerOptions& options,
                                                   Drafter* drafter = nullptr);
  // Ends what is left as by stop_all(), and releases every sequence.
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // ---- Any thread

  // Queues a request. Errors, after which none of its functions is called:
  //   kInvalidArgument    no tokens, no next(), or logits wanted from beyond the prompt
  //   kOutOfRange         the prompt is longer than the context or the arena, and truncation not
  //                       asked for, or not possible; names both numbers and says why
  //   kResourceExhausted  the queue, or the key's part of it, is full; *retry_after_s, if given, is
  //                       set to an estimate of when there will be room, from recent completions
  //   kUnavailable        draining
  [[nodiscard]] Result<RequestId> submit(Request request, double* retry_after_s = nullptr);
  // Ends a request with kCancelled in the next run_once(); its state stays resident if useful.
  // Nothing happens if it has ended.
  void cancel(RequestId id);
  // Drops a chain from the arena in the next run_once(): idle sequences of this salt lose the rows
  // that they have in common with `tokens`, and what follows them, except for the first `keep`,
  // which another chain still needs. What a request in the queue or running shares stays as well.
  void forget(const SaltId& salt, std::vector<int32_t> tokens, int64_t keep = 0);
  // Accepts nothing more; what is there goes on to its end.
  void drain();
  // drain(), and the next run_once() ends everything with `reason` (not ok).
  void stop_all(Status reason);
  // Ends a wait_for_work(): something became ready in the background.
  void wake();
  // Looks at an idle sequence in the next run_once(), and with `release` gives its cells back then.
  // `done` is called exactly once, there, and must not block: kNotFound if there is none of that
  // id, kUnavailable if a request runs on it.
  void visit_idle(SeqId seq, bool release, IdleVisitor done);
  [[nodiscard]] int64_t queued() const;   // preempted ones included
  [[nodiscard]] int64_t running() const;  // admitted
  [[nodiscard]] Snapshot stats() const;

  // ---- Owner thread

  // One iteration: takes submissions and cancellations, admits, runs one step, hands out its
  // tokens, and gives restores their slices.
  Activity run_once();
  // What the executor's chores do that outlasts the process, now, unless something runs or waits;
  // until `goes_on` (may be empty), which is told how much of it is done, gives false.
  void finish_chores(const std::function<bool(double fraction)>& goes_on);
  // Blocks until something is submitted, cancelled or woken, at most timeout_ns. True if so.
  bool wait_for_work(int64_t timeout_ns);

 private:
  Scheduler(std::unique_ptr<Inbox> inbox, std::unique_ptr<Core> core);
  std::unique_ptr<Inbox> inbox_;
  std::unique_ptr<Core> core_;
};

}  // namespace hcache::scheduler
