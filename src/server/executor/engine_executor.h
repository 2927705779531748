// The scheduler's Executor over a real engine with its store, saver and restorer.
//
// Threading: the scheduler's owner thread, which becomes the engine's (Runtime: one thread).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "scheduler/executor.h"
#include "state/runtime.h"

namespace hcache::server {

struct EngineExecutorOptions {
  int32_t max_sequences = 64;  // that exist at a time, idle ones included
  policy::Mode restore_mode = policy::Mode::kPlan;
  double link_bytes_per_s = 0;              // throttles real reads; 0: none
  uint64_t restore_ring_bytes = 64U << 20;  // read-ahead of one restore
};

class EngineExecutor : public scheduler::Executor {
 public:
  // env and runtime must outlive it.
  EngineExecutor(Env& env, state::Runtime& runtime, const EngineExecutorOptions& options);
  ~EngineExecutor() override;

  const scheduler::ExecutorLimits& limits() const override { return limits_; }
  int64_t now_ns() const override { return env_.monotonic_ns(); }
  int64_t free_cells() const override { return runtime_.engine().arena_free_cells(); }

  Result<scheduler::SeqId> create(const std::string& salt, bool save) override;
  Result<scheduler::SeqId> fork(scheduler::SeqId src, int64_t n_tokens) override;
  Status trim(scheduler::SeqId seq, int64_t n_tokens) override;
  void release(scheduler::SeqId seq) override;

  Result<int64_t> saved_prefix(const std::string& salt, std::span<const int32_t> tokens) override;
  Status begin_restore(scheduler::SeqId seq, std::span<const int32_t> tokens,
                       int64_t upto) override;
  Result<scheduler::RestoreStatus> advance_restore(scheduler::SeqId seq, double budget_s) override;
  void request_flush(scheduler::SeqId seq) override;
  int64_t durable_tokens(scheduler::SeqId seq) override;

  Result<scheduler::StepOutput> step(std::span<const scheduler::StepItem> items) override;

 private:
  struct Restore;
  struct Sequence {
    SaltId salt;
    bool save = false;
    std::unique_ptr<Restore> restore;
  };

  Result<Sequence*> find(scheduler::SeqId seq);
  // Plans what is left to try and begins reading; the sequence is empty.
  Status open_restore(scheduler::SeqId seq, Sequence& sequence);
  Result<scheduler::RestoreStatus> end_restore(scheduler::SeqId seq, Sequence& sequence);
  // The saver takes the sequence up from `tokens`, which are saved already, unless it is not saved.
  void begin_saving(scheduler::SeqId seq, const Sequence& sequence, std::span<const int32_t> tokens,
                    store::ChunkRef tail);
  [[nodiscard]] int64_t slice_rows(double budget_s) const;

  Env& env_;
  state::Runtime& runtime_;
  const EngineExecutorOptions options_;
  scheduler::ExecutorLimits limits_;
  std::unordered_map<scheduler::SeqId, Sequence> sequences_;
};

}  // namespace hcache::server
