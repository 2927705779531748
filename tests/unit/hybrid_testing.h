// Costs of a layer for the tests of the hybrid cache.
#pragma once

#include "policy/hybrid_cache.h"

namespace hcache::policy::testing {

inline constexpr int64_t kBlock = 64;

// A multi-head layer in which loading a token's K and V takes a microsecond, its activations half
// of that, and generating K and V from them r microseconds.
inline HybridCosts multi_head_costs(double r, double load_weights_s = 0) {
  HybridCosts costs;
  costs.load_weights_s = load_weights_s;
  costs.kv_gen = {.slope = r * 1e-6};
  costs.load_kv = {.slope = 1e-6};
  costs.load_act = {.slope = 0.5e-6};
  return costs;
}

inline constexpr BlockSizes kSizes{.block_tokens = kBlock, .kv_bytes = 2000, .act_bytes = 1000};

}  // namespace hcache::policy::testing
