// The scheduler's Executor over a cost model: sequences without KV cells, restores without bytes,
// and a clock that moves by what a step or a slice is expected to take.
//
// Steps: the larger of arithmetic and memory traffic, for the weights' products and for attention,
// and a fixed time (HCache §3.2's counts; docs/simulator.md). Restores: production's plan of
// the saved prefix, slice by slice; its reads share the links of the tiers with other restores'.
// Threading: as an Executor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "policy/fetch.h"
#include "policy/hardware_plan.h"
#include "policy/restore_plan.h"
#include "policy/save_plan.h"
#include "saved_chains.h"
#include "scheduler/executor.h"
#include "shared_link.h"
#include "sim/serving.h"

namespace hcache::sim {

// What restoring costs: measured, or by the formulas for the hardware.
[[nodiscard]] Result<policy::RestoreCosts> serving_costs(const ServingSetup& setup);

class SimExecutor final : public scheduler::Executor {
 public:
  using SeqId = scheduler::SeqId;

  // A setup that simulate_serving() has checked.
  static Result<std::unique_ptr<SimExecutor>> create(const ServingSetup& setup);

  // Moves the clock on to `until_s`, when nothing else moves it.
  void wait_until(double until_s);
  // When something that a request may wait for happens next: bytes that arrive.
  [[nodiscard]] std::optional<double> next_event_s();
  [[nodiscard]] double now_s() const { return now_s_; }

  // The chain's first tokens are cut off (SavedChains::cut_front()).
  void cut_front(std::span<const int32_t> tokens, int64_t drop) {
    chains_.cut_front(tokens, drop, now_s_);
  }

  // Fills in what the executor knows: times, the arena, what is saved and where.
  void describe(ServingReport* report) const;

  // ---- Executor

  [[nodiscard]] const scheduler::ExecutorLimits& limits() const override { return limits_; }
  [[nodiscard]] int64_t now_ns() const override;
  [[nodiscard]] int64_t free_cells() const override { return limits_.arena_cells - used_cells_; }
  Result<SeqId> create(const Salt& salt, bool save) override;
  Result<SeqId> fork(SeqId src, int64_t n_tokens, bool save) override;
  Status trim(SeqId seq, int64_t n_tokens) override;
  Status cut(SeqId seq, std::span<const int32_t> chain, const policy::HeldRows& held) override;
  void release(SeqId seq) override;
  Result<scheduler::SavedPrefixRef> saved_prefix(const Salt& salt, std::span<const int32_t> tokens,
                                                 std::span<const policy::HeldRows> cuts,
                                                 const scheduler::SavedPrefixRef& known) override;
  Status begin_restore(SeqId seq, const scheduler::RestoreJob& job) override;
  // Of a turn without a budget no more than a short while passes: what arrives meanwhile is not
  // known here.
  Result<scheduler::RestoreStatus> advance_restore(SeqId seq,
                                                   const scheduler::RestoreTurn& turn) override;
  [[nodiscard]] double restore_s(int64_t tokens) const override;
  void enqueued(const scheduler::Waiting& request) override;
  void dequeued(uint64_t ticket, bool admitted) override;
  void completed(uint64_t ticket) override;
  void request_flush(SeqId seq) override;
  [[nodiscard]] int64_t durable_tokens(SeqId seq) override;
  Result<scheduler::StepOutput> step(std::span<const scheduler::StepItem> items) override;

 private:
  // One read of a restore and what is computed when it is there.
  struct Slice {
    double bytes = 0;
    double compute_s = 0;
  };
  // Of a plan: what it does with each layer; none: everything is prefilled.
  struct Methods {
    std::vector<policy::Method> layers;
    std::string schedule;
  };
  struct Restore {
    std::vector<int32_t> tokens;  // as asked for; so many cells are reserved
    SavedChains::Found found;
    std::string schedule;
    std::vector<Slice> slices;            // bytes are those from all tiers together
    std::vector<SharedLink::Id> streams;  // by tier
    size_t next = 0;                      // slice
    int64_t reserved = 0;
    double begin_s = 0;
  };
  struct StepShape {      // of one item
    int64_t rows = 0;     // appended
    int64_t depth = 0;    // rows before them
    bool logits = false;  // of the last row
  };
  // What is being read ahead.
  struct Fetch {
    uint64_t ticket = 0;
    std::vector<int64_t> ends;            // of its pieces, in tokens
    std::vector<SharedLink::Id> streams;  // by tier; the first has none
    size_t next = 0;                      // piece
  };
  struct Sequence {
    std::vector<int32_t> tokens;
    std::optional<Restore> restore;
    int64_t durable = 0;
  };

  SimExecutor(const ServingSetup& setup, policy::RestoreCosts costs, policy::SavePlan saved);

  Sequence& at(SeqId seq) { return sequences_.at(seq); }
  void end_restore(Sequence& sequence);
  // Takes note of what was read ahead by now, and begins to read what comes next.
  void fetch();
  [[nodiscard]] bool begin_fetch(uint64_t ticket);
  void end_fetch();
  [[nodiscard]] bool arrived(const Restore& restore);
  [[nodiscard]] Result<const Methods*> plan(int64_t tokens, size_t tier, double compute_share);
  [[nodiscard]] std::vector<Slice> cut(const std::vector<policy::Method>& layers,
                                       int64_t tokens) const;
  [[nodiscard]] double modelled_step_s(std::span<const StepShape> items) const;

  const ServingSetup setup_;
  const policy::RestoreCosts costs_;  // its link is replaced by the tier's
  const policy::SavePlan saved_;
  const double memory_bytes_per_s_;
  scheduler::ExecutorLimits limits_;
  SavedChains chains_;
  std::vector<SharedLink> links_;  // by tier
  // By rounded length, tier and share of the arithmetic.
  std::map<std::tuple<int64_t, size_t, double>, Methods> plans_;
  std::unordered_map<SeqId, Sequence> sequences_;
  // By queue ticket: what may be read ahead into the first tier.
  std::unordered_map<uint64_t, std::span<const int32_t>> ahead_;
  policy::FetchWindow window_{setup_.scheduler.fetch, setup_.tiers[0].capacity_bytes};
  std::optional<Fetch> fetch_;
  SeqId last_seq_ = 0;
  int64_t used_cells_ = 0;
  double now_s_ = 0;
  double total_step_s_ = 0;
  double total_restore_s_ = 0;
};

}  // namespace hcache::sim
