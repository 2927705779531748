// Predictions behind a context, and how far others are from them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"

namespace hcache::state {

using Predictions = std::vector<std::vector<float>>;  // logits behind each token

// Of each of the tokens, which the sequence gets.
[[nodiscard]] Result<Predictions> predict(engine::Engine& engine, engine::SeqId seq,
                                          std::span<const int32_t> tokens);
// Mean KL divergence in nats.
[[nodiscard]] double mean_kl(const Predictions& expected, const Predictions& predicted);

}  // namespace hcache::state
