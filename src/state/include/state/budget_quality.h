// What doing without rows of the KV cache costs in quality, by model.
//
// Threading: the engine's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/compression.h"

namespace hcache::state {

// Mean KL divergence of predictions behind some shares of the rows of these tokens (sample_text.h),
// chosen as a snapshot's are (kept_state.h), from those behind all. Takes room for two copies of
// them in the arena, and for reading a part of them: of fewer tokens where it has less,
// kResourceExhausted where that is too little.
[[nodiscard]] Result<std::vector<policy::BudgetKl>> measure_budgets(
    engine::Engine& engine, policy::Compression how, std::span<const int32_t> tokens);

// What was measured before, from a file in `dir` that is named after policy and `model`, or
// measured now on `sample`'s tokens and kept there.
[[nodiscard]] Result<std::vector<policy::BudgetKl>> budget_kls(
    Env& env, engine::Engine& engine, policy::Compression how, const std::string& dir,
    const std::string& model, const std::function<Result<std::vector<int32_t>>()>& sample);

// The share that may cost so much; logged.
[[nodiscard]] double budget_within(std::span<const policy::BudgetKl> measured, double most_kl);

}  // namespace hcache::state
