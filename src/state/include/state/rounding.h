// What rounding saved K and V costs in quality, by model.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/packing.h"

namespace hcache::state {

// Mean KL divergence of predictions behind K and V that were rounded, from those behind K and V as
// they were computed, over the last of these tokens (sample_text.h). Takes room for two copies of
// them in the arena, of fewer where it has less: kResourceExhausted where that is too little.
// kInvalidArgument: K and V of this type are never rounded.
[[nodiscard]] Result<policy::RoundingKl> measure_rounding(engine::Engine& engine,
                                                          std::span<const int32_t> tokens);

// What was measured before, from the file `path`, or measured now on `sample`'s tokens and kept
// there.
[[nodiscard]] Result<policy::RoundingKl> rounding_kl(
    Env& env, engine::Engine& engine, const std::string& path,
    const std::function<Result<std::vector<int32_t>>()>& sample);

}  // namespace hcache::state
