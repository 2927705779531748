// The product that turns saved hidden states into K and V, for quantised weights on CPUs with
// AVX-512 VNNI. ggml's own kernels take every weight apart again for every few rows and reach a
// quarter of what the processor can do; restoration spends all of its compute here.
//
// Its results equal ggml's to the bit: per output the same eight partial sums of the same exact
// integers, scaled and added in the same order of blocks. So which of the two kernels computed a
// row never shows, and Engine checks it once per weight type before it relies on it.
//
// Threading: pure functions of their arguments.
#pragma once

#include <ggml.h>

namespace hcache::engine {

// Whether this processor and these types (weight, rows) are covered: Q8_0 and Q4_0 with Q8_0 rows,
// Q4_1 with Q8_1 rows.
[[nodiscard]] bool can_project_fast(ggml_type weight, ggml_type rows);

// out = rows · weightᵀ as a node of a CPU graph: weight [n_in, n_out] and rows [n_in, n], both
// contiguous and covered; the result is F32 [n_out, n].
ggml_tensor* build_fast_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* rows);

}  // namespace hcache::engine
