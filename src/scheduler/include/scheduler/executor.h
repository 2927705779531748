// The Executor: what the scheduler asks of an engine with saved state, and nothing more. The server
// implements it over engine and state, the simulator over a cost model.
//
// A sequence is a chain of tokens whose KV cells lie in one arena. It holds as many rows as tokens
// were stepped or restored into it, but for what was cut out of it; every row takes one cell,
// unless cells() says otherwise.
//
// Threading: one thread owns an Executor; now_ns() alone may be called from any. No call waits for
// storage, but for a restore that has the device to itself: reads and writes go on in the
// background, and the scheduler asks again.
// Errors: a call that fails has changed nothing unless it says otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"
#include "policy/restore_record.h"
#include "policy/truncation.h"

namespace hcache::scheduler {

using SeqId = int32_t;
inline constexpr SeqId kNoSeq = -1;
// durable_tokens() of a sequence that is not saved, or no longer.
inline constexpr int64_t kNotSaving = -1;

// Fixed for an Executor's life.
struct ExecutorLimits {
  int64_t arena_cells = 0;
  int64_t context = 0;        // most rows of one sequence
  int32_t max_step_rows = 0;  // most rows of one step
  int32_t max_sequences = 0;  // most sequences that exist at a time
  // Why sequences can't be cut; empty: they can.
  std::string why_no_cuts = {};
  // Why it is not attention that chooses rows which stay; empty: it is.
  std::string why_no_choice = "nothing is told of what attention falls on";
  bool media = false;  // whether chains may have any
};

// Which tokens' logits a step is to give.
enum class LogitsOf : uint8_t { kNone, kLast, kAll };
// How many rows of logits that is, of so many tokens.
[[nodiscard]] constexpr int64_t logits_count(LogitsOf of, int64_t tokens) {
  if (of == LogitsOf::kAll) return tokens;
  return of == LogitsOf::kLast ? 1 : 0;
}

// What stands for the tokens of a chain that are below 0: rows of pictures and sounds. Opaque to
// the scheduler, but for where steps may end.
class Media {
 public:
  Media() = default;
  Media(const Media&) = delete;
  Media& operator=(const Media&) = delete;
  virtual ~Media() = default;

  // The end of a step that computes tokens [from, to) of the chain: `to`, or, where that is in the
  // middle of rows that are computed at once, their beginning, or their end if they come first.
  [[nodiscard]] virtual int64_t step_end(int64_t from, int64_t to) const = 0;
};
using MediaRef = std::shared_ptr<const Media>;

struct StepItem {
  SeqId seq = kNoSeq;
  std::span<const int32_t> tokens;  // appended; at least one
  LogitsOf logits = LogitsOf::kNone;
  // Instead of those logits what the output matrix would make them of: the rows behind the final
  // norm.
  bool hidden = false;
  const Media* media = nullptr;  // of the sequence's chain; null: it has none
};

struct StepOutput {
  // One row per token whose logits (or final norm) were wanted, in the order of the items and of
  // their tokens; valid until the next step ends.
  std::vector<std::span<const float>> logits;
  double seconds = 0;  // that the step took
};

// What is saved of the beginning of a chain, as saved_prefix() found it; opaque to the scheduler.
// What it names is pinned, so that it can still be restored, while anybody refers to it.
class SavedPrefix {
 public:
  explicit SavedPrefix(int64_t tokens) : tokens_(tokens) {}
  SavedPrefix(const SavedPrefix&) = delete;
  SavedPrefix& operator=(const SavedPrefix&) = delete;
  virtual ~SavedPrefix() = default;

  [[nodiscard]] int64_t tokens() const { return tokens_; }  // its length

 private:
  const int64_t tokens_;
};
using SavedPrefixRef = std::shared_ptr<const SavedPrefix>;

// How saved state is brought back.
struct RestoreMethod {
  policy::Mode mode = policy::Mode::kPlan;
  int64_t token_rounding = 1;  // of Mode::kTokenPartition
};

struct RestoreJob {
  SavedPrefixRef prefix = {};            // of these tokens
  std::span<const int32_t> tokens = {};  // the whole chain; copied
  int64_t upto = 0;                      // how many of them are restored at most
  // The chain's, as saved_prefix() was told. Those before its end have been made when it is done.
  std::span<const policy::HeldRows> cuts = {};
  MediaRef media = {};  // of the chain
  RestoreMethod method = {};
  // It is planned with this share of the device's time for its arithmetic, in (0, 1].
  double compute_share = 1;
  // Nothing else runs or waits: it is planned with the prefill of the other tokens behind it.
  bool alone = false;
};

// How long advance_restore() may work.
struct RestoreTurn {
  double budget_s = 0;  // seconds of compute
  // What a turn has that owes nothing to those before it: what is done in one piece, time after
  // time, should take no longer.
  double whole_budget_s = 0;
  // Set: nothing else runs or waits. Then there is no budget, bytes may be waited for, and the
  // tokens behind the restored ones follow layer by layer from the first slice on. Asked between
  // slices, with the fraction of the restore that is done; false ends the call early.
  std::function<bool(double fraction)> proceed = {};
};

struct RestoreStatus {
  enum class Phase : uint8_t {
    kWaitingForIo,  // the next slice has not been read yet
    kWorking,       // the budget is spent, more can be done at once
    kDone,
  };
  Phase phase = Phase::kWaitingForIo;
  double seconds = 0;    // of compute that this call took from running requests
  double stalled_s = 0;  // of these: the machine ran something else (base/stall.h)
  double fraction = 0;   // of the restore that is done, 0 … 1
  // Until it is done: cells that it has taken. Those asked for, and those of tokens behind them
  // whose prefill began while reads were waited for.
  int64_t reserved = 0;
  // When done: tokens that the sequence has now come to, and what it holds of them. Fewer than
  // asked for where state was missing or damaged, the rest is prefilled; more where the prefill
  // began while reads were waited for.
  int64_t tokens = 0;
  policy::HeldRows held = {};
  policy::RestoreRecord record;  // when done
  // When done, and all tokens of the request were computed behind it: of the last one. Valid until
  // the next call.
  std::span<const float> logits;
};

// A request in the queue. What it refers to stays until it is dequeued.
struct Waiting {
  uint64_t ticket = 0;  // policy::queue_ticket(): smaller is admitted earlier; unique
  const Salt& salt;
  std::span<const int32_t> tokens;
  SavedPrefixRef prefix = {};  // null: nothing is saved
  int64_t restore = 0;         // leading tokens that it would restore if it were admitted now
  bool cut = false;            // of which some would not be held
  RestoreMethod method = {};
};

// Work on an idle sequence that waits until nothing else runs or waits.
struct Chore {
  SeqId seq = kNoSeq;  // kNoSeq: there is none
  int64_t cells = 0;   // that are free meanwhile
  int64_t left = 0;    // of what outlasts the process, of all sequences; 0: this does not
};

class Executor {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  virtual ~Executor() = default;

  [[nodiscard]] virtual const ExecutorLimits& limits() const = 0;
  // A clock that never goes back. Any thread.
  [[nodiscard]] virtual int64_t now_ns() const = 0;
  [[nodiscard]] virtual int64_t free_cells() const = 0;

  // ---- Sequences

  // An empty sequence. With `save`, what it computes is saved under the salt. Restoring is possible
  // either way.
  virtual Result<SeqId> create(const Salt& salt, bool save) = 0;
  // A new sequence that starts with the first n_tokens rows of `src` and has its salt. With `save`,
  // which takes a source that is saved, it is saved too.
  virtual Result<SeqId> fork(SeqId src, int64_t n_tokens, bool save) = 0;
  // Keeps the first n_tokens rows. After an error only release() is allowed.
  virtual Status trim(SeqId seq, int64_t n_tokens) = 0;
  // How few rows, but for none, trim() and fork() can keep of it.
  [[nodiscard]] virtual int64_t shortest(SeqId /*seq*/) const { return 0; }
  // Cells that a sequence of so many rows takes: fewer where layers do without some of them.
  [[nodiscard]] virtual int64_t cells(SeqId /*seq*/, int64_t rows) const { return rows; }
  // Drops rows of a sequence of these tokens, such that it is `held` what is held of them then;
  // rows behind others that go move down, to where the model takes them for that much earlier
  // (AttentionStore §3.4). What is computed from here on is saved as what it is, behind this cut.
  // No step may be in flight. After an error only release() is allowed.
  virtual Status cut(SeqId seq, std::span<const int32_t> chain, const policy::HeldRows& held) = 0;
  // Ends a sequence and gives its cells back at once, whatever it is doing (a restore is dropped).
  virtual void release(SeqId seq) = 0;

  // ---- Saved state

  // What could be restored of these tokens, whose sequence is cut so: a look into the catalog. With
  // `known`, an earlier answer for the same tokens, it looks for what has become durable since.
  // Null: nothing.
  virtual Result<SavedPrefixRef> saved_prefix(const Salt& salt, std::span<const int32_t> tokens,
                                              std::span<const policy::HeldRows> cuts,
                                              const SavedPrefixRef& known) = 0;
  // Starts to restore into an empty sequence: reading begins, and free_cells() has `upto` cells
  // fewer from now on, or some more: the prefill of what is behind them may begin as well. After an
  // error the sequence is empty and usable.
  virtual Status begin_restore(SeqId seq, const RestoreJob& job) = 0;
  // Works on a restore for about the turn's budget: whole slices whose bytes are there, the first
  // in any case and further ones as long as they are expected to fit. Several restores may be in
  // flight, and take turns in any order. After kDone the sequence is an ordinary one. After an
  // error it is empty and usable. Damaged state is no error: what can't be used is recomputed or
  // left to the prefill.
  virtual Result<RestoreStatus> advance_restore(SeqId seq, const RestoreTurn& turn) = 0;
  // How long restoring so many saved tokens is expected to take, for policies that weigh it.
  [[nodiscard]] virtual double restore_s(int64_t tokens) const {
    return static_cast<double>(tokens);
  }
  // Asks for everything that the sequence holds now to become durable soon, tail included.
  virtual void request_flush(SeqId seq) = 0;
  // How many leading rows are durable; kNotSaving when no more will be (off, failed, skipped).
  [[nodiscard]] virtual int64_t durable_tokens(SeqId seq) = 0;

  // ---- The queue, for policies that look ahead: what waits should be kept, and may be prefetched

  virtual void enqueued(const Waiting& /*request*/) {}
  // The request with this ticket is admitted (its restore begins next), or has ended.
  virtual void dequeued(uint64_t /*ticket*/, bool /*admitted*/) {}
  // It was admitted and has ended, or waits again (with another ticket).
  virtual void completed(uint64_t /*ticket*/) {}

  // ---- Steps

  // What a step of so many rows is expected to take, in any unit.
  [[nodiscard]] virtual double step_s(int64_t /*rows*/) const { return 1; }
  // Computes the items, each sequence at most once. kResourceExhausted: the arena is full. Not
  // while steps are in flight.
  virtual Result<StepOutput> step(std::span<const StepItem> items) = 0;
  // How many steps, in flight at once, serve so many sequences best: more than one where the layers
  // are on devices that compute at the same time.
  [[nodiscard]] virtual int32_t steps_in_flight(int64_t /*sequences*/) const { return 1; }
  // step() in two halves: several may begin before the first is finished, of different sequences,
  // and they finish in the order in which they began. An error of begin_step() means that none has
  // begun; one of finish_step() is that of the oldest step, which is over. Until then a sequence of
  // a step may be neither trimmed nor released; free_cells() is without its new rows.
  virtual Status begin_step(std::span<const StepItem> /*items*/) {
    return unimplemented("this executor has one step at a time");
  }
  virtual Result<StepOutput> finish_step() { return failed_precondition("no step is in flight"); }

  // ---- What is done when nothing else is

  [[nodiscard]] virtual Chore chore() const { return {}; }
  // Does a part of it, about a step. False: it waits for I/O.
  virtual bool work_on(const Chore& /*chore*/) { return true; }
  // Something else is to be done: what chores have taken of the arena is free when this returns.
  virtual void leave_chores() {}
};

}  // namespace hcache::scheduler
