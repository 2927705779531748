// The scheduler's Executor over the batch engine: the life of a request stays the one that it has
// on the ordinary engine, from the queue to its last token, and so does what is saved of it.
//
// A cell is a row that the cache's blocks have room for. Sequences are not forked or cut; requests
// that share a prefix share it through the store.
//
// Threading: the scheduler's owner thread, which is the engine's; report() from any.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"
#include "scheduler/executor.h"
#include "serving/serving.h"
#include "state/batch_policy.h"
#include "state/block_restore.h"
#include "state/runtime.h"

namespace hcache::serving {

class BatchExecutor final : public scheduler::Executor, private engine::CaptureSink {
 public:
  // The runtime has a batch engine; env and runtime must outlive it.
  BatchExecutor(Env& env, state::Runtime& runtime, const state::BatchEngineOptions& options,
                int32_t max_sequences);
  ~BatchExecutor() override;

  const scheduler::ExecutorLimits& limits() const override { return limits_; }
  int64_t now_ns() const override { return env_.monotonic_ns(); }
  int64_t free_cells() const override { return limits_.arena_cells - cells_; }

  Result<scheduler::SeqId> create(const Salt& salt, bool save) override;
  // kUnimplemented: requests are to go on from saved state alone (CacheUse::kSaved).
  Result<scheduler::SeqId> fork(scheduler::SeqId src, int64_t n_tokens, bool save) override;
  Status trim(scheduler::SeqId seq, int64_t n_tokens) override;
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

  Result<scheduler::StepOutput> step(std::span<const scheduler::StepItem> items) override;

  [[nodiscard]] BatchReport report() const HCACHE_EXCLUDES(mutex_);

 private:
  struct Prefix;
  struct Restore {
    std::vector<int32_t> tokens;
    std::shared_ptr<const Prefix> prefix;
    std::unique_ptr<state::BlockRestore> work;
  };
  struct Sequence {
    Salt salt;
    bool save = false;
    int64_t rows = 0;      // that it holds
    int64_t reserved = 0;  // by its restore
    std::unique_ptr<Restore> restore;
  };

  // ---- engine::CaptureSink: rows wait for the store instead of being lost.
  std::byte* reserve(size_t n_bytes) override;
  void publish(std::byte* block, const engine::StepCapture& capture) override;
  void drop(std::byte* block) override;

  Result<Sequence*> find(scheduler::SeqId seq);
  Status append(std::span<const scheduler::StepItem> items);
  void begin_saving(scheduler::SeqId seq, const Sequence& sequence,
                    std::span<const int32_t> tokens);
  // Tokens of each sequence that a plan is to serve.
  std::vector<int64_t> contexts(std::span<const scheduler::StepItem> items);
  // Chooses kinds of blocks and mini-batches before a step, where it is time to.
  void plan(std::span<const scheduler::StepItem> items);
  void note(const engine::StepTimes& times) HCACHE_EXCLUDES(mutex_);
  void end_restore(scheduler::SeqId seq, Sequence& sequence, scheduler::RestoreStatus* status);

  Env& env_;
  state::Runtime& runtime_;
  engine::HybridEngine& engine_;
  const bool saves_;
  scheduler::ExecutorLimits limits_;
  state::BatchPolicy policy_;
  const bool replans_;
  const size_t expected_;  // sequences at a time
  size_t most_begun_ = 0;  // of them so far
  int64_t steps_ = 0;
  bool planned_ = false;
  int64_t cells_ = 0;  // taken by rows, and reserved
  std::unordered_map<scheduler::SeqId, Sequence> sequences_;

  mutable Mutex mutex_;
  BatchReport report_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::serving
