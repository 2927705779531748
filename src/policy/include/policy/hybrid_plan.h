// What the batch engine does with a batch: the share of ACT blocks, the layers that are recomputed
// from tokens and the mini-batches, by the paper's policies, by an exact search, or as one of the
// baselines. docs/planner.md, "Hybrid cache".
//
// Pure functions. Units: seconds, bytes, tokens. Threading: plain values.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "policy/hybrid_pipeline.h"

namespace hcache::policy {

enum class HybridMode : uint8_t {
  kSearch,      // the fastest ratio, recomputed layers and mini-batches by the pipeline's model
  kPolicies,    // Algorithm 1, Eq. 11 and mini-batches by balance: the paper's
  kUnmanaged,   // as many ACT as KV blocks, mini-batches by arrival (Fig. 15's second step)
  kFixedShare,  // a given share of ACT blocks, mini-batches by balance
  kKv,          // KV blocks alone (FlexGen's way)
  kAct,         // ACT blocks alone
  kTokens,      // a given share recomputed from tokens in all layers, the rest KV (§3.2)
};
struct HybridModeInfo {
  HybridMode mode;
  std::string_view name;
  std::string_view what;  // for --help
};
[[nodiscard]] std::span<const HybridModeInfo> hybrid_modes();
[[nodiscard]] std::string_view hybrid_mode_name(HybridMode mode);
// kInvalidArgument names the modes there are.
[[nodiscard]] Result<HybridMode> parse_hybrid_mode(std::string_view name);

struct HybridBatch {
  HybridCosts costs;
  BlockSizes sizes;
  int64_t host_bytes = 0;     // for blocks: without weights
  int64_t act_on_device = 0;  // ACT blocks of the batch that may stay on the device
  MiniBatchLimits limits;
  // Rows of context that the device can pass from one layer to the next, of all mini-batches.
  // Recomputing more than layer 0 needs a row for each token that is recomputed.
  int64_t carried_tokens = 0;
  int32_t most_recomputed_layers = INT32_MAX;  // that the search may choose
  std::vector<int64_t> contexts;               // tokens of each request at the step that is planned
  int64_t rows = 1;                            // new tokens of each request in a step
  // The first weights and blocks of a step are loaded in the last layer of the one before:
  // following_step_times instead of step_times.
  bool steps_overlap = false;
};

struct HybridPlan {
  BlockCounts ratio;  // what Eq. 11 follows
  Recompute recompute;
  Packing packing = Packing::kBalance;
  std::vector<MiniBatch> mini_batches;
  int64_t host_bytes = 0;  // that the batch's blocks take
  StepTimes step;
};

// The plan that these three decide, with its predicted step.
// kResourceExhausted: its blocks exceed host_bytes, or what it recomputes carried_tokens.
// kInvalidArgument: a request exceeds the limits,
// or a setting is out of range.
[[nodiscard]] Result<HybridPlan> plan_with(const HybridBatch& batch, const BlockCounts& ratio,
                                           const Recompute& recompute, Packing packing);

// `share`, in [0, 1]: of ACT blocks (kFixedShare) or of tokens (kTokens); unused otherwise.
// kSearch tries every number of ACT blocks of the longest context and every number of recomputed
// layers that the device can hold the rows of: exact for contexts of one length, and for each the
// mini-batches that form_mini_batches gives by balance and even. Equal predictions go to fewer
// recomputed layers, then to fewer ACT blocks. Where an ACT block is no smaller than a KV block,
// kSearch and kPolicies use none; the baselines do as they are told. Errors as plan_with: kSearch
// only if no ratio fits.
[[nodiscard]] Result<HybridPlan> plan_hybrid(const HybridBatch& batch, HybridMode mode,
                                             double share = 0);

// ---- Correction while it runs ----

// Observed over predicted times, by what they are of; 1 if the fits are right.
struct HybridScales {
  double link = 1;
  double kv_gen = 1;
  double forward = 1;  // and attention
};
// An observation into one of the scales: exponential average of weight 0.3. `predicted_s` is by the
// costs without correction. One observation counts
// as at most a factor of two, and a scale stays within 1/8 and 8. What is not a positive finite
// time is ignored.
void observe(double& scale, double predicted_s, double observed_s);
[[nodiscard]] HybridCosts corrected(const HybridCosts& costs, const HybridScales& scales);

// The search again with corrected costs. The ratio and layers in force stay unless another choice
// makes a step at least 3 % faster (hysteresis), so noise moves no blocks' kinds.
[[nodiscard]] Result<HybridPlan> replan_hybrid(const HybridBatch& batch, const HybridPlan& in_force,
                                               const HybridScales& scales);

}  // namespace hcache::policy
