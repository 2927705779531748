// The scheduler's Executor over a model on libllama (libllama/llama_engine.h), for architectures
// that our own engine has no row for. Chunks of rows are saved as they fill. Where the model needs
// snapshots, one is taken whenever a chunk is whole and kept in memory until the next; it is saved
// when a reply begins, when a flush is asked for (and one of the end with it), and every few
// thousand tokens. A restore takes the rows and the last snapshot that it has; what is behind them
// is computed.
//
// Threading: the scheduler's owner thread, which loaded the engine.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "policy/drafting.h"
#include "scheduler/executor.h"
#include "serving/media.h"
#include "state/llama_saver.h"
#include "state/runtime.h"

namespace hcache::serving {

class LlamaExecutor : public scheduler::Executor {
 public:
  // env and runtime, which has a model on libllama, must outlive it. max_context: rows of one
  // sequence; 0: as many as model and cache have.
  LlamaExecutor(Env& env, state::Runtime& runtime, int64_t max_context);
  ~LlamaExecutor() override;

  const scheduler::ExecutorLimits& limits() const override { return limits_; }
  int64_t now_ns() const override { return env_.monotonic_ns(); }
  int64_t free_cells() const override;

  Result<scheduler::SeqId> create(const Salt& salt, bool save) override;
  Result<scheduler::SeqId> fork(scheduler::SeqId src, int64_t n_tokens, bool save) override;
  Status trim(scheduler::SeqId seq, int64_t n_tokens) override;
  [[nodiscard]] int64_t shortest(scheduler::SeqId seq) const override;
  Status cut(scheduler::SeqId seq, std::span<const int32_t> chain,
             const policy::HeldRows& held) override;
  void release(scheduler::SeqId seq) override;

  Result<scheduler::SavedPrefixRef> saved_prefix(const Salt& salt, std::span<const int32_t> tokens,
                                                 std::span<const policy::HeldRows> cuts,
                                                 const scheduler::SavedPrefixRef& known) override;
  Status begin_restore(scheduler::SeqId seq, const scheduler::RestoreJob& job) override;
  Result<scheduler::RestoreStatus> advance_restore(scheduler::SeqId seq,
                                                   const scheduler::RestoreTurn& turn) override;
  void request_flush(scheduler::SeqId seq) override;
  int64_t durable_tokens(scheduler::SeqId seq) override;

  void enqueued(const scheduler::Waiting& request) override;
  void dequeued(uint64_t ticket, bool admitted) override;
  void completed(uint64_t ticket) override;

  [[nodiscard]] double step_s(int64_t rows) const override { return step_pace_.at(rows); }
  Result<scheduler::StepOutput> step(std::span<const scheduler::StepItem> items) override;

 private:
  struct Prefix;
  struct Restore;
  struct Sequence {
    Salt salt;
    bool save = false;
    std::vector<int32_t> tokens = {};
    std::vector<ChunkId> chunks = {};  // whole ones that are saved or about to be
    std::shared_ptr<state::SavedLength> saved = std::make_shared<state::SavedLength>();
    std::unique_ptr<Restore> restore;
    int64_t flushed = -1;  // its length when a flush was last asked for
    // Behind its last whole chunk, where there are snapshots; saved ones are empty.
    std::vector<std::byte> snapshot = {};

    Sequence();
    ~Sequence();
  };
  // An item of a step, in parts where a snapshot is due between them.
  struct Part {
    size_t item = 0;
    scheduler::SeqId seq = scheduler::kNoSeq;
    std::span<const int32_t> tokens;  // that are left
    int64_t n_logits = 0;             // of the last so many
    bool hidden = false;              // the rows behind the final norm instead
    bool of_prompt = false;           // more than a token: no reply goes on with it
    const MediaParts* media = nullptr;
  };

  Result<Sequence*> find(scheduler::SeqId seq);
  [[nodiscard]] int64_t cells_of(scheduler::SeqId seq, const Sequence& sequence) const;
  // What of a match can be restored, of so many tokens at most.
  [[nodiscard]] int64_t restorable(const store::Match& match, int64_t most) const;

  Status open_restore(scheduler::SeqId seq, Sequence& sequence);
  // The next page of a restore goes where it belongs; false: none is there yet.
  Result<bool> take_page(scheduler::SeqId seq, Restore& restore, bool wait);
  Result<scheduler::RestoreStatus> end_restore(scheduler::SeqId seq, Sequence& sequence);
  // Without the page that failed; the sequence is emptied first.
  Status restart(scheduler::SeqId seq, Sequence& sequence, const state::PageFailure& failure);

  // How many of the part's tokens are computed before a snapshot is taken; all, if none is.
  [[nodiscard]] int64_t until_snapshot(const Part& part) const;
  Status compute(std::vector<Part>* parts);
  // A step has failed: its sequences are as they were, or empty where that can't be.
  void take_back(std::span<const scheduler::StepItem> items, std::span<const int64_t> lengths);
  // Saves the chunks that have become whole, and takes a snapshot if the sequence ends with one.
  void save_chunks(scheduler::SeqId seq, Sequence& sequence);
  // Tokens [begin, end), of a chunk. With a snapshot, it is of the sequence as it is, which ends
  // there.
  void save_chunk(scheduler::SeqId seq, Sequence& sequence, int64_t begin, int64_t end,
                  bool with_snapshot);
  // The one that is kept in memory.
  void save_snapshot(Sequence& sequence);
  void give_up(Sequence& sequence, const Status& status);

  Env& env_;
  state::Runtime& runtime_;
  libllama::LlamaEngine& engine_;
  state::LlamaSaver* const saver_;  // nullptr: nothing is saved
  scheduler::ExecutorLimits limits_;
  std::unordered_map<scheduler::SeqId, Sequence> sequences_;
  std::vector<scheduler::SeqId> free_;  // numbers of sequences that do not exist
  policy::StepPace step_pace_;
  std::vector<std::vector<float>> logits_;  // of the last step, by item
};

}  // namespace hcache::serving
