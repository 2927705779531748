// The kernel, written once over a SIMD type and compiled once per instruction set.
//
// The including file defines, in an unnamed namespace of hcache::engine, a struct Simd with
//   kWidth              floats per vector: 4, 8 or 16
//   kRows, kCols        the register tile: rows by vectors
//   kHalfOperand        whether widening F16 while multiplying is cheap
//   F                   the vector; zero, set1, load, store, add, sub, mul, fma(a, b, c) = a·b + c
//   max(a, b)           b where a is NaN
//   hmax, hsum          over lanes; hsum adds halves: i + (i + kWidth/2), and so on
//   keep_first(x, n)    lanes from n on replaced by -infinity
//   pow2_mul(y, t, x)   y · 2^n where t = 1.5·2^23 + n, and 0 where x < -125
//   load_half(p), load_half_n(p, n)   widens kWidth, or n < kWidth, F16 values (rest is 0)
//   pack_keys           see pack_keys_scalar
// and includes this file right after. Two rows of vectors are multiplied in one way only, gemm();
// that a score's or an output's chain of operations is the same for every register tile is what
// makes results independent of batching.

#if defined(__clang__)
#define HCACHE_UNROLL _Pragma("unroll")
#else
#define HCACHE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace hcache::engine {
namespace {

constexpr int kTile = 64;
constexpr int kWidth = Simd::kWidth;
constexpr int kTileVectors = kTile / kWidth;
constexpr float kLowest = -3.402823466e+38F;

using F = Simd::F;

inline int min_int(int a, int b) { return a < b ? a : b; }

// 2^x for x <= 0: relative error 5e-7, exactly 1 at 0, exactly 0 below -125, NaN for NaN.
inline F exp2_nonpositive(F x) {
  const F magic = Simd::set1(12582912.0F);  // 1.5·2^23: adding it rounds to an integer
  const F t = Simd::add(x, magic);
  const F r = Simd::sub(x, Simd::sub(t, magic));
  // Minimax for 2^r on [-1/2, 1/2] with the constant term fixed at 1.
  F y = Simd::set1(0x1.23a604p-10F);
  y = Simd::fma(y, r, Simd::set1(0x1.3cbea8p-7F));
  y = Simd::fma(y, r, Simd::set1(0x1.c74322p-5F));
  y = Simd::fma(y, r, Simd::set1(0x1.ebfa4ep-3F));
  y = Simd::fma(y, r, Simd::set1(0x1.62e39ep-1F));
  y = Simd::fma(y, r, Simd::set1(1.0F));
  return Simd::pow2_mul(y, t, x);
}

inline float exp2_nonpositive(float x) {
  alignas(64) float lanes[kWidth];
  Simd::store(lanes, exp2_nonpositive(Simd::set1(x)));
  return lanes[0];
}

inline F load_operand(const float* p) { return Simd::load(p); }
inline F load_operand(const uint16_t* p) { return Simd::load_half(p); }

enum class Start { kZero, kLoad, kRescale };

// c[r][·] = (0 | c[r][·] | c[r][·]·rescale[r]) + Σ_k a[r][k] b[k][·], k in order, for R rows and
// C vectors. Strides count elements.
template <int R, int C, typename B>
void gemm(int n_k, const float* a, size_t a_stride, const B* b, size_t b_stride, float* c,
          size_t c_stride, Start start, const float* rescale) {
  F sum[R][C];
  HCACHE_UNROLL
  for (int r = 0; r < R; ++r) {
    HCACHE_UNROLL
    for (int i = 0; i < C; ++i) {
      sum[r][i] = start == Start::kZero ? Simd::zero() : Simd::load(c + r * c_stride + i * kWidth);
    }
  }
  if (start == Start::kRescale) {
    HCACHE_UNROLL
    for (int r = 0; r < R; ++r) {
      const F factor = Simd::set1(rescale[r]);
      HCACHE_UNROLL
      for (int i = 0; i < C; ++i) sum[r][i] = Simd::mul(sum[r][i], factor);
    }
  }
  for (int k = 0; k < n_k; ++k, b += b_stride) {
    F column[C];
    HCACHE_UNROLL
    for (int i = 0; i < C; ++i) column[i] = load_operand(b + i * kWidth);
    HCACHE_UNROLL
    for (int r = 0; r < R; ++r) {
      const F factor = Simd::set1(a[r * a_stride + k]);
      HCACHE_UNROLL
      for (int i = 0; i < C; ++i) sum[r][i] = Simd::fma(factor, column[i], sum[r][i]);
    }
  }
  HCACHE_UNROLL
  for (int r = 0; r < R; ++r) {
    HCACHE_UNROLL
    for (int i = 0; i < C; ++i) Simd::store(c + r * c_stride + i * kWidth, sum[r][i]);
  }
}

template <typename B>
using GemmFn = void (*)(int, const float*, size_t, const B*, size_t, float*, size_t, Start,
                        const float*);

template <typename B, int R, int C>
GemmFn<B> pick_gemm(int rows, int cols) {
  if constexpr (R > 1) {
    if (rows < R) return pick_gemm<B, R - 1, C>(rows, cols);
  }
  if constexpr (C > 1) {
    if (cols < C) return pick_gemm<B, R, C - 1>(rows, cols);
  }
  return gemm<R, C, B>;
}

// gemm for up to kRows rows and any number of vectors.
template <typename B>
void gemm_columns(int rows, int vectors, int n_k, const float* a, size_t a_stride, const B* b,
                  size_t b_stride, float* c, size_t c_stride, Start start, const float* rescale) {
  for (int chunks = (vectors + Simd::kCols - 1) / Simd::kCols; chunks > 0; --chunks) {
    const int cols = (vectors + chunks - 1) / chunks;
    pick_gemm<B, Simd::kRows, Simd::kCols>(rows, cols)(n_k, a, a_stride, b, b_stride, c, c_stride,
                                                       start, rescale);
    vectors -= cols;
    b += static_cast<size_t>(cols) * kWidth;
    c += static_cast<size_t>(cols) * kWidth;
  }
}

// Calls fn(first, rows) for pieces of [begin, end) of nearly equal size, at most kRows each.
template <typename Fn>
void for_row_pieces(int begin, int end, Fn fn) {
  for (int pieces = (end - begin + Simd::kRows - 1) / Simd::kRows; pieces > 0; --pieces) {
    const int rows = (end - begin + pieces - 1) / pieces;
    fn(begin, rows);
    begin += rows;
  }
}

// Turns one row of a tile's scores into weights and updates the row's maximum and sum. Returns the
// factor that the row's accumulator must be multiplied by.
inline float softmax_row(float* scores, int n_valid, float* row_max, float* row_sum) {
  F s[kTileVectors];
  F top = Simd::set1(*row_max);
  HCACHE_UNROLL
  for (int i = 0; i < kTileVectors; ++i) {
    s[i] = Simd::load(scores + i * kWidth);
    if (n_valid < kTile) s[i] = Simd::keep_first(s[i], n_valid - i * kWidth);
    top = Simd::max(s[i], top);
  }
  const float old_max = *row_max;
  const float new_max = Simd::hmax(top);
  const F shift = Simd::set1(new_max);
  HCACHE_UNROLL
  for (int i = 0; i < kTileVectors; ++i) {
    s[i] = exp2_nonpositive(Simd::sub(s[i], shift));
    Simd::store(scores + i * kWidth, s[i]);
  }
  HCACHE_UNROLL
  for (int n = kTileVectors / 2; n > 0; n /= 2) {
    HCACHE_UNROLL
    for (int i = 0; i < n; ++i) s[i] = Simd::add(s[i], s[i + n]);
  }
  const float tile_sum = Simd::hsum(s[0]);
  if (new_max == old_max) {
    *row_sum += tile_sum;
    return 1.0F;
  }
  const float rescale = exp2_nonpositive(old_max - new_max);
  *row_max = new_max;
  *row_sum = *row_sum * rescale + tile_sum;
  return rescale;
}

// out[dim][key] = the F16 value of key `key`, dimension `dim`, for n_keys <= kTile keys, rows of
// kTile. May write other values of the same keys to the entries from n_keys on.
[[maybe_unused]] void pack_keys_scalar(const uint8_t* k, size_t stride, int n_keys, int first_dim,
                                       int end_dim, uint16_t* out) {
  for (int key = 0; key < n_keys; ++key) {
    const auto* row = reinterpret_cast<const uint16_t*>(k + key * stride);
    for (int d = first_dim; d < end_dim; ++d) out[d * kTile + key] = row[d];
  }
}

void widen_values(const AttentionBlock& block, const uint8_t* v, int n_keys, float* out) {
  for (int key = 0; key < n_keys; ++key) {
    const auto* row = reinterpret_cast<const uint16_t*>(v + key * block.v_stride);
    float* wide = out + static_cast<size_t>(key) * block.dim_v_padded;
    int d = 0;
    for (; d + kWidth <= block.dim_v; d += kWidth) {
      Simd::store(wide + d, Simd::load_half(row + d));
    }
    if (d < block.dim_v) Simd::store(wide + d, Simd::load_half_n(row + d, block.dim_v - d));
  }
}

void attend(const AttentionBlock& block, int64_t first_key, int64_t end_key,
            const AttentionState& state, const AttentionTiles& tiles) {
  const int n_rows = block.n_rows;
  const auto acc_stride = static_cast<size_t>(block.dim_v_padded);
  for (int r = 0; r < n_rows; ++r) {
    state.max[r] = kLowest;
    state.sum[r] = 0.0F;
  }
  for (size_t i = 0; i < n_rows * acc_stride; i += kWidth) {
    Simd::store(state.acc + i, Simd::zero());
  }

  // Widening a tile once pays when enough rows use it.
  const bool wide = !Simd::kHalfOperand || n_rows > 2 * Simd::kRows;
  const bool wide_v = wide || block.dim_v % kWidth != 0;
  const int v_vectors = (block.dim_v + kWidth - 1) / kWidth;

  int row_begin = 0;  // rows before it attend none of the keys from here on
  for (int64_t tile = first_key; tile < end_key; tile += kTile) {
    const int n_keys = end_key - tile < kTile ? static_cast<int>(end_key - tile) : kTile;
    while (block.limits[row_begin] <= tile) ++row_begin;
    const auto valid = [&](int r) {
      return block.limits[r] - tile < n_keys ? static_cast<int>(block.limits[r] - tile) : n_keys;
    };

    const uint8_t* k = block.k + tile * block.k_stride;
    Simd::pack_keys(k, block.k_stride, n_keys, block.dim_k, tiles.k_half);
    const int key_vectors = (n_keys + kWidth - 1) / kWidth;
    const auto score = [&](int r, int rows, const auto* keys) {
      gemm_columns(rows, key_vectors, block.dim_k, block.q + static_cast<size_t>(r) * block.dim_k,
                   block.dim_k, keys, kTile, tiles.scores + static_cast<size_t>(r) * kTile, kTile,
                   Start::kZero, nullptr);
    };
    if (wide) {
      for (int i = 0; i < block.dim_k * kTile; i += kWidth) {
        Simd::store(tiles.k_wide + i, Simd::load_half(tiles.k_half + i));
      }
      for_row_pieces(row_begin, n_rows, [&](int r, int rows) { score(r, rows, tiles.k_wide); });
    } else if constexpr (Simd::kHalfOperand) {
      for_row_pieces(row_begin, n_rows, [&](int r, int rows) { score(r, rows, tiles.k_half); });
    }

    for (int r = row_begin; r < n_rows; ++r) {
      tiles.rescale[r] = softmax_row(tiles.scores + static_cast<size_t>(r) * kTile, valid(r),
                                     state.max + r, state.sum + r);
    }

    const uint8_t* v = block.v + tile * block.v_stride;
    const auto accumulate = [&](int r, int rows, const auto* values, size_t stride) {
      const auto add = [&](int row, int count, int begin, int end, Start start) {
        gemm_columns(count, v_vectors, end - begin,
                     tiles.scores + static_cast<size_t>(row) * kTile + begin, kTile,
                     values + begin * stride, stride, state.acc + row * acc_stride, acc_stride,
                     start, tiles.rescale + row);
      };
      bool rescale = false;
      for (int i = 0; i < rows; ++i) rescale |= tiles.rescale[r + i] != 1.0F;
      // The rows together up to the first one's last key, then each alone: what a row does not
      // attend never meets its accumulator.
      const int common = valid(r);
      add(r, rows, 0, common, rescale ? Start::kRescale : Start::kLoad);
      for (int i = 1; i < rows; ++i) {
        if (valid(r + i) > common) add(r + i, 1, common, valid(r + i), Start::kLoad);
      }
    };
    if (wide_v) {
      widen_values(block, v, n_keys, tiles.v_wide);
      for_row_pieces(row_begin, n_rows,
                     [&](int r, int rows) { accumulate(r, rows, tiles.v_wide, acc_stride); });
    } else if constexpr (Simd::kHalfOperand) {
      const auto* half = reinterpret_cast<const uint16_t*>(v);
      for_row_pieces(row_begin, n_rows, [&](int r, int rows) {
        accumulate(r, rows, half, block.v_stride / sizeof(uint16_t));
      });
    }
  }
}

void merge(const AttentionState& into, const AttentionState& from, int n_rows, int dim_v_padded) {
  for (int r = 0; r < n_rows; ++r) {
    const float new_max = into.max[r] < from.max[r] ? from.max[r] : into.max[r];
    const float a = exp2_nonpositive(into.max[r] - new_max);
    const float b = exp2_nonpositive(from.max[r] - new_max);
    into.max[r] = new_max;
    into.sum[r] = into.sum[r] * a + from.sum[r] * b;
    float* x = into.acc + static_cast<size_t>(r) * dim_v_padded;
    const float* y = from.acc + static_cast<size_t>(r) * dim_v_padded;
    for (int i = 0; i < dim_v_padded; i += kWidth) {
      const F scaled = Simd::mul(Simd::load(x + i), Simd::set1(a));
      Simd::store(x + i, Simd::fma(Simd::load(y + i), Simd::set1(b), scaled));
    }
  }
}

}  // namespace
}  // namespace hcache::engine
