// The idle sequences: what is kept in the arena of requests that have ended or were preempted,
// until a request goes on from it or its cells are needed.
//
// A sequence is evicted when its state is durable, or never will be (saving is off or failed), or
// when a flush has taken longer than flush_wait_s. Until then it is only asked for: nothing waits.
// Threading: the owner thread's.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "policy/eviction.h"
#include "policy/truncation.h"
#include "scheduler/executor.h"
#include "scheduler/scheduler.h"

namespace hcache::scheduler {

struct Resident {
  SeqId seq = kNoSeq;
  std::vector<int32_t> tokens;  // that it has come to
  policy::HeldRows held = {};   // of them
  policy::TruncationLimits limits = {};
  Salt salt = {};
  bool save = true;
  uint64_t last_used = 0;       // set by add()
  int64_t last_used_ns = 0;     // likewise
  int64_t flush_begin_ns = -1;  // when a flush that an eviction waits for was asked for
  [[nodiscard]] int64_t length() const { return static_cast<int64_t>(tokens.size()); }
  [[nodiscard]] int64_t rows() const { return held.rows(length()); }
};

class Residents {
 public:
  // What requests want that would go on from a sequence.
  using DemandOf = std::function<policy::Demand(const Resident&)>;

  // `demand_of` is asked where the policy looks ahead.
  Residents(Executor& executor, double flush_wait_s, policy::EvictPolicy policy, DemandOf demand_of)
      : executor_(executor),
        flush_wait_s_(flush_wait_s),
        policy_(policy),
        demand_of_(std::move(demand_of)) {}

  // Takes a sequence in as the most recently used one, and asks for it to be flushed, so that
  // evicting it later is free.
  void add(Resident resident);
  // Hands a sequence over to the caller.
  [[nodiscard]] Resident take(size_t index);

  // Evicts until the arena has `cells` free cells. What is not durable is asked to become so, in
  // the order of eviction and no more than is needed. True if anything was evicted; the caller
  // looks at free_cells() for the rest. `pinned` stays.
  bool free_up(int64_t cells, EvictionReason reason, SeqId pinned = kNoSeq);
  // Evicts what is durable already, as long as fewer cells are free.
  void offload(int64_t cells);
  // Evicts one, to make room for another sequence. False: none could go yet.
  bool free_slot(SeqId pinned = kNoSeq);
  // Of every sequence with this salt: drops the rows in common with `tokens` from the keep-th on,
  // and those behind them.
  void forget(const SaltId& salt, std::span<const int32_t> tokens, int64_t keep);
  void release_all();

  [[nodiscard]] const std::vector<Resident>& all() const { return residents_; }
  [[nodiscard]] bool empty() const { return residents_.empty(); }
  [[nodiscard]] size_t count() const { return residents_.size(); }
  [[nodiscard]] int64_t cells() const;
  [[nodiscard]] const std::array<uint64_t, kEvictionReasons>& evictions() const {
    return evictions_;
  }
  [[nodiscard]] uint64_t evicted() const {
    return std::accumulate(evictions_.begin(), evictions_.end(), uint64_t{0});
  }
  [[nodiscard]] uint64_t evicted_unsaved() const { return evicted_unsaved_; }

 private:
  [[nodiscard]] bool is_durable(const Resident& resident);
  [[nodiscard]] bool waited_enough(const Resident& resident) const;
  // The one to evict now, or -1. A patient one waits for as long as a flush takes.
  [[nodiscard]] int32_t victim(SeqId pinned, bool patient = false);
  void evict(size_t index, EvictionReason reason);
  void ask_for_flushes(int64_t cells, SeqId pinned);

  Executor& executor_;
  const double flush_wait_s_;
  const policy::EvictPolicy policy_;
  const DemandOf demand_of_;
  std::vector<Resident> residents_;  // least recently used first
  uint64_t uses_ = 0;
  std::array<uint64_t, kEvictionReasons> evictions_{};
  uint64_t evicted_unsaved_ = 0;
};

}  // namespace hcache::scheduler
