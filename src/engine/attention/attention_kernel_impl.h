// The kernel, written once over a SIMD type and compiled once per instruction set.
//
// The including file defines, in an unnamed namespace of hcache::engine, a struct Simd with
//   kWidth              floats per vector: 4, 8 or 16
//   kRows, kCols        the register tile: rows by vectors
//   kHalfOperand        whether widening F16 while multiplying is cheap
//   F                   the vector; zero, set1, load, store, add, sub, mul, div,
//                       fma(a, b, c) = a·b + c
//   max(a, b)           b where a is NaN
//   reduce<op>(x, out)  combines the lanes of each of one or four vectors, halves first: lane i
//                       with lane i + kWidth/2, and so on
//   keep_first(x, n)    lanes from n on replaced by -infinity
//   pow2_mul(y, t, x)   y · 2^n where t = 1.5·2^23 + n, and 0 where x < -125
//   load_half(p), load_half_n(p, n)   widens kWidth, or n < kWidth, F16 values (rest is 0)
//   pack_keys(k, stride, n_keys, dim, out)   transposes n_keys <= kTile cells of F16 into
//                       out[dim][key], rows of kTile, of F16 or widened to F32; entries from n_keys
//                       on may get other values of the same keys
// and includes this file right after. Scores and outputs are products of one function, gemm(), and
// the chain of operations behind each of its numbers is the same for every register tile: that
// makes a row's result independent of the rows beside it.

#if defined(__clang__)
#define HCACHE_UNROLL _Pragma("unroll")
#else
#define HCACHE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace hcache::engine {
namespace {

constexpr int kWidth = Simd::kWidth;
constexpr int kTileVectors = kTile / kWidth;
constexpr float kLowest = -3.402823466e+38F;
constexpr float kKeep[1] = {1.0F};  // as a row's rescale

using F = Simd::F;

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

// c[r][·] = c[r][·]·rescale[r] + Σ_k a[r][k] b[k][·], k in order, for R rows and C vectors. Without
// rescale the sum starts at zero instead. Strides count elements.
template <int R, int C, typename B>
void gemm(int n_k, const float* a, size_t a_stride, const B* b, size_t b_stride, float* c,
          size_t c_stride, const float* rescale) {
  F sum[R][C];
  HCACHE_UNROLL
  for (int r = 0; r < R; ++r) {
    HCACHE_UNROLL
    for (int i = 0; i < C; ++i) sum[r][i] = Simd::zero();
  }
  if (rescale != nullptr) {
    HCACHE_UNROLL
    for (int r = 0; r < R; ++r) {
      const F factor = Simd::set1(rescale[r]);
      HCACHE_UNROLL
      for (int i = 0; i < C; ++i) {
        sum[r][i] = Simd::mul(Simd::load(c + r * c_stride + i * kWidth), factor);
      }
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
using GemmFn = void (*)(int, const float*, size_t, const B*, size_t, float*, size_t, const float*);

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
                  size_t b_stride, float* c, size_t c_stride, const float* rescale) {
  for (int chunks = (vectors + Simd::kCols - 1) / Simd::kCols; chunks > 0; --chunks) {
    const int cols = (vectors + chunks - 1) / chunks;
    pick_gemm<B, Simd::kRows, Simd::kCols>(rows, cols)(n_k, a, a_stride, b, b_stride, c, c_stride,
                                                       rescale);
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

// The largest score of N rows of a tile each, and at least kLowest.
template <int N>
void tile_maxima(const float* scores, float* tile_max) {
  F top[N];
  HCACHE_UNROLL
  for (int r = 0; r < N; ++r) {
    top[r] = Simd::set1(kLowest);
    HCACHE_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      top[r] = Simd::max(Simd::load(scores + r * kTile + i * kWidth), top[r]);
    }
  }
  Simd::template reduce<Simd::max>(top, tile_max);
}

// Turns the scores of N rows into weights relative to their maxima, and sums each row's weights.
template <int N>
void tile_weights(float* scores, const float* row_max, float* tile_sum) {
  F sum[N];
  HCACHE_UNROLL
  for (int r = 0; r < N; ++r) {
    const F shift = Simd::set1(row_max[r]);
    F w[kTileVectors];
    HCACHE_UNROLL
    for (int i = 0; i < kTileVectors; ++i) {
      float* at = scores + r * kTile + i * kWidth;
      w[i] = exp2_nonpositive(Simd::sub(Simd::load(at), shift));
      Simd::store(at, w[i]);
    }
    HCACHE_UNROLL
    for (int n = kTileVectors / 2; n > 0; n /= 2) {
      HCACHE_UNROLL
      for (int i = 0; i < n; ++i) w[i] = Simd::add(w[i], w[i + n]);
    }
    sum[r] = w[0];
  }
  Simd::template reduce<Simd::add>(sum, tile_sum);
}

// Takes n rows' scores of a tile into the online softmax: turns them into weights, updates the
// rows' maxima and sums, and leaves in t.rescale what the accumulators must be multiplied by. Each
// step runs over all rows before the next, for a row's own chain of operations is mostly latency.
// Single numbers per row are updated a vector of rows at a time, which touches entries behind the
// last.
inline void softmax_rows(const AttentionTiles& t, int begin, int n) {
  const int end = begin + n;
  float* scores = t.scores + static_cast<size_t>(begin) * kTile;
  float* at = scores;
  int r = begin;
  for (; r + 4 <= end; r += 4, at += 4 * kTile) tile_maxima<4>(at, t.tile_max + r);
  for (; r < end; ++r, at += kTile) tile_maxima<1>(at, t.tile_max + r);

  for (r = begin; r < end; r += kWidth) {
    const F old_max = Simd::load(t.row_max + r);
    const F max = Simd::max(old_max, Simd::load(t.tile_max + r));
    const F rescale = exp2_nonpositive(Simd::sub(old_max, max));
    Simd::store(t.row_max + r, max);
    Simd::store(t.rescale + r, rescale);
    Simd::store(t.row_sum + r, Simd::mul(Simd::load(t.row_sum + r), rescale));
  }

  at = scores;
  for (r = begin; r + 4 <= end; r += 4, at += 4 * kTile) {
    tile_weights<4>(at, t.row_max + r, t.tile_sum + r);
  }
  for (; r < end; ++r, at += kTile) tile_weights<1>(at, t.row_max + r, t.tile_sum + r);
  for (r = begin; r < end; r += kWidth) {
    Simd::store(t.row_sum + r, Simd::add(Simd::load(t.row_sum + r), Simd::load(t.tile_sum + r)));
  }
}

// Scores of keys from n_valid on become -infinity.
inline void mask_row(float* scores, int n_valid) {
  for (int i = n_valid / kWidth; i < kTileVectors; ++i) {
    const F x = Simd::load(scores + i * kWidth);
    Simd::store(scores + i * kWidth, Simd::keep_first(x, n_valid - i * kWidth));
  }
}

// tanh(x) for x >= 0.
inline F tanh_nonnegative(F x) {
  const F one = Simd::set1(1.0F);
  const F y = exp2_nonpositive(Simd::mul(x, Simd::set1(-2.88539008F)));  // e^-2x
  return Simd::div(Simd::sub(one, y), Simd::add(one, y));
}

// A row's scores of a tile, capped.
inline void cap_row(float* scores, float cap) {
  const F inverse = Simd::set1(1.0F / cap);
  for (int i = 0; i < kTile; i += kWidth) {
    const F x = Simd::mul(Simd::load(scores + i), inverse);
    const F above = tanh_nonnegative(Simd::max(x, Simd::zero()));
    const F below = tanh_nonnegative(Simd::max(Simd::sub(Simd::zero(), x), Simd::zero()));
    Simd::store(scores + i, Simd::mul(Simd::sub(above, below), Simd::set1(cap)));
  }
}

// Scores of keys before `first` become -infinity.
inline void mask_front(float* scores, int first) {
  for (int i = 0; i < first; ++i) scores[i] = -__builtin_inff();
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

// Asks for n cells' values of one head. Their strided pieces are short, and the hardware's own
// prefetchers do not follow them well.
inline void prefetch_cells(const uint8_t* cells, size_t stride, int64_t n, int dim) {
  for (int64_t i = 0; i < n; ++i, cells += stride) {
    for (int d = 0; d < dim; d += 32) __builtin_prefetch(cells + static_cast<size_t>(d) * 2);
  }
}

// Rows that begin and end at different keys of a tile: each one's first keys alone, those that all
// attend together, then each one's last ones. Whatever is first multiplies the accumulator.
template <typename First, typename Valid, typename Add>
void add_window(int r, int rows, const First& first, const Valid& valid, const float* rescale,
                const Add& add) {
  const int begin = first(r + rows - 1);
  const int end = valid(r);
  if (begin >= end) {
    for (int i = r; i < r + rows; ++i) add(i, 1, first(i), valid(i), rescale + i);
    return;
  }
  float factors[Simd::kRows];
  for (int i = 0; i < rows; ++i) {
    const bool earlier = first(r + i) < begin;
    factors[i] = earlier ? kKeep[0] : rescale[r + i];
    if (earlier) add(r + i, 1, first(r + i), begin, rescale + r + i);
  }
  add(r, rows, begin, end, factors);
  for (int i = 1; i < rows; ++i) {
    if (valid(r + i) > end) add(r + i, 1, end, valid(r + i), kKeep);
  }
}

// kWindow: rows have a first key of their own, so that some end before others begin.
template <bool kWindow>
void attend_rows(const AttentionBlock& block, int64_t first_key, int64_t end_key,
                 const AttentionState& state, const AttentionTiles& tiles) {
  const int n_rows = block.n_rows;
  const auto acc_stride = static_cast<size_t>(block.dim_v_padded);
  for (int r = 0; r < n_rows; ++r) {
    tiles.row_max[r] = kLowest;
    tiles.row_sum[r] = 0.0F;
  }
  for (size_t i = 0; i < n_rows * acc_stride; i += kWidth) {
    Simd::store(state.acc + i, Simd::zero());
  }

  // Widening a tile once pays when enough rows use it.
  const bool wide = !Simd::kHalfOperand || n_rows > 2 * Simd::kRows;
  const bool wide_v = wide || block.dim_v % kWidth != 0;
  const int v_vectors = (block.dim_v + kWidth - 1) / kWidth;

  int row_begin = 0;                   // rows before it attend none of the keys from here on
  int row_end = kWindow ? 0 : n_rows;  // from here on rows attend none of the keys so far
  for (int64_t tile = first_key; tile < end_key; tile += kTile) {
    const int n_keys = end_key - tile < kTile ? static_cast<int>(end_key - tile) : kTile;
    while (block.limits[row_begin] <= tile) ++row_begin;
    if constexpr (kWindow) {
      while (row_end < n_rows && block.starts[row_end] < tile + n_keys) ++row_end;
      if (row_begin >= row_end) continue;
    }
    const auto valid = [&](int r) {
      return block.limits[r] - tile < n_keys ? static_cast<int>(block.limits[r] - tile) : n_keys;
    };
    const auto first = [&](int r) {
      if constexpr (!kWindow) return 0;
      return block.starts[r] > tile ? static_cast<int>(block.starts[r] - tile) : 0;
    };
    const auto scores = [&](int r) { return tiles.scores + static_cast<size_t>(r) * kTile; };

    const uint8_t* k = block.k + tile * block.k_stride;
    const uint8_t* v = block.v + tile * block.v_stride;
    const auto score = [&](const auto* keys) {
      for_row_pieces(row_begin, row_end, [&](int r, int rows) {
        const int key_vectors = (valid(r + rows - 1) + kWidth - 1) / kWidth;
        gemm_columns(rows, key_vectors, block.dim_k, block.q + static_cast<size_t>(r) * block.dim_k,
                     block.dim_k, keys, kTile, scores(r), kTile, nullptr);
      });
    };
    // Memory is asked a stage ahead: here for what comes after the scores, below for the next tile.
    prefetch_cells(v, block.v_stride, n_keys, block.dim_v);
    if (wide) {
      Simd::pack_keys(k, block.k_stride, n_keys, block.dim_k, tiles.k_wide);
      score(tiles.k_wide);
    } else {
      Simd::pack_keys(k, block.k_stride, n_keys, block.dim_k, tiles.k_half);
      score(tiles.k_half);
    }
    const int64_t ahead = end_key - tile - kTile;
    prefetch_cells(k + kTile * block.k_stride, block.k_stride, ahead < kTile ? ahead : kTile,
                   block.dim_k);

    if (block.soft_cap > 0) {
      for (int r = row_begin; r < row_end; ++r) cap_row(scores(r), block.soft_cap);
    }
    for (int r = row_begin; r < row_end && valid(r) < kTile; ++r) mask_row(scores(r), valid(r));
    if constexpr (kWindow) {
      for (int r = row_end - 1; r >= row_begin && first(r) > 0; --r)
        mask_front(scores(r), first(r));
      // The rows behind the last, which are touched along, are still to come.
      for (int r = row_end; r < row_end + kWidth; ++r) {
        tiles.tile_max[r] = kLowest;
        tiles.tile_sum[r] = 0.0F;
      }
    }
    softmax_rows(tiles, row_begin, row_end - row_begin);

    const auto accumulate = [&](const auto* values, size_t stride) {
      const auto add = [&](int row, int rows, int begin, int end, const float* rescale) {
        gemm_columns(rows, v_vectors, end - begin, scores(row) + begin, kTile,
                     values + begin * stride, stride, state.acc + row * acc_stride, acc_stride,
                     rescale);
      };
      for_row_pieces(row_begin, row_end, [&](int r, int rows) {
        if constexpr (kWindow) {
          add_window(r, rows, first, valid, tiles.rescale, add);
          return;
        }
        // The rows together up to the first one's last key, then each alone: what a row does not
        // attend never meets its accumulator.
        const int common = valid(r);
        add(r, rows, 0, common, tiles.rescale + r);
        for (int i = 1; i < rows; ++i) {
          if (valid(r + i) > common) add(r + i, 1, common, valid(r + i), kKeep);
        }
      });
    };
    if (wide_v) {
      widen_values(block, v, n_keys, tiles.v_wide);
      accumulate(tiles.v_wide, acc_stride);
    } else {
      accumulate(reinterpret_cast<const uint16_t*>(v), block.v_stride / sizeof(uint16_t));
    }
  }
  for (int r = 0; r < n_rows; ++r) {
    state.max[r] = tiles.row_max[r];
    state.sum[r] = tiles.row_sum[r];
  }
}

void attend(const AttentionBlock& block, int64_t first_key, int64_t end_key,
            const AttentionState& state, const AttentionTiles& tiles) {
  if (block.starts == nullptr) {
    attend_rows<false>(block, first_key, end_key, state, tiles);
  } else {
    attend_rows<true>(block, first_key, end_key, state, tiles);
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

// One row's scores of whole tiles to weights that sum to one; what they amount to goes to `sums`.
void observe_row(float* scores, int64_t limit, AttentionSums* sums) {
  constexpr float kSmall = 0.01F;  // of the row's largest weight
  const int64_t end = (limit + kTile - 1) / kTile * kTile;
  F tops[1] = {Simd::set1(kLowest)};
  for (int64_t i = 0; i < end; i += kWidth) tops[0] = Simd::max(Simd::load(scores + i), tops[0]);
  float top = 0;
  Simd::template reduce<Simd::max>(tops, &top);

  const F shift = Simd::set1(top);
  F totals[1] = {Simd::zero()};
  F squares[1] = {Simd::zero()};
  for (int64_t i = 0; i < end; i += kWidth) {
    const F w = exp2_nonpositive(Simd::sub(Simd::load(scores + i), shift));
    Simd::store(scores + i, w);
    totals[0] = Simd::add(totals[0], w);
    squares[0] = Simd::fma(w, w, squares[0]);
  }
  float total = 0;
  float square = 0;
  Simd::template reduce<Simd::add>(totals, &total);
  Simd::template reduce<Simd::add>(squares, &square);
  int64_t n_small = 0;
  for (int64_t i = 0; i < limit; ++i) n_small += scores[i] < kSmall ? 1 : 0;
  sums->small += static_cast<double>(n_small);
  sums->seen += static_cast<double>(limit);
  sums->spread += static_cast<double>(total) * total / square / static_cast<double>(limit);

  const F share = Simd::set1(1.0F / total);
  const int64_t told = sums->n_keys < limit ? sums->n_keys : limit;
  for (int64_t i = 0; i < told; i += kWidth) {
    const F w = Simd::mul(Simd::load(scores + i), share);
    Simd::store(scores + i, w);
    Simd::store(sums->sum + i, Simd::add(Simd::load(sums->sum + i), w));
    Simd::store(sums->top + i, Simd::max(Simd::load(sums->top + i), w));
  }
}

void observe(const AttentionBlock& block, float* weights, size_t stride, AttentionSums* sums,
             const AttentionTiles& tiles) {
  const int n_rows = block.n_rows;
  const int64_t end_key = block.limits[n_rows - 1];
  int row_begin = 0;
  for (int64_t tile = 0; tile < end_key; tile += kTile) {
    const int n_keys = end_key - tile < kTile ? static_cast<int>(end_key - tile) : kTile;
    while (block.limits[row_begin] <= tile) ++row_begin;
    Simd::pack_keys(block.k + tile * block.k_stride, block.k_stride, n_keys, block.dim_k,
                    tiles.k_wide);
    for_row_pieces(row_begin, n_rows, [&](int r, int rows) {
      gemm_columns(rows, kTileVectors, block.dim_k, block.q + static_cast<size_t>(r) * block.dim_k,
                   block.dim_k, tiles.k_wide, kTile, weights + r * stride + tile, stride, nullptr);
    });
    for (int r = row_begin; r < n_rows && block.limits[r] < tile + kTile; ++r) {
      mask_row(weights + r * stride + tile, static_cast<int>(block.limits[r] - tile));
    }
  }
  for (int r = 0; r < n_rows; ++r) observe_row(weights + r * stride, block.limits[r], sums);
}

}  // namespace
}  // namespace hcache::engine
