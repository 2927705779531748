// The body of every vector version of the product, over a trait of the instruction set. Included
// once by each of their files, hence the anonymous namespace.
//
// A panel is 16 outputs; of 256 values at a time its weights are unpacked, transposed such that a
// vector holds the same four values of all 16, and multiplied with every row: a few rows while
// these are in registers, more from where they were stored. Weights are read once, in the file's
// own layout.
#pragma once

#include <string.h>

#include "product_kernel.h"
#include "product_unpack.h"

namespace hcache::model {
namespace {

constexpr int kPanels = 4;  // panels that are unpacked together where there are many rows
// The size of equal parts of n of which none is larger than `most`; the last may be smaller.
inline int64_t even_part(int64_t n, int64_t most) {
  const int64_t parts = (n + most - 1) / most;
  return (n + parts - 1) / parts;
}

// What a trait leaves out: weights are stored as they are unpacked, and all rows go through
// vectors.
struct NoTiles {
  // Up to so many rows a panel, or two, is multiplied with all of them before the next is unpacked:
  // its weights stay in the first-level cache, and the weights' memory is read in fewer streams.
  static constexpr int64_t kFewRows = 48;
  // Up to so many it is one.
  static constexpr int64_t kSinglePanelRows = kFewRows;
  // Up to so many rows are multiplied with what is unpacked while it is in registers, see
  // multiply_unstored(); at least one.
  static constexpr int unstored_rows(BlockKind kind) { return layout_of(kind).halves ? 2 : 4; }
  // Whether chunks of small blocks are unpacked dword by dword, see unpack_dwords().
  static constexpr bool kByDwords = false;
  // Two panels at once are multiplied with up to so many rows, whose values are read once for both:
  // as many sums as by twice the rows of one panel, of half as many rows. 0: one panel is.
  static constexpr int kPairRows = 0;
  // Whether it multiplies small weights in another way than large ones, see Layout::largest.
  static constexpr bool kNarrow = false;

  template <BlockKind kKind, typename I>
  static I stored(I x) {
    return x;
  }
  // Adds a block's fifth bits of its four values k to their lower ones.
  template <typename V, typename I>
  static I with_fifth_bits(I quants, I bits, int k) {
    return V::or_(quants, fifth_bits<V>(bits, k));
  }
  // sums[kAcross][kRows] += the products of so many panels' weights with as many rows: of kDwords
  // times four consecutive values of group g.
  template <typename V, BlockKind kKind, int kRows, int kAcross, int kDwords>
  static void add_products(const WeightChunk* w, int g, int first_dword, const RowChunk* rows,
                           typename V::I (*sums)[kRows]) {
    for (int k = first_dword; k < first_dword + kDwords; ++k) {
      decltype(V::template weights<kKind>(w->quants[g][k])) quants[kAcross];
      for (int p = 0; p < kAcross; ++p) quants[p] = V::template weights<kKind>(w[p].quants[g][k]);
      for (int r = 0; r < kRows; ++r) {
        const int8_t* x = rows[r].quants + g * kGroup + 4 * k;
        for (int p = 0; p < kAcross; ++p) {
          sums[p][r] = V::template dot<kKind>(sums[p][r], quants[p], x);
        }
      }
    }
  }

  // The same of one panel's, which are in registers.
  template <typename V, BlockKind kKind, int kRows, int kDwords>
  static void add_unstored(const typename V::I* quants, int g, int first_dword,
                           const RowChunk* rows, typename V::I (&sums)[kRows]) {
    for (int k = 0; k < kDwords; ++k) {
      for (int r = 0; r < kRows; ++r) {
        const int8_t* x = rows[r].quants + g * kGroup + 4 * (first_dword + k);
        sums[r] = V::template dot<kKind>(sums[r], quants[k], x);
      }
    }
  }

  // How many of n rows of so many values are taken at once. Wide ones leave the caches that are
  // close between two groups of panels, but weights are unpacked and read less often than if they
  // did not.
  static constexpr int64_t kMaxRows = 256;
  static int64_t rows_at_once(int64_t n_rows, int64_t /*n_in*/) {
    return even_part(n_rows, kMaxRows);
  }

  // How many of n rows go through tiles at once; 0: none.
  static int64_t rows_of_tiles(int64_t /*n_rows*/) { return 0; }
  template <BlockKind kKind>
  static void begin_tiles(int64_t /*n_rows*/) {}
  static void end_tiles() {}
  template <BlockKind kKind, typename W, typename Rows>
  static void multiply_tiles(int64_t /*n_rows*/, const W& /*w*/, int /*n_groups*/,
                             const Rows* /*rows*/, float* /*acc*/) {}
};

// ---- Rows

// Group g's quants, and what follows from them.
inline void set_group(RowChunk* out, int g, const uint8_t* quants, float scale, float sum,
                      int32_t first_half, int32_t second_half) {
  memcpy(out->quants + g * kGroup, quants, kGroup);
  out->scale[g] = scale;
  out->sum[g] = sum;
  out->offset[g] = -128 * (first_half + second_half);
  out->half_offset[g][0] = -128 * first_half;
  out->half_offset[g][1] = -128 * second_half;
}

inline int32_t sum_of_half(const uint8_t* quants) {
  int32_t sum = 0;
  for (int i = 0; i < kGroup / 2; ++i) sum += static_cast<int8_t>(quants[i]);
  return sum;
}

template <typename V>
void prepare(RowKind kind, const uint8_t* values, int64_t n, RowChunk* out) {
  const int n_groups = static_cast<int>(n / kGroup);
  if (kind == RowKind::kQ8K) {
    const uint8_t* quants = values + sizeof(float);
    float d;
    memcpy(&d, values, sizeof d);
    int16_t sums[kChunk / 16];
    memcpy(sums, quants + kChunk, sizeof sums);
    for (int g = 0; g < n_groups; ++g) {
      const int32_t first = sums[2 * g];
      const int32_t second = sums[2 * g + 1];
      set_group(out, g, quants + g * kGroup, d, static_cast<float>(first + second), first, second);
    }
    return;
  }
  const int head = kind == RowKind::kQ8_1 ? 4 : 2;
  for (int g = 0; g < n_groups; ++g, values += head + kGroup) {
    const int32_t first = sum_of_half(values + head);
    const int32_t second = sum_of_half(values + head + kGroup / 2);
    set_group(out, g, values + head, V::half(values), head == 4 ? V::half(values + 2) : 0.0F, first,
              second);
  }
}

// ---- Multiplying

// The pieces of a product that vectors and tiles share; see product_kernel.h.
template <typename V, BlockKind kKind, int kRows>
void begin_rows(const float* acc_rows, typename V::F* acc) {
  constexpr bool kWide = layout_of(kKind).block_values == kChunk;
  for (int r = 0; r < kRows; ++r) acc[r] = kWide ? V::no_sum() : V::load(acc_rows + r * kPanel);
}

template <typename V, BlockKind kKind>
typename V::F scale_of(typename V::F weight_scale, const RowChunk& row, int g) {
  constexpr bool kWide = layout_of(kKind).block_values == kChunk;
  return kWide ? weight_scale : V::mul(weight_scale, V::broadcast(&row.scale[g]));
}

// `min`: of group g, where its kind has minima.
template <typename V, BlockKind kKind, int kRows>
HCACHE_INLINE void add_minima(typename V::F min, int g, const RowChunk* rows, typename V::F* acc) {
  if constexpr (layout_of(kKind).minima) {
    for (int r = 0; r < kRows; ++r) {
      acc[r] = V::fma(min, V::broadcast(&rows[r].sum[g]), acc[r]);
    }
  }
}

template <typename V, BlockKind kKind, int kRows>
void end_rows(const RowChunk* rows, const typename V::F* acc, float* acc_rows) {
  constexpr bool kWide = layout_of(kKind).block_values == kChunk;
  for (int r = 0; r < kRows; ++r) {
    float* to = acc_rows + r * kPanel;
    const typename V::F scale = V::broadcast(&rows[r].scale[0]);
    V::store(to, kWide ? V::fma(scale, acc[r], V::load(to)) : acc[r]);
  }
}

// acc[kAcross][kRows][kPanel] += the products of so many panels' chunks with as many rows; a
// panel's are `acc_stride` floats behind those of the one before. Inlined: GCC makes a slower one
// of it by itself, by a fifth with AVX2.
template <typename V, BlockKind kKind, int kRows, int kAcross>
HCACHE_INLINE void multiply_tile(const WeightChunk* w, int n_groups, const RowChunk* rows,
                                 float* acc_rows, int64_t acc_stride) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr Layout kLayout = layout_of(kKind);
  constexpr int kHalves = kLayout.halves ? 2 : 1;
  constexpr int kDwords = step_dwords(kLayout);
  F acc[kAcross][kRows];
  for (int p = 0; p < kAcross; ++p) begin_rows<V, kKind, kRows>(acc_rows + p * acc_stride, acc[p]);
  for (int g = 0; g < n_groups; ++g) {
    for (int half = 0; half < kHalves; ++half) {
      I sums[kAcross][kRows];
      for (int r = 0; r < kRows; ++r) {
        const RowChunk& row = rows[r];
        for (int p = 0; p < kAcross; ++p) {
          sums[p][r] =
              V::template start<kKind>(kLayout.halves ? row.half_offset[g][half] : row.offset[g]);
        }
      }
      V::template add_products<V, kKind, kRows, kAcross, kDwords>(w, g, half * kDwords, rows, sums);
      for (int p = 0; p < kAcross; ++p) {
        const F scale = V::load(w[p].scale[g][half]);
        for (int r = 0; r < kRows; ++r) {
          const F sum = V::to_float(sums[p][r]);
          acc[p][r] = V::fma(scale_of<V, kKind>(scale, rows[r], g), sum, acc[p][r]);
        }
      }
    }
    for (int p = 0; p < kAcross; ++p)
      add_minima<V, kKind, kRows>(V::load(w[p].min[g]), g, rows, acc[p]);
  }
  for (int p = 0; p < kAcross; ++p) {
    end_rows<V, kKind, kRows>(rows, acc[p], acc_rows + p * acc_stride);
  }
}

// The tiles of up to kRows rows.
template <typename V, BlockKind kKind, int kRows, int kAcross>
void multiply_rest(int64_t n, const WeightChunk* w, int n_groups, const RowChunk* rows, float* acc,
                   int64_t acc_stride) {
  if constexpr (kRows > 0) {
    if (n == kRows) {
      return multiply_tile<V, kKind, kRows, kAcross>(w, n_groups, rows, acc, acc_stride);
    }
    multiply_rest<V, kKind, kRows - 1, kAcross>(n, w, n_groups, rows, acc, acc_stride);
  }
}

// n_panels panels times n rows that don't go through tiles, in parts as even as can be: a small one
// would leave the multipliers waiting.
template <typename V, BlockKind kKind, int kRows, int kAcross>
void multiply_rows(int64_t n, int n_panels, const WeightChunk* w, int n_groups,
                   const RowChunk* rows, float* acc, int64_t acc_stride) {
  const int64_t even = even_part(n, kRows);
  for (int64_t r = 0; r < n; r += even) {
    const int64_t part = n - r < even ? n - r : even;
    for (int p = 0; p < n_panels; p += kAcross) {
      multiply_rest<V, kKind, kRows, kAcross>(part, w + p, n_groups, rows + r,
                                              acc + p * acc_stride + r * kPanel, acc_stride);
    }
  }
}

// What is asked for of the weights while a chunk of a panel is computed: what its outputs are read
// at next but one, and, where the task says so, a part of the panel that is computed after this
// one and those beside it, into the second-level cache, in the order of memory. A row at a time,
// between other things: a core can wait for so many lines only, and computes nothing while it can't
// even ask for the next one.
template <BlockKind kKind>
class Ahead {
 public:
  // `output`: the panel's first; so many panels are computed together.
  Ahead(const ProductTask& task, const PanelRows& rows, int64_t output, int n_panels, int64_t chunk)
      : rows_(rows) {
    constexpr int64_t kChunks = 2;
    const auto row_bytes = static_cast<int64_t>(task.weight_stride);
    at_ = (chunk + kChunks) * kBytes;
    if (at_ >= row_bytes) at_ += (kPanel - 1) * row_bytes;  // the panel behind this one
    const int64_t next = output + n_panels * kPanel;
    if (task.reads_ahead && next < task.end_out) {
      next_ = task.weight + next * row_bytes + chunk * kBytes * kPanel;
    }
  }
  HCACHE_INLINE void ask_for(int row) const {
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(rows_.at[row] + at_ + i);
    if (next_ == nullptr) return;
    for (int i = 0; i < kBytes; i += 64) {
      __builtin_prefetch(next_ + row * kBytes + i, 0, kSecondLevel);
    }
  }

 private:
  static constexpr int kBytes = chunk_bytes(layout_of(kKind));
  static constexpr int kSecondLevel = 2;
  const PanelRows& rows_;
  int64_t at_;
  const uint8_t* next_ = nullptr;
};
static_assert(kPanel == 2 * kChunkGroups, "each group asks for two rows");

template <typename V, BlockKind kKind>
void unpack(const PanelRows& weights, int64_t chunk, int n_groups, const Ahead<kKind>& ahead,
            WeightChunk& out) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr Layout kLayout = layout_of(kKind);
  constexpr int kDwords = step_dwords(kLayout);
  for_each_step<V, kKind, V::kNarrow>(
      weights, chunk, n_groups,
      [&](int g, int half, F scale, F min, const I* quants) HCACHE_ALWAYS_INLINE {
        if (half == 0) {
          ahead.ask_for(2 * g);
          ahead.ask_for(2 * g + 1);
        }
        V::store(out.scale[g][half], scale);
        if constexpr (kLayout.minima) V::store(out.min[g], min);
        for (int k = 0; k < kDwords; ++k) {
          V::store(out.quants[g][half * kDwords + k], V::template stored<kKind>(quants[k]));
        }
      });
}

// The start of a sum of quants that have Layout::zero added, by the offset for 128.
template <typename V, BlockKind kKind>
HCACHE_INLINE typename V::I start_small(const int32_t& offset) {
  constexpr int kShift = offset_shift(layout_of(kKind));
  if constexpr (V::kNarrow) return V::template start<kKind>(offset);
  if constexpr (!layout_of(kKind).offset) return V::zero();
  if constexpr (kShift == 0) return V::dwords(offset);
  return V::template sra<kShift>(V::dwords(offset));
}

// A panel's chunk times a few rows: weights are multiplied as they are unpacked and never stored.
// More rows have more sums than there are registers. A function of its own, lest what surrounds it
// is compiled otherwise for its size.
template <typename V, BlockKind kKind, int kRows>
__attribute__((noinline)) void multiply_unstored(int64_t n, const PanelRows& weights, int64_t chunk,
                                                 int n_groups, const Ahead<kKind>& ahead,
                                                 const RowChunk* rows, float* acc_rows) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr Layout kLayout = layout_of(kKind);
  constexpr int kDwords = step_dwords(kLayout);
  if constexpr (kRows > 1) {
    if (n < kRows) {
      return multiply_unstored<V, kKind, kRows - 1>(n, weights, chunk, n_groups, ahead, rows,
                                                    acc_rows);
    }
  }
  F acc[kRows];
  begin_rows<V, kKind, kRows>(acc_rows, acc);
  for_each_step<V, kKind, true>(
      weights, chunk, n_groups,
      [&](int g, int half, F scale, F min, const I* quants) HCACHE_ALWAYS_INLINE {
        if (half == 0) ahead.ask_for(2 * g);
        I sums[kRows];
        for (int r = 0; r < kRows; ++r) {
          sums[r] = start_small<V, kKind>(kLayout.halves ? rows[r].half_offset[g][half]
                                                         : rows[r].offset[g]);
        }
        V::template add_unstored<V, kKind, kRows, kDwords>(quants, g, half * kDwords, rows, sums);
        if (half == 0) ahead.ask_for(2 * g + 1);
        for (int r = 0; r < kRows; ++r) {
          acc[r] = V::fma(scale_of<V, kKind>(scale, rows[r], g), V::to_float(sums[r]), acc[r]);
        }
        add_minima<V, kKind, kRows>(min, g, rows, acc);
      });
  end_rows<V, kKind, kRows>(rows, acc, acc_rows);
}

struct Scratch {
  WeightChunk* chunks;  // [kPanels]
  float* acc;           // [kPanels][rows][kPanel]
};

// The outputs of up to kPanels panels for a block of rows.
template <typename V, BlockKind kKind>
void multiply_panels(const ProductTask& task, int64_t tile_rows, int64_t first_row, int64_t n_rows,
                     int64_t first_out, int n_panels, const Scratch& scratch) {
  constexpr Layout kLayout = layout_of(kKind);
  constexpr BlockKind kMultiplied = multiplied_as<V>(kKind);
  constexpr Layout kAs = layout_of(kMultiplied);
  static_assert(kLayout.block_values == kAs.block_values && kLayout.offset == kAs.offset &&
                kLayout.minima == kAs.minima && kLayout.halves == kAs.halves);
  const int64_t n_chunks = (task.n_in + kChunk - 1) / kChunk;
  PanelRows at[kPanels];
  for (int p = 0; p < n_panels; ++p) {
    for (int i = 0; i < kPanel; ++i) {
      const int64_t output = first_out + p * kPanel + i;
      at[p].at[i] =
          task.weight + (output < task.end_out ? output : task.end_out - 1) * task.weight_stride;
    }
  }
  memset(scratch.acc, 0, static_cast<size_t>(n_panels * n_rows) * kPanel * sizeof(float));
  for (int64_t c = 0; c < n_chunks; ++c) {
    const RowChunk* rows = task.rows + c * task.n_rows + first_row;
    const int64_t left = task.n_in / kGroup - c * kChunkGroups;
    const int n_groups = static_cast<int>(left < kChunkGroups ? left : kChunkGroups);
    constexpr int kUnstored = V::unstored_rows(kKind);
    static_assert(kUnstored <= V::kSinglePanelRows, "they are multiplied with one panel at a time");
    if (n_rows <= kUnstored) {
      multiply_unstored<V, kKind, kUnstored>(n_rows, at[0], c, n_groups,
                                             Ahead<kKind>(task, at[0], first_out, n_panels, c),
                                             rows, scratch.acc);
      continue;
    }
    for (int p = 0; p < n_panels; ++p) {
      const Ahead<kKind> ahead(task, at[p], first_out + p * kPanel, n_panels, c);
      unpack<V, kKind>(at[p], c, n_groups, ahead, scratch.chunks[p]);
    }
    int64_t r = 0;
    for (; tile_rows > 0 && r + tile_rows <= n_rows; r += tile_rows) {
      for (int p = 0; p < n_panels; ++p) {
        V::template multiply_tiles<kMultiplied>(tile_rows, scratch.chunks[p], n_groups, rows + r,
                                                scratch.acc + (p * n_rows + r) * kPanel);
      }
    }
    if (r == n_rows) continue;
    const int64_t panel_acc = n_rows * kPanel;
    const int paired = V::kPairRows > 0 ? n_panels / 2 * 2 : 0;
    if constexpr (V::kPairRows > 0) {
      multiply_rows<V, kMultiplied, V::kPairRows, 2>(n_rows - r, paired, scratch.chunks, n_groups,
                                                     rows + r, scratch.acc + r * kPanel, panel_acc);
    }
    multiply_rows<V, kMultiplied, V::kRows, 1>(
        n_rows - r, n_panels - paired, scratch.chunks + paired, n_groups, rows + r,
        scratch.acc + paired * panel_acc + r * kPanel, panel_acc);
  }
  for (int64_t r = 0; r < n_rows; ++r) {
    const int64_t row = task.out_rows == nullptr ? first_row + r : task.out_rows[first_row + r];
    for (int p = 0; p < n_panels; ++p) {
      const int64_t first = first_out + p * kPanel;
      const int64_t n = task.end_out - first < kPanel ? task.end_out - first : kPanel;
      memcpy(task.out + row * task.out_stride + first, scratch.acc + (p * n_rows + r) * kPanel,
             static_cast<size_t>(n) * sizeof(float));
    }
  }
}

template <typename V, BlockKind kKind>
void multiply_kind(const ProductTask& task, void* memory) {
  const Scratch scratch = {
      .chunks = static_cast<WeightChunk*>(memory),
      .acc = reinterpret_cast<float*>(static_cast<WeightChunk*>(memory) + kPanels)};
  const int64_t tile_rows = V::rows_of_tiles(task.n_rows);
  if (tile_rows > 0) V::template begin_tiles<multiplied_as<V>(kKind)>(tile_rows);
  const int64_t at_once = V::rows_at_once(task.n_rows, task.n_in);
  for (int64_t row = 0; row < task.n_rows; row += at_once) {
    const int64_t n_rows = task.n_rows - row < at_once ? task.n_rows - row : at_once;
    const int most = n_rows > V::kFewRows ? kPanels : n_rows > V::kSinglePanelRows ? 2 : 1;
    for (int64_t out = task.first_out; out < task.end_out; out += most * kPanel) {
      const int64_t left = (task.end_out - out + kPanel - 1) / kPanel;
      multiply_panels<V, kKind>(task, tile_rows, row, n_rows, out,
                                static_cast<int>(left < most ? left : most), scratch);
    }
  }
  if (tile_rows > 0) V::end_tiles();
}

template <typename V>
void multiply(const ProductTask& task, void* scratch) {
  switch (task.kind) {
    case BlockKind::kQ8_0: return multiply_kind<V, BlockKind::kQ8_0>(task, scratch);
    case BlockKind::kQ4_0: return multiply_kind<V, BlockKind::kQ4_0>(task, scratch);
    case BlockKind::kQ4_1: return multiply_kind<V, BlockKind::kQ4_1>(task, scratch);
    case BlockKind::kQ5_0: return multiply_kind<V, BlockKind::kQ5_0>(task, scratch);
    case BlockKind::kQ5_1: return multiply_kind<V, BlockKind::kQ5_1>(task, scratch);
    case BlockKind::kQ4K: return multiply_kind<V, BlockKind::kQ4K>(task, scratch);
    case BlockKind::kQ5K: return multiply_kind<V, BlockKind::kQ5K>(task, scratch);
    case BlockKind::kQ6K: return multiply_kind<V, BlockKind::kQ6K>(task, scratch);
    case BlockKind::kIq4Nl: return multiply_kind<V, BlockKind::kIq4Nl>(task, scratch);
    case BlockKind::kIq4Xs: return multiply_kind<V, BlockKind::kIq4Xs>(task, scratch);
    case BlockKind::kMxfp4: return multiply_kind<V, BlockKind::kMxfp4>(task, scratch);
  }
}

template <typename V>
size_t scratch_bytes(int64_t n_rows) {
  const int64_t rows = n_rows < V::kMaxRows ? n_rows : V::kMaxRows;
  return kPanels * (sizeof(WeightChunk) + static_cast<size_t>(rows) * kPanel * sizeof(float));
}

}  // namespace
}  // namespace hcache::model
