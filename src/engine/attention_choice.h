// Which attention kernel and which types of K and V a model and its device allow.
#pragma once

#include <ggml.h>

#include "base/status.h"
#include "engine/engine.h"
#include "model/model.h"

namespace hcache::engine {

// Whether our kernel is used on a device, as the options say: kUnimplemented where they ask for
// what can't be.
[[nodiscard]] Result<bool> choose_attention(const model::Model& model, const model::Device& device,
                                            const EngineOptions& options);

// kUnimplemented for a type that K and V can't be kept in.
[[nodiscard]] Status check_kv_type(const model::Model& model, ggml_type type);

}  // namespace hcache::engine
