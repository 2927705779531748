// The CPU attention kernel against an F64 reference, and its promise that a row's bits depend on
// nothing but the row's own inputs.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "engine/attention.h"

namespace hcache::engine {
namespace {

constexpr uint16_t kHalfNan = 0x7e00;
constexpr uint16_t kHalfInf = 0x7c00;

double from_half(uint16_t h) {
  static const std::vector<double> table = [] {
    std::vector<double> t(0x10000);
    for (uint32_t i = 0; i < t.size(); ++i) {
      const int exponent = static_cast<int>((i >> 10) & 0x1f);
      const auto fraction = static_cast<double>(i & 0x3ff);
      const double magnitude =
          exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(fraction + 1024, exponent - 25);
      t[i] = (i & 0x8000) != 0 ? -magnitude : magnitude;
    }
    return t;
  }();
  return table[h];
}

// One of the F16 values nearest to x.
uint16_t to_half(double x) {
  const double magnitude = std::min(std::abs(x), 60000.0);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int field = std::max(exponent + 14, 1);
  const auto bits = static_cast<uint16_t>(std::nearbyint(std::ldexp(magnitude, 25 - field)));
  const auto value = static_cast<uint16_t>(bits < 1024 ? bits : bits + ((field - 1) << 10));
  return static_cast<uint16_t>((x < 0 ? 0x8000 : 0) | value);
}

// An arena and queries with random contents. Row r's query is a function of the seed and r.
struct Data {
  AttentionShape shape;
  int64_t n_cells;
  size_t k_cell, v_cell;      // elements used in a cell
  size_t k_pitch, v_pitch;    // elements between cells
  size_t q_pitch, out_pitch;  // elements between rows
  std::vector<uint16_t> k, v;
  std::vector<float> q;
  std::vector<float> sinks;  // empty, or one per head

  Data(const AttentionShape& s, int64_t cells, int rows, unsigned seed = 1, double spread = 1.0)
      : shape(s), n_cells(cells) {
    std::mt19937 rng(seed);
    std::normal_distribution<double> normal;
    k_cell = static_cast<size_t>(s.n_head_kv) * s.head_dim_k;
    v_cell = static_cast<size_t>(s.n_head_kv) * s.head_dim_v;
    k_pitch = k_cell + 3;
    v_pitch = v_cell + 5;
    q_pitch = static_cast<size_t>(s.n_head) * s.head_dim_k + 1;
    out_pitch = static_cast<size_t>(s.n_head) * s.head_dim_v + 7;
    k.resize(static_cast<size_t>(cells) * k_pitch);
    v.resize(static_cast<size_t>(cells) * v_pitch);
    q.resize(static_cast<size_t>(rows) * q_pitch);
    // Drawn from a small stock, because drawing millions afresh takes longer than the tests.
    std::vector<double> stock(4096);
    for (double& x : stock) x = normal(rng);
    std::vector<uint16_t> keys(stock.size());
    std::vector<uint16_t> values(stock.size());
    for (size_t i = 0; i < stock.size(); ++i) {
      keys[i] = to_half(stock[i] * spread);
      values[i] = to_half(stock[i]);
    }
    for (uint16_t& x : k) x = keys[rng() % keys.size()];
    for (uint16_t& x : v) x = values[rng() % values.size()];
    for (float& x : q) x = static_cast<float>(normal(rng) * spread);
  }

  [[nodiscard]] int rows() const { return static_cast<int>(q.size() / q_pitch); }

  [[nodiscard]] AttentionTensors tensors(std::vector<float>& out) const {
    AttentionTensors t;
    t.q = q.data();
    t.q_stride = q_pitch * sizeof(float);
    t.k = k.data();
    t.k_stride = k_pitch * sizeof(uint16_t);
    t.v = v.data();
    t.v_stride = v_pitch * sizeof(uint16_t);
    t.out = out.data();
    t.out_stride = out_pitch * sizeof(float);
    t.sinks = sinks.empty() ? nullptr : sinks.data();
    return t;
  }

  void copy_cell(int64_t from, Data& to, int64_t to_cell) const {
    std::copy_n(k.begin() + from * static_cast<int64_t>(k_pitch), k_cell,
                to.k.begin() + to_cell * static_cast<int64_t>(to.k_pitch));
    std::copy_n(v.begin() + from * static_cast<int64_t>(v_pitch), v_cell,
                to.v.begin() + to_cell * static_cast<int64_t>(to.v_pitch));
  }

  void fill_cell(int64_t cell, uint16_t value) {
    std::fill_n(k.begin() + cell * static_cast<int64_t>(k_pitch), k_cell, value);
    std::fill_n(v.begin() + cell * static_cast<int64_t>(v_pitch), v_cell, value);
  }
};

void run_threads(AttentionPlan& plan, const AttentionTensors& tensors, int threads) {
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([&, i] { plan.run(tensors, i, threads); });
  }
  plan.run(tensors, 0, threads);
  for (std::thread& t : others) t.join();
}

// The output of the whole batch, [row][out_pitch], -7 where nothing was written.
std::vector<float> compute(const Data& data, const std::vector<AttentionSegment>& segments,
                           AttentionIsa isa, int threads) {
  std::vector<float> out(static_cast<size_t>(data.rows()) * data.out_pitch, -7.0F);
  AttentionPlan plan(data.shape, threads, isa);
  plan.set_batch(segments);
  run_threads(plan, data.tensors(out), threads);
  return out;
}

// In F64: the weights of one query head's row over its keys.
std::vector<double> reference_weights(const Data& data, int row, int head, int64_t first_cell,
                                      int64_t n_keys) {
  const AttentionShape& s = data.shape;
  const int kv = head / (s.n_head / s.n_head_kv);
  const float* q = data.q.data() + row * data.q_pitch + static_cast<size_t>(head) * s.head_dim_k;
  std::vector<double> w(static_cast<size_t>(n_keys));
  for (int64_t j = 0; j < n_keys; ++j) {
    const uint16_t* k = data.k.data() + static_cast<size_t>(first_cell + j) * data.k_pitch +
                        static_cast<size_t>(kv) * s.head_dim_k;
    double dot = 0;
    for (int d = 0; d < s.head_dim_k; ++d) dot += q[d] * from_half(k[d]);
    dot *= s.scale;
    w[static_cast<size_t>(j)] = s.soft_cap > 0 ? s.soft_cap * std::tanh(dot / s.soft_cap) : dot;
  }
  double top = *std::max_element(w.begin(), w.end());
  if (!data.sinks.empty()) top = std::max<double>(top, data.sinks[static_cast<size_t>(head)]);
  double sum = 0;
  if (!data.sinks.empty()) sum = std::exp(data.sinks[static_cast<size_t>(head)] - top);
  for (double& x : w) sum += x = std::exp(x - top);
  for (double& x : w) x /= sum;
  return w;
}

// Row `row` over n_keys cells from first_cell, in F64.
std::vector<double> reference_row(const Data& data, int row, int64_t first_cell, int64_t n_keys) {
  const AttentionShape& s = data.shape;
  std::vector<double> out(static_cast<size_t>(s.n_head) * s.head_dim_v);
  for (int head = 0; head < s.n_head; ++head) {
    const int kv = head / (s.n_head / s.n_head_kv);
    const std::vector<double> p = reference_weights(data, row, head, first_cell, n_keys);
    for (int64_t j = 0; j < n_keys; ++j) {
      const uint16_t* v = data.v.data() + static_cast<size_t>(first_cell + j) * data.v_pitch +
                          static_cast<size_t>(kv) * s.head_dim_v;
      for (int d = 0; d < s.head_dim_v; ++d) {
        out[static_cast<size_t>(head) * s.head_dim_v + d] +=
            p[static_cast<size_t>(j)] * from_half(v[d]);
      }
    }
  }
  return out;
}

// The largest error over all rows of the segments (every `step`-th row).
double worst_error(const Data& data, const std::vector<AttentionSegment>& segments,
                   const std::vector<float>& out, int step = 1) {
  double worst = 0;
  for (const AttentionSegment& s : segments) {
    for (int r = 0; r < s.n_rows;
         r += (r + step < s.n_rows || r == s.n_rows - 1) ? step : s.n_rows - 1 - r) {
      const int row = s.first_row + r;
      const int64_t n_keys = s.n_past + r + 1;
      const int64_t unseen =
          data.shape.window > 0 ? std::max<int64_t>(0, n_keys - data.shape.window) : 0;
      const auto expected = reference_row(data, row, s.first_cell + unseen, n_keys - unseen);
      for (size_t i = 0; i < expected.size(); ++i) {
        const double error = std::abs(out[row * data.out_pitch + i] - expected[i]);
        if (!(error <= worst)) worst = error;
      }
    }
  }
  return worst;
}

// Whether two outputs agree to the bit on `n` rows from the given ones.
::testing::AssertionResult same_rows(const Data& data, const std::vector<float>& a, int a_row,
                                     const std::vector<float>& b, int b_row, int n) {
  const size_t width = static_cast<size_t>(data.shape.n_head) * data.shape.head_dim_v;
  for (int r = 0; r < n; ++r) {
    const float* x = a.data() + (a_row + r) * data.out_pitch;
    const float* y = b.data() + (b_row + r) * data.out_pitch;
    for (size_t i = 0; i < width; ++i) {
      if (std::bit_cast<uint32_t>(x[i]) != std::bit_cast<uint32_t>(y[i])) {
        return ::testing::AssertionFailure()
               << "row " << r << ", column " << i << ": " << x[i] << " and " << y[i];
      }
    }
  }
  return ::testing::AssertionSuccess();
}

class AttentionTest : public ::testing::TestWithParam<AttentionIsa> {
 protected:
  void SetUp() override {
    if (!attention_isa_available(GetParam())) GTEST_SKIP() << "this machine lacks it";
  }
};

INSTANTIATE_TEST_SUITE_P(Isa, AttentionTest,
                         ::testing::Values(AttentionIsa::kPortable, AttentionIsa::kAvx2,
                                           AttentionIsa::kAvx512),
                         [](const auto& info) { return attention_isa_name(info.param); });

AttentionShape shape_of(int n_head, int n_head_kv, int dim_k, int dim_v) {
  return {n_head, n_head_kv, dim_k, dim_v, 1.0F / std::sqrt(static_cast<float>(dim_k))};
}

TEST_P(AttentionTest, MatchesReferenceForEveryHeadShape) {
  const AttentionShape shapes[] = {
      shape_of(9, 3, 64, 64),   shape_of(4, 4, 128, 128), shape_of(8, 1, 80, 80),
      shape_of(6, 2, 96, 96),   shape_of(2, 1, 112, 112), shape_of(2, 2, 256, 256),
      shape_of(3, 3, 8, 8),     shape_of(2, 1, 16, 40),   shape_of(4, 2, 192, 128),
      shape_of(71, 1, 64, 64),  shape_of(2, 1, 24, 72),   shape_of(2, 2, 7, 13),
      shape_of(100, 1, 32, 32), shape_of(1, 1, 1, 1),     shape_of(1, 1, 1024, 1024),
      shape_of(3, 1, 61, 130),
  };
  for (const AttentionShape& shape : shapes) {
    ASSERT_TRUE(attention_supports(shape));
    for (const auto& [rows, past] : {std::pair{1, 0}, {1, 600}, {13, 58}, {70, 0}}) {
      const Data data(shape, past + rows, rows);
      const std::vector<AttentionSegment> segments = {{0, rows, 0, past}};
      EXPECT_LT(worst_error(data, segments, compute(data, segments, GetParam(), 2), 23), 2e-5)
          << shape.n_head << "/" << shape.n_head_kv << " heads of " << shape.head_dim_k << "/"
          << shape.head_dim_v << ", " << rows << " rows after " << past;
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceAcrossTileAndPartitionBorders) {
  const AttentionShape shape = shape_of(3, 1, 64, 64);
  for (const int past :
       {0, 1, 62, 63, 64, 65, 127, 447, 448, 510, 511, 512, 513, 1023, 1024, 1300}) {
    for (const int rows : {1, 2, 5, 33}) {
      const Data data(shape, past + rows, rows, 7);
      const std::vector<AttentionSegment> segments = {{0, rows, 0, past}};
      EXPECT_LT(worst_error(data, segments, compute(data, segments, GetParam(), 3), 4), 2e-5)
          << rows << " rows after " << past;
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceWithWindows) {
  for (const int64_t window : {1, 3, 40, 64, 100, 512, 700, 5000}) {
    AttentionShape shape = shape_of(6, 2, 64, 64);
    shape.window = window;
    for (const int past : {0, 1, 63, 64, 127, 511, 600, 1300}) {
      for (const int rows : {1, 2, 33, 200}) {
        const Data data(shape, past + rows, rows, 7);
        const std::vector<AttentionSegment> segments = {{0, rows, 0, past}};
        EXPECT_LT(worst_error(data, segments, compute(data, segments, GetParam(), 3), 7), 2e-5)
            << "a window of " << window << ", " << rows << " rows after " << past;
      }
    }
  }
}

TEST_P(AttentionTest, MatchesReferenceWithCappedScores) {
  for (const float cap : {2.0F, 50.0F}) {
    for (const int64_t window : {0, 90}) {
      AttentionShape shape = shape_of(4, 2, 64, 64);
      shape.soft_cap = cap;
      shape.window = window;
      for (const auto& [rows, past] : {std::pair{1, 600}, {130, 0}, {40, 500}}) {
        const Data data(shape, past + rows, rows, 9, 4.0);
        const std::vector<AttentionSegment> segments = {{0, rows, 0, past}};
        EXPECT_LT(worst_error(data, segments, compute(data, segments, GetParam(), 2), 3), 2e-4)
            << "a cap of " << cap << ", a window of " << window;
      }
    }
  }
}

// Far below the scores, among them, and so far above that little is left for the keys.
TEST_P(AttentionTest, MatchesReferenceWithSinks) {
  for (const int64_t window : {0, 90}) {
    AttentionShape shape = shape_of(6, 2, 64, 64);
    shape.window = window;
    for (const auto& [rows, past] : {std::pair{1, 600}, {130, 0}, {40, 500}}) {
      Data data(shape, past + rows, rows, 9);
      data.sinks = {-300.0F, -2.0F, 0.0F, 1.5F, 8.0F, 300.0F};
      const std::vector<AttentionSegment> segments = {{0, rows, 0, past}};
      const std::vector<float> out = compute(data, segments, GetParam(), 2);
      EXPECT_LT(worst_error(data, segments, out, 3), 1e-5) << "a window of " << window;
      for (int row = 0; row < rows; ++row) {
        const float* last = out.data() + static_cast<size_t>(row) * data.out_pitch + size_t{5} * 64;
        EXPECT_EQ(std::count(last, last + 64, 0.0F), 64) << "all of it falls on the sink";
      }
    }
  }
}

// Nor on what lies before the window.
TEST_P(AttentionTest, BitsOfWindowsDoNotDependOnChunkingOrThreads) {
  for (const int64_t window : {7, 100, 640}) {
    AttentionShape shape = shape_of(9, 3, 64, 64);
    shape.window = window;
    const int n = 1400;
    Data data(shape, n, n, 11);
    const auto whole = compute(data, {{0, n, 0, 0}}, GetParam(), 1);
    for (const int chunk : {1, 7, 64, 129, 500}) {
      AttentionPlan plan(shape, 3, GetParam());
      std::vector<float> out(whole.size());
      int past = 0;
      for (int first = chunk == 1 ? n - 90 : 0; first < n; first += chunk) {
        // What no row sees any more may hold anything.
        for (; past < first - window; ++past) data.fill_cell(past, kHalfNan);
        const AttentionSegment segment{first, std::min(chunk, n - first), 0, first};
        plan.set_batch({&segment, 1});
        run_threads(plan, data.tensors(out), 1 + first % 3);
        ASSERT_TRUE(same_rows(data, whole, first, out, first, segment.n_rows))
            << "a window of " << window << ", chunks of " << chunk << " from " << first;
      }
      data = Data(shape, n, n, 11);
    }
  }
}

// Vectors agree to the bit, as without a window.
TEST(AttentionWindow, InstructionSetsAgree) {
  if (!attention_isa_available(AttentionIsa::kAvx512)) GTEST_SKIP() << "this machine lacks it";
  AttentionShape shape = shape_of(4, 2, 80, 80);
  shape.window = 90;
  shape.soft_cap = 3;
  const Data data(shape, 300, 300, 5);
  const std::vector<AttentionSegment> segments = {{0, 300, 0, 0}};
  EXPECT_TRUE(same_rows(data, compute(data, segments, AttentionIsa::kAvx2, 2), 0,
                        compute(data, segments, AttentionIsa::kAvx512, 2), 0, 300));
}

TEST_P(AttentionTest, MatchesReferenceWithSharpScores) {
  // Scores of several hundred: maxima jump, most weights vanish.
  const Data data(shape_of(4, 2, 64, 64), 1100, 40, 3, 8.0);
  const std::vector<AttentionSegment> segments = {{0, 40, 0, 1060}};
  EXPECT_LT(worst_error(data, segments, compute(data, segments, GetParam(), 2)), 5e-4);
}

TEST_P(AttentionTest, SeveralSegmentsEachSeeTheirOwnCells) {
  const Data data(shape_of(6, 2, 64, 64), 3000, 80, 5);
  const std::vector<AttentionSegment> segments = {
      {3, 1, 700, 630}, {10, 50, 1400, 20}, {4, 1, 0, 0}, {5, 0, 100, 3}, {60, 20, 1500, 1300}};
  const auto out = compute(data, segments, GetParam(), 4);
  EXPECT_LT(worst_error(data, segments, out, 3), 2e-5);
  // Rows of no segment, and the gap behind each row, stay as they were.
  for (const int row : {0, 2, 5, 9}) EXPECT_EQ(out[row * data.out_pitch], -7.0F);
  for (int row = 0; row < data.rows(); ++row) {
    EXPECT_EQ(out[(row + 1) * data.out_pitch - 1], -7.0F);
  }
}

// The promise itself: rows computed in one piece, on one thread, against any other way.
TEST_P(AttentionTest, BitsDoNotDependOnChunkingOrThreads) {
  for (const AttentionShape& shape : {shape_of(9, 3, 64, 64), shape_of(4, 4, 40, 24)}) {
    const int n = 700;
    const Data data(shape, n, n, 11);
    const auto whole = compute(data, {{0, n, 0, 0}}, GetParam(), 1);
    for (int threads = 1; threads <= 5; ++threads) {
      EXPECT_TRUE(
          same_rows(data, whole, 0, compute(data, {{0, n, 0, 0}}, GetParam(), threads), 0, n))
          << threads << " threads";
    }
    for (const int chunk : {1, 2, 7, 64, 129, 384}) {
      AttentionPlan plan(shape, 3, GetParam());
      std::vector<float> out(whole.size());
      for (int first = chunk == 1 ? n - 80 : 0; first < n; first += chunk) {
        const AttentionSegment segment{first, std::min(chunk, n - first), 0, first};
        plan.set_batch({&segment, 1});
        run_threads(plan, data.tensors(out), 1 + first % 3);
        ASSERT_TRUE(same_rows(data, whole, first, out, first, segment.n_rows))
            << "chunks of " << chunk << " from " << first;
      }
    }
  }
}

TEST_P(AttentionTest, BitsDoNotDependOnOtherSequencesOrPlaceInTheArena) {
  const AttentionShape shape = shape_of(6, 2, 64, 64);
  std::mt19937 rng(17);
  const auto pick = [&rng](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(rng);
  };
  const Data alone(shape, 1400, 1400, 19);
  Data batch(shape, 8000, 400, 23);
  for (int64_t c = 0; c < batch.n_cells; ++c) batch.fill_cell(c, kHalfNan);
  for (int round = 0; round < 8; ++round) {
    // Random pieces of one conversation stand for different sequences of one batch.
    std::vector<AttentionSegment> segments;
    std::vector<int> sources;
    int row = 0;
    int64_t cell = pick(0, 50);
    while (row < 300 && cell < 6500) {
      const int n_rows = pick(0, 2) == 0 ? pick(2, 90) : 1;
      const int past = pick(0, 1400 - n_rows);
      for (int j = 0; j < past + n_rows; ++j) alone.copy_cell(j, batch, cell + j);
      for (int r = 0; r < n_rows; ++r) {
        std::copy_n(alone.q.begin() + static_cast<int64_t>((past + r) * alone.q_pitch),
                    alone.q_pitch,
                    batch.q.begin() + static_cast<int64_t>((row + r) * batch.q_pitch));
      }
      segments.push_back({row, n_rows, cell, past});
      sources.push_back(past);
      row += n_rows + pick(0, 2);
      cell += past + n_rows + pick(0, 9);
    }
    const auto together = compute(batch, segments, GetParam(), pick(1, 5));
    for (size_t i = 0; i < segments.size(); ++i) {
      const AttentionSegment& s = segments[i];
      const auto single = compute(alone, {{sources[i], s.n_rows, 0, sources[i]}}, GetParam(), 1);
      ASSERT_TRUE(same_rows(alone, single, sources[i], together, s.first_row, s.n_rows))
          << "round " << round << ", segment " << i;
    }
  }
}

TEST_P(AttentionTest, UnattendedCellsNeverLeak) {
  for (const AttentionShape& shape : {shape_of(9, 3, 64, 64), shape_of(2, 2, 20, 20)}) {
    const int first = 37;
    for (const auto& [rows, past] : {std::pair{1, 70}, {1, 512}, {6, 61}, {100, 0}, {100, 490}}) {
      Data data(shape, first + past + rows + 200, rows, 29);
      const std::vector<AttentionSegment> segments = {{0, rows, first, past}};
      const auto clean = compute(data, segments, GetParam(), 2);
      for (const uint16_t poison : {kHalfNan, kHalfInf}) {
        Data dirty = data;
        for (int64_t c = 0; c < dirty.n_cells; ++c) {
          if (c < first || c >= first + past + rows) dirty.fill_cell(c, poison);
        }
        EXPECT_TRUE(same_rows(data, clean, 0, compute(dirty, segments, GetParam(), 2), 0, rows));
        // A row that went wrong must not reach the rows before it in the same segment.
        for (int bad = rows - 1; bad > 0; bad -= 1 + rows / 4) {
          dirty.fill_cell(first + past + bad, poison);
          const auto out = compute(dirty, segments, GetParam(), 2);
          ASSERT_TRUE(same_rows(data, clean, 0, out, 0, bad)) << rows << " after " << past;
          EXPECT_TRUE(std::isnan(out[bad * data.out_pitch])) << "and its own is not hidden";
        }
      }
    }
  }
}

TEST_P(AttentionTest, PlanServesManyLayersWithAnyNumberOfThreads) {
  const AttentionShape shape = shape_of(9, 3, 64, 64);
  const std::vector<AttentionSegment> segments = {{0, 1, 0, 1299}, {1, 1, 0, 77}, {2, 40, 0, 900}};
  AttentionPlan plan(shape, 5);
  plan.set_batch(segments);
  const size_t bytes = plan.scratch_bytes();
  for (int layer = 0; layer < 12; ++layer) {
    const Data data(shape, 1300, 42, 31U + static_cast<unsigned>(layer));
    std::vector<float> out(static_cast<size_t>(data.rows()) * data.out_pitch);
    run_threads(plan, data.tensors(out), 1 + layer % 5);
    ASSERT_TRUE(same_rows(data, compute(data, segments, AttentionIsa::kBest, 1), 0, out, 0, 42));
  }
  plan.set_batch({});
  std::vector<float> none;
  run_threads(plan, Data(shape, 1, 0).tensors(none), 3);
  plan.set_batch(segments);
  EXPECT_EQ(plan.scratch_bytes(), bytes) << "a step of a size seen before allocates nothing";
}

// What the rows of a segment should be told to attend.
std::vector<AttentionTally> reference_tallies(const Data& data, const AttentionSegment& segment,
                                              const AttentionObservation& rows, int64_t n_keys) {
  const AttentionShape& s = data.shape;
  std::vector<AttentionTally> tallies(static_cast<size_t>(s.n_head_kv));
  for (AttentionTally& tally : tallies) tally.reset(n_keys);
  for (int row = rows.first_row; row < rows.end_row; row += rows.stride) {
    for (int head = 0; head < s.n_head; ++head) {
      const std::vector<double> w = reference_weights(data, segment.first_row + row, head,
                                                      segment.first_cell, segment.n_past + row + 1);
      AttentionTally& tally = tallies[static_cast<size_t>(head / (s.n_head / s.n_head_kv))];
      const double top = *std::max_element(w.begin(), w.end());
      double squares = 0;
      for (size_t j = 0; j < w.size(); ++j) {
        squares += w[j] * w[j];
        if (w[j] < 0.01 * top) tally.small += 1;
        if (j >= static_cast<size_t>(n_keys)) continue;
        tally.sum[j] += static_cast<float>(w[j]);
        tally.top[j] = std::max(tally.top[j], static_cast<float>(w[j]));
      }
      tally.seen += static_cast<double>(w.size());
      tally.spread += 1 / squares / static_cast<double>(w.size());
      ++tally.n_rows;
    }
  }
  return tallies;
}

TEST_P(AttentionTest, ToldWeightsAreThoseOfTheSoftmax) {
  for (const AttentionShape& shape : {shape_of(9, 3, 64, 64), shape_of(2, 2, 20, 20)}) {
    const Data data(shape, 1000, 130, 41, 2.0);
    const std::vector<AttentionSegment> segments = {{0, 1, 3, 77}, {1, 120, 100, 600}};
    for (const auto& [first, end, stride, n_keys] :
         {std::tuple{0, 120, 1, 720}, {88, 120, 1, 600}, {5, 119, 16, 601}, {119, 120, 1, 64}}) {
      std::vector<AttentionTally> told(static_cast<size_t>(shape.n_head_kv));
      for (AttentionTally& tally : told) tally.reset(n_keys);
      const AttentionObservation rows{told.data(), 1, first, end, stride};
      std::vector<float> out(static_cast<size_t>(data.rows()) * data.out_pitch, -7.0F);
      AttentionPlan plan(shape, 2, GetParam());
      plan.set_batch(segments);
      plan.run(data.tensors(out), 0, 1, rows);
      EXPECT_EQ(out, compute(data, segments, GetParam(), 1)) << "what is computed stays the same";

      const auto expected = reference_tallies(data, segments[1], rows, n_keys);
      std::vector<AttentionTally> threaded(told.size());
      for (AttentionTally& tally : threaded) tally.reset(n_keys);
      const AttentionObservation same{threaded.data(), 1, first, end, stride};
      std::thread other([&] { plan.run(data.tensors(out), 1, 2, same); });
      plan.run(data.tensors(out), 0, 2, same);
      other.join();
      for (size_t head = 0; head < told.size(); ++head) {
        const AttentionTally& t = told[head];
        const AttentionTally& e = expected[head];
        for (size_t j = 0; j < static_cast<size_t>(n_keys); ++j) {
          ASSERT_NEAR(t.sum[j], e.sum[j], 1e-4 * (1 + e.sum[j])) << j;
          ASSERT_NEAR(t.top[j], e.top[j], 1e-4) << j;
        }
        EXPECT_EQ(t.n_rows, e.n_rows);
        EXPECT_EQ(t.seen, e.seen);
        EXPECT_NEAR(t.small, e.small, 1e-4 * e.seen);
        EXPECT_NEAR(t.spread, e.spread, 1e-3 * e.spread);
        EXPECT_EQ(threaded[head].sum, t.sum) << "whoever computes it";
        EXPECT_EQ(threaded[head].small, t.small);
      }
    }
  }
}

TEST_P(AttentionTest, StepsAddUpToOneTally) {
  const AttentionShape shape = shape_of(6, 2, 64, 64);
  const Data data(shape, 400, 200, 43);
  const auto tell = [&](std::vector<AttentionTally>& told, const AttentionSegment& segment) {
    std::vector<float> out(static_cast<size_t>(data.rows()) * data.out_pitch);
    AttentionPlan plan(shape, 1, GetParam());
    plan.set_batch({&segment, 1});
    plan.run(data.tensors(out), 0, 1, {told.data(), 0, 0, segment.n_rows, 1});
  };
  std::vector<AttentionTally> at_once(2);
  std::vector<AttentionTally> in_steps(2);
  for (auto* tallies : {&at_once, &in_steps}) {
    for (AttentionTally& tally : *tallies) tally.reset(200);
  }
  tell(at_once, {0, 200, 50, 0});
  tell(in_steps, {0, 70, 50, 0});
  tell(in_steps, {70, 130, 50, 70});
  for (size_t head = 0; head < 2; ++head) {
    EXPECT_EQ(in_steps[head].n_rows, at_once[head].n_rows);
    EXPECT_EQ(in_steps[head].top, at_once[head].top);
    for (size_t j = 0; j < 200; ++j) {
      EXPECT_NEAR(in_steps[head].sum[j], at_once[head].sum[j], 1e-5) << j;
    }
  }
}

TEST(AttentionIsaTest, Avx2AndAvx512AgreeToTheBit) {
  if (!attention_isa_available(AttentionIsa::kAvx512)) GTEST_SKIP() << "this machine lacks it";
  for (const AttentionShape& shape : {shape_of(9, 3, 64, 64), shape_of(2, 2, 72, 88)}) {
    const Data data(shape, 1400, 200, 37, 2.0);
    const std::vector<AttentionSegment> segments = {{0, 150, 0, 1000}, {150, 1, 100, 777}};
    EXPECT_TRUE(same_rows(data, compute(data, segments, AttentionIsa::kAvx2, 2), 0,
                          compute(data, segments, AttentionIsa::kAvx512, 2), 0, 151));
  }
}

TEST(AttentionIsaTest, BestIsAvailableAndNamed) {
  EXPECT_TRUE(attention_isa_available(AttentionIsa::kBest));
  EXPECT_TRUE(attention_isa_available(AttentionIsa::kPortable));
  EXPECT_TRUE(attention_isa_available(attention_best_isa()));
  EXPECT_STRNE(attention_isa_name(attention_best_isa()), "best");
}

TEST(AttentionSupportsTest, RefusesWhatItCannotCompute) {
  EXPECT_TRUE(attention_supports(shape_of(9, 3, 64, 64)));
  EXPECT_FALSE(attention_supports(shape_of(8, 3, 64, 64)));
  EXPECT_FALSE(attention_supports(shape_of(0, 1, 64, 64)));
  EXPECT_FALSE(attention_supports(shape_of(8, 0, 64, 64)));
  EXPECT_FALSE(attention_supports({8, 8, 64, 2048, 1.0F}));
  EXPECT_FALSE(attention_supports({8, 8, 64, 64, std::numeric_limits<float>::quiet_NaN()}));
  EXPECT_FALSE(attention_supports(AttentionShape{}));
}

}  // namespace
}  // namespace hcache::engine
