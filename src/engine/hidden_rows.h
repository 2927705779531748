// Rows of hidden states in the types that they are saved in, as nodes of a graph.
#pragma once

#include <ggml.h>

#include <cstdint>

namespace hcache::engine {

// F32 rows converted to the type that they are saved in, as capture does it. `order`: 0, 1, ...
ggml_tensor* saved_as(ggml_context* ctx, ggml_type type, ggml_tensor* rows, ggml_tensor* order);

// Q8_0 rows from Q8_1 rows, which hold the same scales and integers and their sums besides. On the
// CPU.
ggml_tensor* without_sums(ggml_context* ctx, ggml_tensor* rows);

// The product with at least n_rows rows: rows of zeros are added and their results left out.
ggml_tensor* padded_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x, int64_t n_rows);

}  // namespace hcache::engine
