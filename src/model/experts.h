// A mixture of experts: a router chooses some for each row, and their outputs are added up by its
// weights.
#pragma once

#include <ggml.h>

#include "model/model.h"

namespace hcache::model {

// From the block's normed input [n_embd, n] to its output, without the residual. On CPUs a row's
// result does not depend on the other rows: experts, and the router, multiply row by row.
// adapters: of the rows.
ggml_tensor* build_experts(ggml_context* ctx, const Model& model, const ExpertWeights& experts,
                           ggml_tensor* in, AdapterScales adapters = {});

}  // namespace hcache::model
