// Holds our table of weight types against ggml's CPU backend.
#include <ggml-alloc.h>
#include <ggml-cpu.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "model_fixtures.h"
#include "products.h"
#include "weight_types.h"

namespace hcache::model {
namespace {

TEST(WeightTypes, TableAgreesWithGgml) {
  const auto device = test::open_cpu();
  for (int i = 0; i < GGML_TYPE_COUNT; i++) {
    const auto type = static_cast<ggml_type>(i);
    const ggml_type_traits_cpu* cpu = ggml_get_type_traits_cpu(type);
    const WeightType* row = find_weight_type(type);
    const bool widens = type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    EXPECT_EQ(row != nullptr, cpu->vec_dot != nullptr && widens) << ggml_type_name(type);
    if (row == nullptr) continue;
    EXPECT_EQ(row->cpu_activation, cpu->vec_dot_type) << ggml_type_name(type);
    EXPECT_EQ(row->is_float, !ggml_is_quantized(type)) << ggml_type_name(type);
    EXPECT_EQ(native_activation_type(*device, type), cpu->vec_dot_type) << ggml_type_name(type);
  }
}

constexpr int64_t kWidth = 256;
constexpr int64_t kOutputs = 32;

std::vector<float> wave(int64_t count, float step) {
  std::vector<float> values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(step * static_cast<float>(i));
  return values;
}

// A matrix of kOutputs rows.
std::vector<std::byte> some_weights(ggml_type type) {
  const std::vector<float> values = wave(kWidth * kOutputs, 0.37F);
  std::vector<std::byte> weights(ggml_row_size(type, kWidth) * kOutputs);
  ggml_quantize_chunk(type, values.data(), weights.data(), 0, kOutputs, kWidth, nullptr);
  return weights;
}

// Row 0 of the product of the weights and n rows.
std::vector<float> first_row_of_product(const Device& device, ggml_type type,
                                        const std::vector<std::byte>& weights, int64_t n) {
  const std::unique_ptr<ggml_context, void (*)(ggml_context*)> ctx(
      ggml_init({.mem_size = 16 * ggml_tensor_overhead() + ggml_graph_overhead(),
                 .mem_buffer = nullptr,
                 .no_alloc = true}),
      ggml_free);
  ggml_tensor* weight = ggml_new_tensor_2d(ctx.get(), type, kWidth, kOutputs);
  ggml_tensor* rows = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, kWidth, n);
  ggml_tensor* product = ggml_mul_mat(ctx.get(), weight, rows);
  ggml_cgraph* graph = ggml_new_graph(ctx.get());
  ggml_build_forward_expand(graph, product);
  const std::unique_ptr<ggml_backend_buffer, void (*)(ggml_backend_buffer_t)> buffer(
      ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), device.buffer_type()),
      ggml_backend_buffer_free);
  const std::vector<float> x = wave(kWidth * n, 0.61F);
  std::memcpy(weight->data, weights.data(), weights.size());
  std::memcpy(rows->data, x.data(), x.size() * sizeof(float));
  EXPECT_EQ(ggml_backend_graph_compute(device.compute(), graph), GGML_STATUS_SUCCESS);
  const auto* out = static_cast<const float*>(product->data);
  return {out, out + kOutputs};
}

// What the column promises of ggml's product: with so many rows or more, a row's result has one
// value.
TEST(WeightTypes, FromTheLeastRowsOnOneKernelComputes) {
  const auto device = test::open_cpu();
  for (const WeightType& row : weight_types()) {
    EXPECT_EQ(least_product_rows(*device, row.type),
              has_own_product(row.type) ? 1 : row.cpu_least_rows);
    if (ggml_quantize_requires_imatrix(row.type)) continue;  // its weights can't be made here
    const std::vector<std::byte> weights = some_weights(row.type);
    const std::vector<float> expected =
        first_row_of_product(*device, row.type, weights, row.cpu_least_rows);
    for (const int n : {row.cpu_least_rows + 1, 9, 16, 64, 100}) {
      const std::vector<float> is = first_row_of_product(*device, row.type, weights, n);
      EXPECT_EQ(std::memcmp(is.data(), expected.data(), is.size() * sizeof(float)), 0)
          << ggml_type_name(row.type) << ", " << n << " rows";
    }
  }
}

TEST(WeightTypes, NamesParseInAnyCase) {
  EXPECT_EQ(parse_weight_type("q4_k").value(), GGML_TYPE_Q4_K);
  EXPECT_EQ(parse_weight_type("Q4_K").value(), GGML_TYPE_Q4_K);
  EXPECT_EQ(parse_weight_type("bf16").value(), GGML_TYPE_BF16);
  for (const char* bad : {"", "q8_k", "i32", "q4"}) {
    EXPECT_EQ(parse_weight_type(bad).code(), Code::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace hcache::model
