// The scheduler's Executor over a real engine with its store, saver and restorer.
//
// Threading: the scheduler's owner thread, which becomes the engine's (Runtime: one thread).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "engine/pipeline.h"
#include "policy/drafting.h"
#include "policy/fetch.h"
#include "policy/restore_plan.h"
#include "scheduler/executor.h"
#include "state/chosen_rows.h"
#include "state/kept_state.h"
#include "state/read_ahead.h"
#include "state/restorer.h"
#include "state/runtime.h"
#include "state/saver.h"
#include "state/second_reading.h"

namespace hcache::serving {

struct EngineExecutorOptions {
  int32_t max_sequences = 64;  // that exist at a time, idle ones included
  int64_t max_context = 0;     // rows of one; 0: as many as the model and the arena have
  uint64_t restore_ring_bytes = 64U << 20;  // read-ahead of a restore that begins alone
  uint64_t beside_ring_bytes = 16U << 20;   // of one that begins beside others
  // What is brought into host memory for requests that wait, if there is any (dram_bytes).
  policy::FetchPolicy fetch = policy::FetchPolicy::kOnDemand;
  uint64_t dram_bytes = 0;
};

class EngineExecutor : public scheduler::Executor {
 public:
  // env and runtime must outlive it.
  EngineExecutor(Env& env, state::Runtime& runtime, const EngineExecutorOptions& options);
  ~EngineExecutor() override;

  const scheduler::ExecutorLimits& limits() const override { return limits_; }
  int64_t now_ns() const override { return env_.monotonic_ns(); }
  int64_t free_cells() const override { return runtime_.engine().arena_free_cells(); }

  Result<scheduler::SeqId> create(const Salt& salt, bool save) override;
  Result<scheduler::SeqId> fork(scheduler::SeqId src, int64_t n_tokens, bool save) override;
  Status cut(scheduler::SeqId seq, std::span<const int32_t> chain,
             const policy::HeldRows& held) override;
  Status trim(scheduler::SeqId seq, int64_t n_tokens) override;
  [[nodiscard]] int64_t shortest(scheduler::SeqId seq) const override;
  [[nodiscard]] int64_t cells(scheduler::SeqId seq, int64_t rows) const override;
  void release(scheduler::SeqId seq) override;

  // A match in the store. A known one that may have become longer is looked for again, since a
  // chunk of it may have been extended.
  Result<scheduler::SavedPrefixRef> saved_prefix(const Salt& salt, std::span<const int32_t> tokens,
                                                 std::span<const policy::HeldRows> cuts,
                                                 const scheduler::SavedPrefixRef& known) override;
  Status begin_restore(scheduler::SeqId seq, const scheduler::RestoreJob& job) override;
  Result<scheduler::RestoreStatus> advance_restore(scheduler::SeqId seq,
                                                   const scheduler::RestoreTurn& turn) override;
  [[nodiscard]] double restore_s(int64_t tokens) const override;
  [[nodiscard]] double step_s(int64_t rows) const override { return step_pace_.at(rows); }
  void enqueued(const scheduler::Waiting& request) override;
  void dequeued(uint64_t ticket, bool admitted) override;
  void completed(uint64_t ticket) override;
  void request_flush(scheduler::SeqId seq) override;
  int64_t durable_tokens(scheduler::SeqId seq) override;

  Result<scheduler::StepOutput> step(std::span<const scheduler::StepItem> items) override;
  [[nodiscard]] int32_t steps_in_flight(int64_t sequences) const override;
  Status begin_step(std::span<const scheduler::StepItem> items) override;
  Result<scheduler::StepOutput> finish_step() override;

  // Of idle sequences with a budget: which of their rows are to stay.
  [[nodiscard]] scheduler::Chore chore() const override;
  bool work_on(const scheduler::Chore& chore) override;
  void leave_chores() override;

  // Read from disks for requests that waited; any thread.
  [[nodiscard]] uint64_t bytes_read_ahead() const;

 private:
  struct Restore;
  struct Prefix;
  // A request in the queue that will restore its tokens.
  struct Ahead {
    std::shared_ptr<const Prefix> prefix;
    std::span<const int32_t> tokens;  // one more than it restores
    scheduler::RestoreMethod method;
  };
  struct Sequence {
    Salt salt;
    bool save = false;
    std::vector<policy::HeldRows> cuts = {};      // that were made
    std::vector<state::ChosenBlock> chosen = {};  // at the last of them
    std::unique_ptr<Restore> restore;
    // With a budget of rows: the tokens, and how many of them the last snapshot of kept rows stands
    // for (state/kept_state.h).
    std::vector<int32_t> tokens = {};
    int64_t kept_at = 0;
    // What its rows are chosen by, and from how many of them that is to be done; 0: not now.
    state::SecondReading reading = {};
    int64_t to_choose = 0;
    std::optional<state::KeptSnapshot> snapshot = {};  // of that, which has begun
    bool lacks_rows = false;  // that a restore left on the disks, and that may follow
    bool follows = false;     // it is what another one's rows come into, all of them

    [[nodiscard]] bool budgeted() const { return salt.kv_budget < 1; }
  };

  Result<Sequence*> find(scheduler::SeqId seq);
  [[nodiscard]] static state::SavedCut last_cut(const Sequence& sequence);
  // The blocks of a full sequence that are to stay, by their first rows.
  Result<std::vector<int64_t>> choose(scheduler::SeqId seq, std::span<const int32_t> chain,
                                      const Sequence& sequence, const policy::HeldRows& held);
  // No cut of the sequence is left.
  static void forget_cuts(Sequence& sequence) {
    sequence.cuts.clear();
    sequence.chosen.clear();
  }
  // Plans what is left to try and begins reading; the sequence is empty.
  Status open_restore(scheduler::SeqId seq, Sequence& sequence);
  // Of the first `upto` tokens, what their sequence holds: all of it, or nothing if it was cut.
  Status plan_restore(Sequence& sequence, int64_t upto);
  [[nodiscard]] state::RestoreRun restore_run(scheduler::SeqId seq, Sequence& sequence);
  Result<scheduler::RestoreStatus> end_restore(scheduler::SeqId seq, Sequence& sequence);
  // Too much of it is damaged: what is left is matched and planned anew.
  Status restart(scheduler::SeqId seq, Sequence& sequence);
  // Of a chain with a budget: the last snapshot of kept rows, where it brings the first token
  // earlier than what is planned, all rows; none: it doesn't, or there is none.
  struct KeptChoice {
    int64_t n_tokens = 0;  // that it stands for
    store::ChunkRef chunk;
    policy::Prediction predicted;
  };
  [[nodiscard]] Result<KeptChoice> choose_kept(const Sequence& sequence) const;
  Status open_kept(scheduler::SeqId seq, Sequence& sequence, const KeptChoice& choice);
  // The sequence of a chain with a budget has come to so many tokens.
  static void note_restored(const Restore& restore, int64_t n_tokens, Sequence& sequence);
  // The rows that layers are to keep of an idle sequence are saved beside all of them, or will be
  // once they have been chosen.
  void save_kept(scheduler::SeqId seq, Sequence& sequence);
  // Reads a part; behind the last one a layer's rows are chosen.
  void read_once_more(scheduler::SeqId seq, Sequence& sequence);
  [[nodiscard]] Status choose_layer(scheduler::SeqId seq, Sequence& sequence);
  // The rows of a choice that is not made yet change.
  static void drop_choice(Sequence& sequence) {
    sequence.to_choose = 0;
    sequence.snapshot.reset();
  }
  // All rows of a sequence that lacks some come into another one, which takes its place then.
  [[nodiscard]] bool may_fetch_rest(scheduler::SeqId seq, const Sequence& sequence) const;
  [[nodiscard]] Status begin_rest(scheduler::SeqId seq);
  // False: it waits for I/O.
  [[nodiscard]] Result<bool> fetch_rest(scheduler::SeqId seq);
  void keep(scheduler::SeqId seq, Sequence& sequence, int64_t n_tokens,
            std::vector<std::byte> snapshot);
  // The saver takes the sequence up from `tokens`, which are saved already, unless it is not saved.
  void begin_saving(scheduler::SeqId seq, const Sequence& sequence, std::span<const int32_t> tokens,
                    store::ChunkRef tail);
  [[nodiscard]] int64_t slice_rows(double budget_s) const;
  [[nodiscard]] int64_t follow_rows(double budget_s, int64_t history) const;
  // Has what comes next read ahead.
  void fetch();
  [[nodiscard]] Status begin_fetch(uint64_t ticket);

  Env& env_;
  state::Runtime& runtime_;
  const EngineExecutorOptions options_;
  scheduler::ExecutorLimits limits_;
  std::unordered_map<scheduler::SeqId, Sequence> sequences_;
  // The sequence that all rows of `lacking` are coming into.
  struct Rest {
    scheduler::SeqId lacking = scheduler::kNoSeq;
    scheduler::SeqId whole = scheduler::kNoSeq;
  };
  std::optional<Rest> rest_;
  engine::Pipeline pipeline_;
  std::vector<policy::CostCurve> stage_costs_;  // of those that overlap; empty: none do
  struct Begun {
    int64_t ns = 0;
    int64_t rows = 0;
  };
  std::deque<Begun> begun_;  // the steps in flight
  policy::StepPace step_pace_;
  int64_t last_step_ns_ = 0;                   // when the last step ended
  std::vector<float> logits_;                  // of the last restore that computed all tokens
  std::unordered_map<uint64_t, Ahead> ahead_;  // by queue ticket
  policy::FetchWindow window_;
  std::unique_ptr<state::ReadAhead> read_ahead_;  // null: nothing is
};

}  // namespace hcache::serving
