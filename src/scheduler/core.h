// The owner thread's side of the scheduler: the queue, the admitted requests, the idle sequences.
//
//   core.cc       one iteration, how requests end, the snapshot
//   admission.cc  from the queue into the arena: order, room, reuse, the beginning of a restore
//   stepping.cc   steps and slices: rows, tokens, preemption, failures
//
// Threading: the owner thread's.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "inbox.h"
#include "policy/batching.h"
#include "residents.h"
#include "scheduler/drafter.h"
#include "scheduler/scheduler.h"
#include "task.h"

namespace hcache::scheduler {

class Core {
 public:
  // drafter: may be null.
  Core(Executor& executor, const SchedulerOptions& options, Drafter* drafter, Inbox& inbox);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  Activity run_once();
  void finish_chores(const std::function<bool(double)>& goes_on);

 private:
  using TaskList = std::vector<std::unique_ptr<Task>>;

  // ---- core.cc
  void take_inbox();
  void visit(const Inbox::Visit& visit);
  void end_all(const Status& reason);
  void forget(const ForgottenChain& chain);
  // Ends a request and gives its state to the idle sequences, or back (`keep_state` false: it is
  // suspect). The task stays in its list until sweep().
  void end(Task& task, const Status& status, std::string finish_reason, bool keep_state = true);
  void leave_sequence(Task& task, bool keep_state);
  // CaR's asynchronous offload: makes room before a request needs it.
  void offload();
  void sweep();
  // The executor's, where nothing runs or waits. Whether one waits for I/O.
  bool do_chore();
  // Whether there is room for it, if need be after others have left.
  bool make_room_for(const Chore& chore);
  void enter(Task& task, Phase phase, double fraction = 0);
  void publish();
  [[nodiscard]] int64_t level_of(const Task& task, int64_t now_ns) const;
  [[nodiscard]] double since_submit_s(const Task& task) const;

  // ---- admission.cc
  enum class Admission : uint8_t {
    kAdmitted,
    kLater,    // others may overtake: its key is at its limit, or it waits for what another makes
    kBlocked,  // no other may overtake it: it needs room
    kEnded,    // it failed
  };
  [[nodiscard]] bool before(const Task& a, const Task& b, int64_t now_ns) const;
  void sort_queue(int64_t now_ns);
  void order_window(int64_t now_ns);
  // A request was admitted: those before it in the queue's order have been overtaken.
  void note_overtaken(const Task& by, int64_t now_ns);
  [[nodiscard]] policy::ReuseChoice choose_for_queue(Task& task);
  [[nodiscard]] policy::Demand demand_of(const Resident& resident) const;
  void note_group(Task& task, const policy::ReuseChoice& choice) const;
  void enqueue(std::unique_ptr<Task> task);
  // Each tells the Executor, once.
  void leave_queue(Task& task, bool admitted);
  void complete(Task& task);
  void admit();
  // Whether one more may run; or load, which is all that it may do if it `loads_only`.
  [[nodiscard]] bool may_join(bool* loads_only) const;
  // A background request makes way for this one, if need be only one that is being restored. False:
  // there is none without a step in flight, or this one is one itself or could not run.
  [[nodiscard]] bool clear_background(const Task& wanting, bool restores_only = false);
  void admitted(Task& task);
  [[nodiscard]] Admission try_admit(Task& task, bool loads_only);
  [[nodiscard]] Admission apply(Task& task, const policy::ReuseChoice& choice);
  [[nodiscard]] Admission take_over(Task& task, size_t index, int64_t tokens);
  // `held`: by value, since what it is of may go to make room.
  [[nodiscard]] Admission fork(Task& task, SeqId source, int64_t tokens, policy::HeldRows held);
  [[nodiscard]] Admission start_new(Task& task, int64_t restore_tokens);
  [[nodiscard]] Admission no_sequence(Task& task, const Status& status);
  void begin_restore(Task& task, int64_t tokens, std::span<const policy::HeldRows> cuts);
  // Whether the timer says that a request with so many rows to load may come beside a full batch.
  [[nodiscard]] bool loads_ahead(int64_t rows) const;
  [[nodiscard]] bool make_slot(SeqId pinned = kNoSeq);
  [[nodiscard]] policy::ReuseChoice choose(Task& task, int64_t room);
  [[nodiscard]] int64_t saved_prefix(Task& task);
  [[nodiscard]] int64_t headroom(const Task& task) const;
  [[nodiscard]] int64_t room() const;
  [[nodiscard]] int32_t restores_in_flight() const;

  // ---- stepping.cc
  // Rows that a request has in a step.
  struct StepRows {
    Task* task = nullptr;
    int32_t rows = 0;
    [[nodiscard]] LogitsOf logits() const {
      const int64_t end = task->computed + rows;
      if (end > task->length()) return LogitsOf::kAll;  // drafted
      if (task->tells_logits() && end > task->told) return LogitsOf::kAll;
      return end == task->length() && task->max_new > 0 ? LogitsOf::kLast : LogitsOf::kNone;
    }
  };
  void step();
  // What the next step has, of at most so many requests; none of them is in a step in flight.
  [[nodiscard]] std::vector<StepRows> plan_with_room(size_t most_requests);
  // Cuts what can't go on otherwise (AttentionStore §3.4).
  void cut_full();
  [[nodiscard]] bool is_full(const Task& task) const;
  [[nodiscard]] policy::BatchSnapshot snapshot_batch(size_t most_requests);
  void note_decoding(std::span<const StepRows> parts);
  // Guesses what follows the chains of those that are ready, where so many sequences decode.
  void draft(int64_t decoding, int64_t free_cells);
  // How many tokens may be drafted for a task.
  [[nodiscard]] int32_t most_drafted(const Task& task, int64_t decoding, int64_t free_cells) const;
  // How many the drafting model is to guess.
  [[nodiscard]] policy::DraftLength model_length(const Task& task, int64_t decoding,
                                                 const policy::DraftLimits& limits) const;
  [[nodiscard]] policy::DraftCosts draft_costs(int64_t decoding) const;
  [[nodiscard]] static std::vector<StepItem> items_of(std::span<const StepRows> parts);
  void run(std::span<const StepRows> parts);
  // False: it failed, and that has been dealt with.
  [[nodiscard]] bool begin_step(std::vector<StepRows> parts);
  void finish_step();  // the oldest in flight
  void finish_steps();
  // What becomes of a step's requests.
  void settle(std::span<const StepRows> parts, const Result<StepOutput>& output);
  void step_failed(Task& task, const Status& status);
  [[nodiscard]] bool make_way_for(Task& task);
  // `logits`: of those of its rows that gave any.
  void deliver(Task& task, int32_t rows, std::span<const std::span<const float>> logits);
  // The same where tokens were drafted: `logits` are of each row.
  void deliver_draft(Task& task, std::span<const std::span<const float>> logits);
  // Rows of what did not come true go.
  [[nodiscard]] Status drop_ahead(Task& task);
  // The whole chain has its rows: the logits are of its last token.
  void chain_computed(Task& task, std::span<const float> logits);
  void sample(Task& task, std::span<const float> logits);
  [[nodiscard]] bool preempt_one();
  // `keep_state` false: what its sequence holds is suspect.
  void preempt(Task& task, bool keep_state = true);
  void restore();
  // Seconds that restores took beside others, each its fair share.
  [[nodiscard]] double restore_in_turns(double budget_s);
  // The restore that nothing else runs or waits beside; null: there is none.
  [[nodiscard]] Task* lone_restore() const;
  // Restores that are not alone are marked as such.
  void note_company();
  [[nodiscard]] double advance(Task& task, const RestoreTurn& turn);
  void restored(Task& task, RestoreStatus& status);
  void restore_failed(Task& task, const Status& status);
  void count_time(bool restoring, double slices_s);

  Executor& executor_;
  const SchedulerOptions options_;
  Drafter* const drafter_;
  Inbox& inbox_;
  Residents residents_;
  policy::LoadTimer load_timer_;
  TaskList queue_;
  int64_t queue_sorted_ns_ = 0;
  TaskList active_;                              // in order of arrival
  std::vector<Task*> ready_;                     // of the step being planned
  std::deque<std::vector<StepRows>> in_flight_;  // steps, oldest first
  bool progressed_ = false;                      // something changed in this iteration
  bool unswept_ = false;                         // tasks have ended since sweep()

  // The current iteration's step.
  bool stepped_ = false;
  bool decoding_ = false;  // it has decode rows
  double stalled_s_ = 0;   // in the restores' slices of this iteration
  double step_s_ = 0;      // as the Executor measured it
  double restore_debt_s_ = 0;
  uint64_t last_restore_ = 0;

  Snapshot totals_;  // counters; publish() adds what is now
};

}  // namespace hcache::scheduler
