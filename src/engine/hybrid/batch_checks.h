// What a batch engine asks of its model, its options and its requests' tokens.
#pragma once

#include <cstdint>
#include <span>

#include "base/status.h"
#include "engine/hybrid_engine.h"
#include "model/model.h"

namespace hcache::engine {

// From how many rows on every product of the model takes the kernel for many.
[[nodiscard]] int least_rows(const model::Model& model);
[[nodiscard]] Status check_options(const model::Model& model, const HybridOptions& options);
// kInvalidArgument: a token outside the vocabulary.
[[nodiscard]] Status check_tokens(const model::Model& model, std::span<const int32_t> tokens);

}  // namespace hcache::engine
