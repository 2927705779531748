// The batch engine under HybridServe's policies: measures what layers and link take, chooses the
// kinds of blocks and the mini-batches, and corrects what it expects while a batch runs.
//
//   HCACHE_ASSIGN_OR_RETURN(auto costs, measure_batch_costs(model, options));
//   BatchPolicy policy({.costs = costs.costs, ...});
//   HCACHE_RETURN_IF_ERROR(policy.plan(contexts));
//   options.decisions = policy.decisions();
//   ... engine.step() ... policy.observe(step.times);
//
// Threading: the engine's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/hybrid_engine.h"
#include "policy/hybrid_plan.h"

namespace hcache::state {

struct MeasuredBatchCosts {
  policy::HybridCosts costs;
  policy::BlockSizes sizes;
  // What the fits were made of (HybridServe Fig. 11): one point a mini-batch size.
  std::vector<policy::SizedTime> kv_gen;
  std::vector<policy::SizedTime> load_kv;
  std::vector<policy::SizedTime> load_act;
};

// Runs short batches of made-up tokens on an engine with these options, whose decisions are not
// used, and fits a line to each kind of work. `sizes` are the contexts, in tokens, ascending;
// fewer than two, or one that is no sequence for the engine: kInvalidArgument. Errors of the engine
// as they are.
[[nodiscard]] Result<MeasuredBatchCosts> measure_batch_costs(const model::Model& model,
                                                             const engine::HybridOptions& options,
                                                             const std::vector<int64_t>& sizes);

struct BatchPolicyOptions {
  policy::HybridCosts costs;
  policy::BlockSizes sizes;
  int64_t cache_bytes = 0;    // room for blocks, in all places
  int64_t buffer_tokens = 0;  // of the engine's buffers
  policy::HybridMode mode = policy::HybridMode::kSearch;
  double share = 0;  // with kFixedShare and kTokens
  // That a plan may recompute: 0 for an engine that is made before its batch is known.
  int32_t most_recomputed_layers = INT32_MAX;
};

// How a step compares with the model's expectation of the very mini-batches it ran.
struct StepComparison {
  double predicted_s = 0;
  double measured_s = 0;
  double link_idle = 0;     // shares of the step, as measured
  double compute_idle = 0;  // computing waited for loads
};

class BatchPolicy {
 public:
  explicit BatchPolicy(const BatchPolicyOptions& options);

  // Chooses for a batch whose sequences have so many tokens each.
  Status plan(std::vector<int64_t> contexts);
  [[nodiscard]] const policy::HybridPlan& plan() const { return *plan_; }
  // How many leading layers the engine is to recompute: fixed when it is created.
  [[nodiscard]] int recomputed_layers() const;
  // For HybridOptions::decisions, or HybridEngine::set_decisions() after another plan.
  [[nodiscard]] engine::HybridDecisions decisions() const;

  // Compares a step with the model, and corrects the costs by what was observed of its parts.
  StepComparison observe(const engine::StepTimes& times);
  // Plans again with the corrected costs; the ratio changes only where that is worth it.
  // kFailedPrecondition before plan(). Of use with kSearch alone.
  Status replan(std::vector<int64_t> contexts);
  [[nodiscard]] const policy::HybridScales& scales() const { return scales_; }

 private:
  [[nodiscard]] policy::HybridBatch batch(std::vector<int64_t> contexts) const;

  const BatchPolicyOptions options_;
  std::shared_ptr<policy::HybridPlan> plan_;  // null before plan()
  policy::HybridScales scales_;
};

}  // namespace hcache::state
