// The fast product of saved hidden states against ggml's own (equal to the bit) and against F64.
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "projection.h"

namespace hcache::engine {
namespace {

struct Types {
  ggml_type weight;
  ggml_type rows;
};

std::vector<float> random_values(size_t n, std::mt19937& rng) {
  std::normal_distribution<float> normal(0.0F, 1.0F);
  std::vector<float> values(n);
  for (float& v : values) v = normal(rng);
  return values;
}

// What a tensor's quantised contents stand for.
std::vector<float> dequantised(const ggml_tensor* t) {
  std::vector<float> values(static_cast<size_t>(ggml_nelements(t)));
  if (t->type == GGML_TYPE_Q8_1) {  // has no way back in ggml
    const auto* bytes = static_cast<const uint8_t*>(t->data);
    for (size_t i = 0; i < values.size(); ++i) {
      const uint8_t* block = bytes + i / 32 * 36;
      ggml_fp16_t scale = 0;
      std::memcpy(&scale, block, sizeof scale);
      values[i] =
          ggml_fp16_to_fp32(scale) * static_cast<float>(static_cast<int8_t>(block[4 + i % 32]));
    }
    return values;
  }
  ggml_get_type_traits(t->type)->to_float(t->data, values.data(), ggml_nelements(t));
  return values;
}

class ProjectionTest : public ::testing::TestWithParam<std::tuple<int, int, int, int>> {
 protected:
  static Types types() {
    static constexpr Types kAll[] = {{GGML_TYPE_Q8_0, GGML_TYPE_Q8_0},
                                     {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0},
                                     {GGML_TYPE_Q4_1, GGML_TYPE_Q8_1}};
    return kAll[std::get<0>(GetParam())];
  }
};

TEST_P(ProjectionTest, EqualsGgml) {
  if (!can_project_fast(types().weight, types().rows)) {
    GTEST_SKIP() << "this processor has no AVX-512 VNNI";
  }
  const auto [_, n_in, n_out, n_rows] = GetParam();
  std::mt19937 rng(static_cast<uint32_t>(n_in * 7 + n_out * 3 + n_rows));
  ggml_context* ctx = ggml_init({.mem_size = 64U << 20, .mem_buffer = nullptr, .no_alloc = false});
  ggml_tensor* weight = ggml_new_tensor_2d(ctx, types().weight, n_in, n_out);
  ggml_tensor* rows = ggml_new_tensor_2d(ctx, types().rows, n_in, n_rows);
  const std::vector<float> w = random_values(static_cast<size_t>(n_in) * n_out, rng);
  const std::vector<float> x = random_values(static_cast<size_t>(n_in) * n_rows, rng);
  ggml_quantize_chunk(weight->type, w.data(), weight->data, 0, n_out, n_in, nullptr);
  ggml_get_type_traits_cpu(rows->type)->from_float(x.data(), rows->data, ggml_nelements(rows));

  ggml_tensor* ggmls = ggml_mul_mat(ctx, weight, rows);
  ggml_tensor* ours = build_fast_product(ctx, weight, rows);
  ggml_cgraph* graph = ggml_new_graph(ctx);
  ggml_build_forward_expand(graph, ggmls);
  ggml_build_forward_expand(graph, ours);
  ggml_backend_t backend = ggml_backend_cpu_init();
  for (const int threads : {1, 3}) {
    ggml_backend_cpu_set_n_threads(backend, threads);
    std::memset(ours->data, 0xFF, ggml_nbytes(ours));
    ASSERT_EQ(ggml_backend_graph_compute(backend, graph), GGML_STATUS_SUCCESS);
    EXPECT_EQ(std::memcmp(ggmls->data, ours->data, ggml_nbytes(ours)), 0) << threads << " threads";
  }

  // Both could be wrong: against the plain sum.
  const std::vector<float> wq = dequantised(weight);
  const std::vector<float> xq = dequantised(rows);
  const auto* result = static_cast<const float*>(ours->data);
  for (int r = 0; r < n_rows; ++r) {
    for (int o = 0; o < n_out; ++o) {
      double sum = 0;
      double size = 0;
      for (int i = 0; i < n_in; ++i) {
        const double term = static_cast<double>(wq[o * n_in + i]) * xq[r * n_in + i];
        sum += term;
        size += std::abs(term);
      }
      // Q8_1 holds the sum of a block's rows as a half.
      ASSERT_NEAR(result[r * n_out + o], sum, 4e-3 * size + 1e-6) << "row " << r << " out " << o;
    }
  }
  ggml_backend_free(backend);
  ggml_free(ctx);
}

// Widths with and without a rest in outputs (panels of 8) and in rows (tiles of 4).
INSTANTIATE_TEST_SUITE_P(Shapes, ProjectionTest,
                         ::testing::Combine(::testing::Values(0, 1, 2), ::testing::Values(32, 576),
                                            ::testing::Values(1, 8, 27, 192),
                                            ::testing::Values(1, 4, 7, 64)));

TEST(Projection, CoversOnlyWhatItKnows) {
  EXPECT_FALSE(can_project_fast(GGML_TYPE_Q8_0, GGML_TYPE_Q8_1));
  EXPECT_FALSE(can_project_fast(GGML_TYPE_Q4_1, GGML_TYPE_Q8_0));
  EXPECT_FALSE(can_project_fast(GGML_TYPE_F16, GGML_TYPE_F16));
  EXPECT_FALSE(can_project_fast(GGML_TYPE_Q4_K, GGML_TYPE_Q8_K));
}

}  // namespace
}  // namespace hcache::engine
