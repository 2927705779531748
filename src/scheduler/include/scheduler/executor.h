// The Executor: what the scheduler asks of an engine with saved state, and nothing more. The server
// implements it over engine and state, the simulator over a cost model.
//
// A sequence is a chain of tokens whose KV cells lie in one arena. It holds as many rows as tokens
// were stepped or restored into it; every row takes one cell.
//
// Threading: one thread owns an Executor; now_ns() alone may be called from any. No call waits for
// storage: reads and writes go on in the background, and the scheduler asks again.
// Errors: a call that fails has changed nothing unless it says otherwise.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/ids.h"
#include "base/status.h"

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
};

struct StepItem {
  SeqId seq = kNoSeq;
  std::span<const int32_t> tokens;  // appended; at least one
  bool wants_logits = false;        // of the last token
};

struct StepOutput {
  // One entry per item that wanted logits, in their order; valid until the next step().
  std::vector<std::span<const float>> logits;
  double seconds = 0;  // that the step took
};

// Layers that were restored alike, and when they were read and computed: seconds since the restore
// began. Both times of reading 0: nothing was read.
struct RestoreSpan {
  int32_t first_layer = 0;
  int32_t last_layer = 0;
  std::string method;  // "RE", "H", "KV"
  double io_begin_s = 0;
  double io_end_s = 0;
  double compute_begin_s = 0;
  double compute_end_s = 0;
};

// Bytes of saved state that were used, by where they came from.
struct TierBytes {
  uint64_t dram = 0;
  uint64_t disk = 0;
  uint64_t remote = 0;
};

// What a restore did.
struct RestoreReport {
  int64_t hidden_tokens = 0;  // restored rows, by what most of their layers used
  int64_t kv_tokens = 0;
  int64_t recomputed_tokens = 0;
  uint64_t bytes_dram = 0;  // read, by tier
  uint64_t bytes_disk = 0;
  uint64_t bytes_remote = 0;
  TierBytes hidden_pages;  // of those, what the methods used: without alignment and gaps
  TierBytes kv_pages;
  double predicted_s = 0;  // that the plan expected it to take; 0: nothing was planned
  double overlap = 0;      // share of the I/O time during which restore work ran too, 0 … 1
  std::string schedule;    // "RE:4 H:26 KV:2"
  std::vector<RestoreSpan> timeline;
};

struct RestoreStatus {
  enum class Phase : uint8_t {
    kWaitingForIo,  // the next slice has not been read yet
    kWorking,       // the budget is spent, more can be done at once
    kDone,
  };
  Phase phase = Phase::kWaitingForIo;
  double seconds = 0;   // of compute that this call took from running requests
  double fraction = 0;  // of the restore that is done, 0 … 1
  // Until it is done: cells that it has taken. Those asked for, and those of tokens behind them
  // whose prefill began while reads were waited for.
  int64_t reserved = 0;
  // When done: rows that the sequence now holds. Fewer than asked for where state was missing or
  // damaged, the rest is prefilled; more where the prefill began while reads were waited for.
  int64_t tokens = 0;
  RestoreReport report;  // when done
};

// A request in the queue. What it refers to stays until it is dequeued.
struct Waiting {
  uint64_t place = 0;  // policy::queue_place(): smaller is admitted earlier; unique
  const Salt& salt;
  std::span<const int32_t> tokens;
  int64_t restore = 0;  // leading tokens that it would restore if it were admitted now
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
  // A new sequence that starts with the first n_tokens rows of `src`; it inherits salt and saving.
  virtual Result<SeqId> fork(SeqId src, int64_t n_tokens) = 0;
  // Keeps the first n_tokens rows. After an error only release() is allowed.
  virtual Status trim(SeqId seq, int64_t n_tokens) = 0;
  // Ends a sequence and gives its cells back at once, whatever it is doing (a restore is dropped).
  virtual void release(SeqId seq) = 0;

  // ---- Saved state

  // How many leading tokens could be restored: a look into the catalog.
  virtual Result<int64_t> saved_prefix(const Salt& salt, std::span<const int32_t> tokens) = 0;
  // Starts to restore the first `upto` tokens into an empty sequence: reading begins, and
  // free_cells() has `upto` cells fewer from now on, or some more: the prefill of what is behind
  // them may begin as well. The tokens are copied. It is planned with compute_share of the device's
  // time for its arithmetic, in (0, 1]. After an error the sequence is empty and usable.
  virtual Status begin_restore(SeqId seq, std::span<const int32_t> tokens, int64_t upto,
                               double compute_share) = 0;
  // Works on a restore for about budget_s seconds: whole slices whose bytes are there, the first in
  // any case and further ones as long as they are expected to fit. Never waits. One restore is
  // worked on at a time, in the order of their beginnings: the next one's first call comes after
  // this one's end. After kDone the sequence is an ordinary one. After an error it is empty and
  // usable. Damaged state is no error: what can't be used is recomputed or left to the prefill.
  virtual Result<RestoreStatus> advance_restore(SeqId seq, double budget_s) = 0;
  // Asks for everything that the sequence holds now to become durable soon, tail included.
  virtual void request_flush(SeqId seq) = 0;
  // How many leading rows are durable; kNotSaving when no more will be (off, failed, skipped).
  [[nodiscard]] virtual int64_t durable_tokens(SeqId seq) = 0;

  // ---- The queue, for policies that look ahead: what waits should be kept, and may be prefetched

  virtual void enqueued(const Waiting& /*request*/) {}
  // The request at this place is admitted (its restore begins next), or has ended.
  virtual void dequeued(uint64_t /*place*/, bool /*admitted*/) {}
  // It was admitted and has ended, or waits again (at another place).
  virtual void completed(uint64_t /*place*/) {}

  // ---- Steps

  // Computes the items, each sequence at most once. kResourceExhausted: the arena is full.
  virtual Result<StepOutput> step(std::span<const StepItem> items) = 0;
};

}  // namespace hcache::scheduler
