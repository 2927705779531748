// How much of a model's attention counts, layer by layer and head by head (CaR §III-D, Fig. 4).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"

namespace hcache::state {

struct SparsityProfile {
  struct Head {
    double small = 0;   // share of the weights below a hundredth of their row's largest
    double spread = 0;  // 1 / Σw² over the number of keys, the mean of the rows
  };
  int n_head_kv = 0;
  std::vector<Head> heads{};  // [n_layer][n_head_kv]

  // Per layer: the share of weights that are not small.
  [[nodiscard]] std::vector<double> density() const;
};

// Cells of the arena that measuring takes.
inline constexpr int64_t kSparsityCells = 1024;

// Of these tokens (sample_text.h), or the first kSparsityCells of them. Errors:
// Engine::observe()'s.
[[nodiscard]] Result<SparsityProfile> measure_sparsity(engine::Engine& engine,
                                                       std::span<const int32_t> tokens);

}  // namespace hcache::state
