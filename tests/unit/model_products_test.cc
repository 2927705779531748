// Our products of quantised weights: every kernel that this processor has against the plain one (to
// the bit), against ggml's within F32's rounding, and whatever the number of rows and threads.
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "product_kernel.h"
#include "products.h"

namespace hcache::model {
namespace {

struct Case {
  ggml_type type;
  BlockKind kind;
  RowKind rows;
};

constexpr Case kCases[] = {
    {GGML_TYPE_Q8_0, BlockKind::kQ8_0, RowKind::kQ8_0},
    {GGML_TYPE_Q4_0, BlockKind::kQ4_0, RowKind::kQ8_0},
    {GGML_TYPE_Q4_1, BlockKind::kQ4_1, RowKind::kQ8_1},
    {GGML_TYPE_Q5_0, BlockKind::kQ5_0, RowKind::kQ8_0},
    {GGML_TYPE_Q5_1, BlockKind::kQ5_1, RowKind::kQ8_1},
    {GGML_TYPE_Q4_K, BlockKind::kQ4K, RowKind::kQ8K},
    {GGML_TYPE_Q5_K, BlockKind::kQ5K, RowKind::kQ8K},
    {GGML_TYPE_Q6_K, BlockKind::kQ6K, RowKind::kQ8K},
    {GGML_TYPE_IQ4_NL, BlockKind::kIq4Nl, RowKind::kQ8_0},
    {GGML_TYPE_IQ4_XS, BlockKind::kIq4Xs, RowKind::kQ8K},
    {GGML_TYPE_MXFP4, BlockKind::kMxfp4, RowKind::kQ8_0},
};

std::vector<float> random_values(int64_t n, std::mt19937& rng) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(n));
  for (float& v : values) v = normal(rng);
  return values;
}

ggml_type native_type(ggml_type weight) { return ggml_get_type_traits_cpu(weight)->vec_dot_type; }

// Weights and rows, quantised as ggml does it.
struct Operands {
  Operands(const Case& c, int64_t width, int64_t outputs, int64_t n)
      : n_in(width), n_out(outputs), n_rows(n) {
    std::mt19937 rng(static_cast<uint32_t>(width * 7 + outputs * 3 + n));
    weight.resize(ggml_row_size(c.type, width) * static_cast<size_t>(outputs));
    ggml_quantize_chunk(c.type, random_values(width * outputs, rng).data(), weight.data(), 0,
                        outputs, width, nullptr);
    values = random_values(width * n, rng);
    for (int64_t i = 0; i < width; ++i) values[static_cast<size_t>(i)] *= 100;  // rows differ
    const ggml_type type = native_type(c.type);
    rows.resize(ggml_row_size(type, width) * static_cast<size_t>(n));
    for (int64_t r = 0; r < n; ++r) {
      ggml_get_type_traits_cpu(type)->from_float(
          values.data() + r * width,
          rows.data() + ggml_row_size(type, width) * static_cast<size_t>(r), width);
    }
  }
  int64_t n_in;
  int64_t n_out;
  int64_t n_rows;
  std::vector<uint8_t> weight;
  std::vector<float> values;
  std::vector<uint8_t> rows;
};

std::vector<float> multiply(const ProductKernel& kernel, const Case& c, const Operands& o,
                            int64_t first_row, int64_t n_rows) {
  const int64_t n_chunks = (o.n_in + kChunk - 1) / kChunk;
  std::vector<RowChunk> chunks(static_cast<size_t>(n_chunks * n_rows));
  const size_t row_bytes = ggml_row_size(native_type(c.type), o.n_in);
  for (int64_t r = 0; r < n_rows; ++r) {
    for (int64_t i = 0; i < n_chunks; ++i) {
      const uint8_t* values = o.rows.data() + static_cast<size_t>(first_row + r) * row_bytes +
                              ggml_row_size(native_type(c.type), i * kChunk);
      kernel.prepare(c.rows, values, std::min<int64_t>(kChunk, o.n_in - i * kChunk),
                     chunks.data() + i * n_rows + r);
    }
  }
  std::vector<float> out(static_cast<size_t>(o.n_out * n_rows), NAN);
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::vector<Line> scratch(kernel.scratch_bytes(n_rows) / sizeof(Line) + 1);
  const int64_t middle = o.n_out / 2 / kPanel * kPanel;
  for (const auto& [begin, end] : {std::pair(int64_t{0}, middle), std::pair(middle, o.n_out)}) {
    if (begin == end) continue;
    kernel.multiply({.kind = c.kind,
                     .weight = o.weight.data(),
                     .weight_stride = ggml_row_size(c.type, o.n_in),
                     .n_in = o.n_in,
                     .rows = chunks.data(),
                     .n_rows = n_rows,
                     .out = out.data(),
                     .out_stride = static_cast<size_t>(o.n_out),
                     .out_rows = nullptr,
                     .first_out = begin,
                     .end_out = end,
                     .reads_ahead = begin == 0},
                    scratch.data());
  }
  return out;
}

void expect_same(const std::vector<float>& a, const std::vector<float>& b,
                 const std::string& what) {
  ASSERT_EQ(a.size(), b.size());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << what;
}

// Widths with and without a whole last chunk where blocks have 32 values, outputs with and without
// a whole last panel, rows for every tile, around the number from which panels are taken together,
// and for more than one block of them.
TEST(Products, EveryKernelGivesTheSameBits) {
  for (const Case& c : kCases) {
    for (const int64_t n_in : {256, 768, 32, 96, 576}) {
      if (n_in % ggml_blck_size(c.type) != 0) continue;
      const bool one = n_in == 768;
      for (const int64_t n_out : {1, 16, 105}) {
        const Operands o(c, n_in, n_out, one ? 530 : 60);
        const std::vector<float> expected = multiply(kProductPortable, c, o, 0, o.n_rows);
        for (const auto& [name, kernel] : usable_kernels()) {
          const std::string what = std::string(name) + ", " + ggml_type_name(c.type) + ", " +
                                   std::to_string(n_in) + " x " + std::to_string(n_out);
          expect_same(multiply(*kernel, c, o, 0, o.n_rows), expected, what);
          for (int64_t n = 1; n <= 49; n += n == 17 ? 31 : 1) {
            const std::vector<float> some = multiply(*kernel, c, o, 5, n);
            expect_same(some, {expected.begin() + 5 * n_out, expected.begin() + (5 + n) * n_out},
                        what + ", " + std::to_string(n) + " rows alone");
          }
        }
      }
    }
  }
}

// What is not a number has no sign to agree on.
void make_scales_finite(const Case& c, std::vector<uint8_t>& weight, std::mt19937& rng) {
  const size_t block = ggml_type_size(c.type);
  for (size_t i = 0; i < weight.size(); i += block) {
    if (c.type == GGML_TYPE_MXFP4) {
      weight[i] = static_cast<uint8_t>(rng() % 130);
      continue;
    }
    const size_t at = i + (c.type == GGML_TYPE_Q6_K ? 208 : 0);
    weight[at + 1] &= 0xBF;
    if (c.kind == BlockKind::kQ4_1 || c.kind == BlockKind::kQ5_1 || c.kind == BlockKind::kQ4K ||
        c.kind == BlockKind::kQ5K) {
      weight[at + 3] &= 0xBF;
    }
  }
}

// Codes and scales that no quantiser writes: any bytes have one meaning to all kernels.
TEST(Products, EveryKernelReadsAnyBytesAlike) {
  std::mt19937 rng(3);
  for (const Case& c : kCases) {
    Operands o(c, 512, 33, 5);
    for (uint8_t& byte : o.weight) byte = static_cast<uint8_t>(rng());
    make_scales_finite(c, o.weight, rng);
    const std::vector<float> expected = multiply(kProductPortable, c, o, 0, o.n_rows);
    for (const auto& [name, kernel] : usable_kernels()) {
      expect_same(multiply(*kernel, c, o, 0, o.n_rows), expected,
                  std::string(name) + ", " + ggml_type_name(c.type));
    }
  }
}

// Every quant of a row; quantisers write up to 127 on both sides.
void fill_row(const Case& c, uint8_t* row, int64_t n_in, int8_t quant) {
  if (c.rows == RowKind::kQ8K) {
    for (int64_t i = 0; i < n_in; i += kChunk, row += 4 + kChunk + 2 * kChunk / 16) {
      std::memset(row + 4, static_cast<uint8_t>(quant), kChunk);
      for (size_t j = 0; j < kChunk / 16; ++j) {
        const auto sum = static_cast<int16_t>(16 * quant);
        std::memcpy(row + 4 + kChunk + 2 * j, &sum, sizeof sum);
      }
    }
    return;
  }
  const int64_t head = c.rows == RowKind::kQ8_1 ? 4 : 2;
  for (int64_t i = 0; i < n_in; i += kGroup, row += head + kGroup) {
    std::memset(row + head, static_cast<uint8_t>(quant), kGroup);
  }
}

// Sums of products in 16 bits would show here.
TEST(Products, OfTheLargestNumbersDoNotOverflow) {
  std::mt19937 rng(5);
  const int8_t quants[] = {-127, 127};
  for (const Case& c : kCases) {
    for (const uint8_t byte : {0x00, 0x0F, 0x7F, 0x80, 0xF0, 0xFF}) {
      Operands o(c, 256, 16, std::size(quants));
      std::memset(o.weight.data(), byte, o.weight.size());
      make_scales_finite(c, o.weight, rng);
      const size_t row_bytes = ggml_row_size(native_type(c.type), o.n_in);
      for (size_t r = 0; r < std::size(quants); ++r) {
        fill_row(c, o.rows.data() + r * row_bytes, o.n_in, quants[r]);
      }
      const std::vector<float> expected = multiply(kProductPortable, c, o, 0, o.n_rows);
      for (const auto& [name, kernel] : usable_kernels()) {
        expect_same(
            multiply(*kernel, c, o, 0, o.n_rows), expected,
            std::string(name) + ", " + ggml_type_name(c.type) + ", all " + std::to_string(byte));
      }
    }
  }
}

struct Graph {
  Graph() : ctx(ggml_init({.mem_size = 64U << 20, .mem_buffer = nullptr, .no_alloc = false})) {}
  ~Graph() { ggml_free(ctx); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  ggml_tensor* tensor(ggml_type type, int64_t width, int64_t n, const void* bytes) const {
    ggml_tensor* t = ggml_new_tensor_2d(ctx, type, width, n);
    std::memcpy(t->data, bytes, ggml_nbytes(t));
    return t;
  }
  void compute(const std::vector<ggml_tensor*>& results, int n_threads) const {
    ggml_cgraph* graph = ggml_new_graph(ctx);
    for (ggml_tensor* t : results) ggml_build_forward_expand(graph, t);
    ggml_backend_t backend = ggml_backend_cpu_init();
    ggml_backend_cpu_set_n_threads(backend, n_threads);
    ASSERT_EQ(ggml_backend_graph_compute(backend, graph), GGML_STATUS_SUCCESS);
    ggml_backend_free(backend);
  }

  ggml_context* ctx;
};

TEST(Products, AgreeWithGgmlInAGraph) {
  if (product_kernels().empty()) GTEST_SKIP() << "ggml's products serve best on this processor";
  for (const Case& c : kCases) {
    ASSERT_TRUE(has_own_product(c.type));
    const Operands o(c, 768, 100, 37);
    const Graph g;
    ggml_tensor* weight = g.tensor(c.type, o.n_in, o.n_out, o.weight.data());
    ggml_tensor* floats = g.tensor(GGML_TYPE_F32, o.n_in, o.n_rows, o.values.data());
    ggml_tensor* rows = g.tensor(native_type(c.type), o.n_in, o.n_rows, o.rows.data());
    ggml_tensor* ggmls = ggml_mul_mat(g.ctx, weight, floats);
    ggml_tensor* from_floats = build_own_product(g.ctx, weight, floats);
    ggml_tensor* from_rows = build_own_product(g.ctx, weight, rows);
    g.compute({ggmls, from_floats, from_rows}, 3);
    EXPECT_EQ(std::memcmp(from_floats->data, from_rows->data, ggml_nbytes(from_rows)), 0)
        << ggml_type_name(c.type) << ": rows that are quantised already";
    double error = 0;
    double norm = 0;
    for (int64_t i = 0; i < ggml_nelements(ggmls); ++i) {
      const double a = static_cast<const float*>(ggmls->data)[i];
      const double b = static_cast<const float*>(from_floats->data)[i];
      error += (a - b) * (a - b);
      norm += a * a;
    }
    EXPECT_LE(std::sqrt(error / norm), 1e-5) << ggml_type_name(c.type);
  }
}

TEST(Products, OfTheSameRowsQuantiseThemOnce) {
  if (product_kernels().empty()) GTEST_SKIP() << "ggml's products serve best on this processor";
  const Operands q4(kCases[1], 256, 32, 3);
  const Operands q8(kCases[0], 256, 16, 3);
  const Operands k(kCases[5], 256, 16, 3);
  const Graph g;
  ggml_tensor* x = g.tensor(GGML_TYPE_F32, 256, 3, q4.values.data());
  const auto product = [&](ggml_type type, const Operands& o) {
    return build_own_product(g.ctx, g.tensor(type, o.n_in, o.n_out, o.weight.data()), x);
  };
  ggml_tensor* a = product(GGML_TYPE_Q4_0, q4);
  ggml_tensor* b = product(GGML_TYPE_Q8_0, q8);
  ggml_tensor* c = product(GGML_TYPE_Q4_K, k);
  EXPECT_EQ(a->src[1], b->src[1]);
  EXPECT_NE(a->src[1], c->src[1]) << "rows of another type";
  g.compute({a, b, c}, 2);
}

// Rows for the same expert, for all of them, for none; one row a token, and one per expert of it.
TEST(Products, OfExpertsAgreeWithGgml) {
  if (product_kernels().empty()) GTEST_SKIP() << "ggml's products serve best on this processor";
  constexpr int kExperts = 5;
  constexpr int kUsed = 2;
  constexpr int kTokens = 23;
  constexpr int kOutputs = 40;
  std::mt19937 rng(9);
  for (const Case& c : {kCases[1], kCases[2], kCases[7]}) {
    const Operands o(c, 512, kExperts * kOutputs, kTokens * kUsed);
    const Graph g;
    ggml_tensor* weights = ggml_new_tensor_3d(g.ctx, c.type, o.n_in, kOutputs, kExperts);
    std::memcpy(weights->data, o.weight.data(), o.weight.size());
    ggml_tensor* chosen = ggml_new_tensor_2d(g.ctx, GGML_TYPE_I32, kUsed, kTokens);
    for (int t = 0; t < kTokens; ++t) {
      const int first = t < 9 ? 1 : static_cast<int>(rng() % (kExperts - 1));  // the last: none
      static_cast<int32_t*>(chosen->data)[t * kUsed] = first;
      static_cast<int32_t*>(chosen->data)[t * kUsed + 1] = (first + 1) % (kExperts - 1);
    }
    for (const int rows_each : {1, kUsed}) {
      ggml_tensor* x = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, o.n_in, rows_each, kTokens);
      std::memcpy(x->data, o.values.data(), ggml_nbytes(x));
      ggml_tensor* ggmls = ggml_mul_mat_id(g.ctx, weights, x, chosen);
      ggml_tensor* ours = build_own_expert_product(g.ctx, weights, x, chosen);
      g.compute({ggmls, ours}, 2);
      ASSERT_EQ(ggml_nbytes(ours), ggml_nbytes(ggmls));
      for (int64_t i = 0; i < ggml_nelements(ours); ++i) {
        const float expected = static_cast<const float*>(ggmls->data)[i];
        ASSERT_NEAR(static_cast<const float*>(ours->data)[i], expected,
                    1e-3 + 1e-4 * std::abs(expected))
            << ggml_type_name(c.type) << ", value " << i;
      }
    }
  }
}

TEST(Products, LeaveOtherTypesToGgml) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q2_K,
                               GGML_TYPE_Q3_K, GGML_TYPE_IQ2_XXS}) {
    EXPECT_FALSE(has_own_product(type)) << ggml_type_name(type);
  }
}

}  // namespace
}  // namespace hcache::model
