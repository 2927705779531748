// A batch that is not run: requests of one length whose weights and context lie in host memory, by
// the policies of policy/hybrid_plan.h on published hardware. docs/simulator.md, "batch".
//
// Pure: the same setup gives the same report. Units: seconds, bytes, tokens.
// Threading: plain values, no shared state.
#pragma once

#include <cstdint>

#include "base/status.h"
#include "policy/hardware_plan.h"
#include "policy/hybrid_plan.h"

namespace hcache::sim {

struct BatchSetup {
  policy::HardwareSetup hardware;  // one device; its history and new tokens don't count
  double link_efficiency = 0.8;    // share of the link's speed that copies reach
  double memory_efficiency = 0.8;  // share of the device memory's
  double host_bytes = 0;           // for weights and blocks
  double workspace_bytes = 0;      // of the device: embeddings, output head, rows of a step
  double buffer_bytes = 0;         // of the device: blocks of two mini-batches, generated K and V
  int64_t block_tokens = 64;
  int64_t batch = 1;
  int64_t prompt_tokens = 1;
  int64_t output_tokens = 1;
  policy::HybridMode mode = policy::HybridMode::kSearch;
  double share = 0;  // as plan_hybrid takes it
  // What is left of the device holds weights (FlexGen's way) instead of ACT blocks.
  bool weights_on_device = false;
};

struct BatchReport {
  double prefill_s = 0;
  double generate_s = 0;
  double tokens_per_s = 0;      // generated, over both
  policy::HybridPlan plan;      // for half of the output
  double resident_weights = 0;  // share
  int64_t act_on_device = 0;    // ACT blocks that fit there
  // Host to device while generating.
  double weights_bytes = 0;
  double kv_bytes = 0;
  double act_bytes = 0;
  double link_busy = 0;  // shares of generate_s
  double compute_busy = 0;
};

// One layer's costs, as the policies take them; `resident_weights`: share that needs no loading.
// Embedding, output head and sampling are left out.
[[nodiscard]] Result<policy::HybridCosts> batch_costs(const BatchSetup& setup,
                                                      double resident_weights);

// The ratio is decided once, for contexts with half of the output, and each step is predicted with
// the context that it has. The prompt's rows stay on the device from layer to layer.
// kInvalidArgument: counts below 1. kResourceExhausted: the device holds no two layers' weights, or
// the host not all weights and blocks.
[[nodiscard]] Result<BatchReport> simulate_batch(const BatchSetup& setup);

}  // namespace hcache::sim
