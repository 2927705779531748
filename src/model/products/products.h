// Products of quantised weights on CPUs: what prefill, decoding and restoration spend their time
// on. Weights are read as the file has them; see docs/adr/0047-products.md.
//
// A result depends on its weights and its row alone: neither on how many rows are multiplied at
// once, nor on the instruction set (see product_kernel.h). Rows are quantised by ggml's own
// functions, so what is multiplied is the very row that is saved as a hidden state.
//
// Threading: pure functions of their arguments.
#pragma once

#include <ggml.h>

#include <string_view>
#include <vector>

namespace hcache::model {

struct ProductKernel;

// The kernels in use: "avx512-vnni", "avx-vnni", "avx2", or "" where ggml's products serve best.
// The environment's HCACHE_PRODUCTS names other ones that this processor has, "portable", or
// "ggml".
[[nodiscard]] std::string_view product_kernels();

// What HCACHE_PRODUCTS asks for and is not there; "": nothing.
[[nodiscard]] std::string_view unusable_product_kernels();

// Those that this processor runs, the fastest first.
struct NamedProductKernel {
  std::string_view name;
  const ProductKernel* kernel;
};
[[nodiscard]] std::vector<NamedProductKernel> usable_kernels();

// Counts what changes a bit of what the products give; all kernels of a generation give the same.
inline constexpr int kProductGeneration = 1;

// Whether build_own_product() takes weights of this type, which must be in the CPU's memory.
[[nodiscard]] bool has_own_product(ggml_type weight);

// x · weightᵀ as nodes of a CPU graph: F32 [n_out, n]. weight: [n_in, n_out]; x: [n_in, n], F32 or
// of the type that native_activation_type() tells. Rows that `x` was quantised to for another
// product of the same graph are taken again.
[[nodiscard]] ggml_tensor* build_own_product(ggml_context* ctx, ggml_tensor* weight,
                                             ggml_tensor* x);

// The same of a mixture's experts: weights [n_in, n_out, n_expert], x F32 [n_in, 1 or n_used, n],
// chosen I32 [n_used, n]. Each row times the experts that are chosen for it: F32
// [n_out, n_used, n], as ggml_mul_mat_id() gives it.
[[nodiscard]] ggml_tensor* build_own_expert_product(ggml_context* ctx, ggml_tensor* weights,
                                                    ggml_tensor* x, ggml_tensor* chosen);

}  // namespace hcache::model
