// The body of every vector version of the product, over a trait of the instruction set. Included
// once by each of their files, hence the anonymous namespace.
//
// A panel is 16 outputs; of 256 values at a time its weights are unpacked, transposed such that a
// vector holds the same four values of all 16, and multiplied with every row. Unpacking costs as
// much as multiplying three or four rows and reads the weights once, in the file's own layout.
#pragma once

#include <string.h>

#include "product_kernel.h"

namespace hcache::model {
namespace {

constexpr int kPanels = 4;  // panels that are unpacked together where there are many rows
// Rows are taken by so many bytes, which a core's second-level cache holds for all panels, in
// multiples of every tile's.
constexpr int64_t kRowBytes = int64_t{1} << 20;
constexpr int64_t kRowUnit = 48;
constexpr int64_t kMaxRows = 480;

inline int64_t rows_at_once(int64_t n_in) {
  const int64_t row_bytes = (n_in + kChunk - 1) / kChunk * static_cast<int64_t>(sizeof(RowChunk));
  const int64_t units = kRowBytes / row_bytes / kRowUnit;
  return units < 1 ? kRowUnit : units * kRowUnit < kMaxRows ? units * kRowUnit : kMaxRows;
}

// What a trait leaves out: weights are stored as they are unpacked, and all rows go through
// vectors.
struct NoTiles {
  // Up to so many rows a panel is multiplied with all of them before the next is unpacked: its
  // weights stay in the first-level cache, and the weights' memory is read in fewer streams.
  static constexpr int64_t kFewRows = 48;
  // Up to so many rows are multiplied with what is unpacked while it is in registers, see
  // multiply_45k().
  static constexpr int kUnstoredRows = 0;
  // Whether it multiplies small weights in another way than large ones, see Layout::largest.
  static constexpr bool kNarrow = false;

  template <BlockKind kKind, typename I>
  static I stored(I x) {
    return x;
  }
  // sums[kRows] += the products of weights with as many rows: of consecutive values from `first`
  // on.
  template <typename V, BlockKind kKind, int kRows, int kDwords>
  static void add_products(const uint8_t (*weights)[kPanel][4], const RowChunk* rows,
                           int64_t stride, int first, typename V::I* sums) {
    for (int k = 0; k < kDwords; ++k) {
      const auto quants = V::template weights<kKind>(weights[k]);
      for (int r = 0; r < kRows; ++r) {
        sums[r] = V::template dot<kKind>(sums[r], quants, rows[r * stride].quants + first + 4 * k);
      }
    }
  }

  // How many of n rows go through tiles at once; 0: none.
  static int64_t rows_of_tiles(int64_t /*n_rows*/) { return 0; }
  template <BlockKind kKind>
  static void begin_tiles(int64_t /*n_rows*/) {}
  static void end_tiles() {}
  template <BlockKind kKind, typename W, typename Rows>
  static void multiply_tiles(int64_t /*n_rows*/, const W& /*w*/, int /*n_groups*/,
                             const Rows* /*rows*/, int64_t /*stride*/, float* /*acc*/) {}
};

// 256 values of a panel's weights.
struct alignas(64) WeightChunk {
  uint8_t quants[kChunkGroups][kGroup / 4][kPanel][4];  // as the trait stores them
  // The second: of a group's second half, where halves differ.
  float scale[kChunkGroups][2][kPanel];
  float min[kChunkGroups][kPanel];
};

struct Layout {
  int block_values;
  int block_bytes;
  bool offset;  // the quants are stored with 128 added
  bool minima;
  bool halves;  // have scales of their own
  int zero;     // what would be enough in place of 128
  int largest;  // of the quants with that added
};

constexpr Layout layout_of(BlockKind kind) {
  switch (kind) {
    case BlockKind::kQ8_0: return {32, 34, true, false, false, 128, 255};
    case BlockKind::kQ4_0: return {32, 18, true, false, false, 8, 15};
    case BlockKind::kQ4_1: return {32, 20, false, true, false, 0, 15};
    case BlockKind::kQ5_0: return {32, 22, true, false, false, 16, 31};
    case BlockKind::kQ5_1: return {32, 24, false, true, false, 0, 31};
    case BlockKind::kQ4K: return {256, 144, false, true, false, 0, 15};
    case BlockKind::kQ5K: return {256, 176, false, true, false, 0, 31};
    case BlockKind::kQ6K: return {256, 210, true, false, true, 32, 63};
    case BlockKind::kIq4Nl: return {32, 18, true, false, false, 128, 255};
    case BlockKind::kIq4Xs: return {256, 136, true, false, false, 128, 255};
    case BlockKind::kMxfp4: return {32, 17, true, false, false, 16, 31};
  }
  return {};
}

// A kind that is multiplied as this one is, once it is unpacked: one of each Layout is compiled,
// and of each largest quant where that matters.
template <typename V>
constexpr BlockKind multiplied_as(BlockKind kind) {
  switch (kind) {
    case BlockKind::kQ4_0:
    case BlockKind::kQ5_0: return V::kNarrow ? kind : BlockKind::kQ8_0;
    case BlockKind::kMxfp4: return V::kNarrow ? BlockKind::kQ5_0 : BlockKind::kQ8_0;
    case BlockKind::kIq4Nl: return BlockKind::kQ8_0;
    case BlockKind::kQ5_1: return V::kNarrow ? kind : BlockKind::kQ4_1;
    case BlockKind::kQ5K: return V::kNarrow ? kind : BlockKind::kQ4K;
    default: return kind;
  }
}

// The rows of a panel's outputs, at the block that is unpacked. Outputs behind the last repeat it.
struct PanelRows {
  const uint8_t* at[kPanel];
};

// What four-bit codes stand for, 128 added.
alignas(16) constexpr uint8_t kIq4Values[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                129, 141, 153, 166, 181, 197, 217, 241};
alignas(16) constexpr uint8_t kMxfp4Values[16] = {128, 129, 130, 131, 132, 134, 136, 140,
                                                  128, 127, 126, 125, 124, 122, 120, 116};

// ---- Unpacking. V::I is 16 dwords, one of each output; V::F 16 floats.

template <typename V>
typename V::I low_nibbles(typename V::I x) {
  return V::and_(x, V::bytes(0x0F));
}
template <typename V>
typename V::I high_nibbles(typename V::I x) {
  return V::and_(V::template srl<4>(x), V::bytes(0x0F));
}

// Byte kByte of each dword, as a number.
template <typename V, int kByte>
typename V::I byte_of(typename V::I x) {
  if constexpr (kByte == 3) return V::template srl<24>(x);
  return V::and_(V::template srl<8 * kByte>(x), V::dwords(0xFF));
}
template <typename V>
typename V::I byte_of(typename V::I x, int byte) {
  switch (byte) {
    case 0: return byte_of<V, 0>(x);
    case 1: return byte_of<V, 1>(x);
    case 2: return byte_of<V, 2>(x);
    default: return byte_of<V, 3>(x);
  }
}
template <typename V>
typename V::I signed_byte_of(typename V::I x, int byte) {
  switch (byte) {
    case 0: return V::template sra<24>(V::template sll<24>(x));
    case 1: return V::template sra<24>(V::template sll<16>(x));
    case 2: return V::template sra<24>(V::template sll<8>(x));
    default: return V::template sra<24>(x);
  }
}

// The fifth bits of a block's four values: bits 4k to 4k + 3 of `bits`, as 16 in each byte.
template <typename V, int kStart>
typename V::I fifth_bits(typename V::I bits) {
  const typename V::I four = V::and_(V::template srl<kStart>(bits), V::dwords(0xF));
  return V::and_(V::mul(four, V::dwords(0x02040810)), V::bytes(0x10));
}
template <typename V>
typename V::I fifth_bits(typename V::I bits, int k) {
  switch (k) {
    case 0: return fifth_bits<V, 0>(bits);
    case 1: return fifth_bits<V, 4>(bits);
    case 2: return fifth_bits<V, 8>(bits);
    case 3: return fifth_bits<V, 12>(bits);
    case 4: return fifth_bits<V, 16>(bits);
    case 5: return fifth_bits<V, 20>(bits);
    case 6: return fifth_bits<V, 24>(bits);
    default: return fifth_bits<V, 28>(bits);
  }
}

// A block of 32 values: into group g of the chunk.
template <typename V, BlockKind kKind>
void unpack_block(const PanelRows& rows, size_t at, WeightChunk& out, int g) {
  using I = typename V::I;
  const I head = V::gather(rows, at);  // scale, and minimum or what follows
  const auto store = [&](int k, I x) { V::store(out.quants[g][k], V::template stored<kKind>(x)); };
  if constexpr (kKind == BlockKind::kMxfp4) {
    V::store(out.scale[g][0], V::half_of_power(V::and_(head, V::dwords(0xFF))));
  } else {
    V::store(out.scale[g][0], V::low_half(head));
  }
  if constexpr (layout_of(kKind).minima) V::store(out.min[g], V::high_half(head));
  if constexpr (kKind == BlockKind::kQ8_0) {
    I x[8];
    V::transpose_8(rows, at + 2, x);
    for (int k = 0; k < 8; ++k) store(k, V::xor_(x[k], V::bytes(0x80)));
    return;
  }
  constexpr size_t kQuants = kKind == BlockKind::kQ4_1    ? 4
                             : kKind == BlockKind::kQ5_0  ? 6
                             : kKind == BlockKind::kQ5_1  ? 8
                             : kKind == BlockKind::kMxfp4 ? 1
                                                          : 2;
  I x[4];
  V::transpose_4(rows, at + kQuants, x);
  I fifth = V::zero();
  constexpr bool kFifth = kKind == BlockKind::kQ5_0 || kKind == BlockKind::kQ5_1;
  if constexpr (kFifth) fifth = V::gather(rows, at + kQuants - 4);
  for (int k = 0; k < 4; ++k) {
    I low = low_nibbles<V>(x[k]);
    I high = high_nibbles<V>(x[k]);
    if constexpr (kKind == BlockKind::kQ4_0) {
      low = V::add_bytes(low, V::bytes(128 - 8));
      high = V::add_bytes(high, V::bytes(128 - 8));
    }
    if constexpr (kKind == BlockKind::kIq4Nl || kKind == BlockKind::kMxfp4) {
      const uint8_t* values = kKind == BlockKind::kMxfp4 ? kMxfp4Values : kIq4Values;
      low = V::look_up(values, low);
      high = V::look_up(values, high);
    }
    if constexpr (kFifth) {
      low = V::or_(low, fifth_bits<V>(fifth, k));
      high = V::or_(high, fifth_bits<V>(fifth, k + 4));
    }
    if constexpr (kKind == BlockKind::kQ5_0) {
      low = V::add_bytes(low, V::bytes(128 - 16));
      high = V::add_bytes(high, V::bytes(128 - 16));
    }
    store(k, low);
    store(k + 4, high);
  }
}

// The fifth bit of group g's values, of bits that hold one group's each, as 16 in each byte.
template <typename V>
typename V::I fifth_of_group(typename V::I bits, int g) {
  const auto mask = V::bytes(0x10);
  switch (g) {
    case 0: return V::and_(V::template sll<4>(bits), mask);
    case 1: return V::and_(V::template sll<3>(bits), mask);
    case 2: return V::and_(V::template sll<2>(bits), mask);
    case 3: return V::and_(V::template sll<1>(bits), mask);
    case 4: return V::and_(bits, mask);
    case 5: return V::and_(V::template srl<1>(bits), mask);
    case 6: return V::and_(V::template srl<2>(bits), mask);
    default: return V::and_(V::template srl<3>(bits), mask);
  }
}

// Q4_K and Q5_K: 256 values with six-bit scales and minima of 32 each.
template <typename V>
struct Head45k {
  typename V::F d;
  typename V::F minus_min;
  typename V::I scales[2];  // four groups' bytes in each dword
  typename V::I minima[2];

  Head45k(const PanelRows& rows, size_t at) {
    typename V::I head[4];
    V::transpose_4(rows, at, head);
    d = V::low_half(head[0]);
    minus_min = V::negate(V::high_half(head[0]));
    const auto six = V::bytes(0x3F);
    const auto high_two = V::bytes(0x30);
    const auto upper = [&](typename V::I x) { return V::and_(V::template srl<2>(x), high_two); };
    scales[0] = V::and_(head[1], six);
    scales[1] = V::or_(low_nibbles<V>(head[3]), upper(head[1]));
    minima[0] = V::and_(head[2], six);
    minima[1] = V::or_(high_nibbles<V>(head[3]), upper(head[2]));
  }
  typename V::F scale(int g) const {
    return V::mul(d, V::to_float(byte_of<V>(scales[g / 4], g % 4)));
  }
  typename V::F min(int g) const {
    return V::mul(minus_min, V::to_float(byte_of<V>(minima[g / 4], g % 4)));
  }
};

// The quants of groups 2 · pair and 2 · pair + 1: calls each(k, low, high) of their dwords k.
template <typename V, bool kFive, typename Each>
void unpack_pair_45k(const PanelRows& rows, size_t at, int pair, const typename V::I* fifth,
                     const Each& each) {
  typename V::I x[8];
  V::transpose_8(rows, at + (kFive ? 48 : 16) + static_cast<size_t>(pair) * 32, x);
  for (int k = 0; k < 8; ++k) {
    typename V::I low = low_nibbles<V>(x[k]);
    typename V::I high = high_nibbles<V>(x[k]);
    if constexpr (kFive) {
      low = V::or_(low, fifth_of_group<V>(fifth[k], 2 * pair));
      high = V::or_(high, fifth_of_group<V>(fifth[k], 2 * pair + 1));
    }
    each(k, low, high);
  }
}

template <typename V, bool kFive>
void unpack_q45k(const PanelRows& rows, size_t at, WeightChunk& out) {
  using I = typename V::I;
  const Head45k<V> head(rows, at);
  for (int g = 0; g < kChunkGroups; ++g) {
    V::store(out.scale[g][0], head.scale(g));
    V::store(out.min[g], head.min(g));
  }
  I fifth[8];
  if constexpr (kFive) V::transpose_8(rows, at + 16, fifth);
  for (int pair = 0; pair < 4; ++pair) {
    unpack_pair_45k<V, kFive>(rows, at, pair, fifth, [&](int k, I low, I high) {
      V::store(out.quants[2 * pair][k], low);
      V::store(out.quants[2 * pair + 1][k], high);
    });
  }
}

// Q6_K: 256 values with signed scales of 16 each.
template <typename V>
void unpack_q6k(const PanelRows& rows, size_t at, WeightChunk& out) {
  using I = typename V::I;
  using F = typename V::F;
  const F d = V::high_half(V::gather(rows, at + 206));
  I scales[4];
  V::transpose_4(rows, at + 192, scales);
  for (int g = 0; g < kChunkGroups; ++g) {
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * g + half;
      V::store(out.scale[g][half], V::mul(d, V::to_float(signed_byte_of<V>(scales[i / 4], i % 4))));
    }
  }
  const I two = V::bytes(0x30);
  const I offset = V::bytes(128 - 32);
  for (int half = 0; half < 2; ++half) {
    I low[2][8];
    I high[8];
    V::transpose_8(rows, at + static_cast<size_t>(half) * 64, low[0]);
    V::transpose_8(rows, at + static_cast<size_t>(half) * 64 + 32, low[1]);
    V::transpose_8(rows, at + 128 + static_cast<size_t>(half) * 32, high);
    for (int k = 0; k < 8; ++k) {
      const I bits[4] = {V::and_(V::template sll<4>(high[k]), two),
                         V::and_(V::template sll<2>(high[k]), two), V::and_(high[k], two),
                         V::and_(V::template srl<2>(high[k]), two)};
      for (int q = 0; q < 4; ++q) {
        const I nibbles = q < 2 ? low_nibbles<V>(low[q][k]) : high_nibbles<V>(low[q - 2][k]);
        V::store(out.quants[4 * half + q][k], V::template stored<BlockKind::kQ6K>(
                                                  V::add_bytes(V::or_(nibbles, bits[q]), offset)));
      }
    }
  }
}

// IQ4_XS: 256 values of a table, with six-bit scales of 32 each.
template <typename V>
void unpack_iq4xs(const PanelRows& rows, size_t at, WeightChunk& out) {
  using I = typename V::I;
  using F = typename V::F;
  const I head = V::gather(rows, at);
  const F d = V::low_half(head);
  I high = V::template srl<16>(head);
  I low = V::gather(rows, at + 4);
  for (int g = 0; g < kChunkGroups; ++g) {
    const I scale =
        V::or_(V::and_(low, V::dwords(0xF)), V::template sll<4>(V::and_(high, V::dwords(3))));
    V::store(out.scale[g][0], V::mul(d, V::to_float(V::add(scale, V::dwords(-32)))));
    low = V::template srl<4>(low);
    high = V::template srl<2>(high);
    I x[4];
    V::transpose_4(rows, at + 8 + static_cast<size_t>(g) * 16, x);
    for (int k = 0; k < 4; ++k) {
      const I low_values = V::look_up(kIq4Values, low_nibbles<V>(x[k]));
      const I high_values = V::look_up(kIq4Values, high_nibbles<V>(x[k]));
      V::store(out.quants[g][k], V::template stored<BlockKind::kIq4Xs>(low_values));
      V::store(out.quants[g][k + 4], V::template stored<BlockKind::kIq4Xs>(high_values));
    }
  }
}

template <typename V, BlockKind kKind>
void unpack(const PanelRows& rows, int64_t chunk, int n_groups, WeightChunk& out) {
  constexpr Layout kLayout = layout_of(kKind);
  if constexpr (kLayout.block_values == kGroup) {
    size_t at = static_cast<size_t>(chunk) * kChunkGroups * kLayout.block_bytes;
    for (int g = 0; g < n_groups; ++g, at += kLayout.block_bytes) {
      unpack_block<V, kKind>(rows, at, out, g);
    }
  } else {
    const size_t at = static_cast<size_t>(chunk) * kLayout.block_bytes;
    if constexpr (kKind == BlockKind::kQ4K) unpack_q45k<V, false>(rows, at, out);
    if constexpr (kKind == BlockKind::kQ5K) unpack_q45k<V, true>(rows, at, out);
    if constexpr (kKind == BlockKind::kQ6K) unpack_q6k<V>(rows, at, out);
    if constexpr (kKind == BlockKind::kIq4Xs) unpack_iq4xs<V>(rows, at, out);
  }
}

// ---- Rows

// A group's quants, and what follows from them.
inline void add_group(RowChunk* out, int64_t group, const uint8_t* quants, float scale, float sum,
                      int32_t first_half, int32_t second_half) {
  RowChunk& chunk = out[group / kChunkGroups];
  const auto g = static_cast<int>(group % kChunkGroups);
  memcpy(chunk.quants + g * kGroup, quants, kGroup);
  chunk.scale[g] = scale;
  chunk.sum[g] = sum;
  chunk.offset[g] = -128 * (first_half + second_half);
  chunk.half_offset[g][0] = -128 * first_half;
  chunk.half_offset[g][1] = -128 * second_half;
}

inline int32_t sum_of_half(const uint8_t* quants) {
  int32_t sum = 0;
  for (int i = 0; i < kGroup / 2; ++i) sum += static_cast<int8_t>(quants[i]);
  return sum;
}

template <typename V>
void prepare(RowKind kind, const uint8_t* row, int64_t n_in, RowChunk* out) {
  if (kind == RowKind::kQ8K) {
    constexpr size_t kBlockBytes = 4 + kChunk + 2 * kChunk / 16;
    for (int64_t c = 0; c < n_in / kChunk; ++c, row += kBlockBytes) {
      float d;
      memcpy(&d, row, sizeof d);
      int16_t sums[kChunk / 16];
      memcpy(sums, row + 4 + kChunk, sizeof sums);
      for (int g = 0; g < kChunkGroups; ++g) {
        const int32_t first = sums[2 * g];
        const int32_t second = sums[2 * g + 1];
        add_group(out, c * kChunkGroups + g, row + 4 + g * kGroup, d,
                  static_cast<float>(first + second), first, second);
      }
    }
    return;
  }
  const int head = kind == RowKind::kQ8_1 ? 4 : 2;
  for (int64_t g = 0; g < n_in / kGroup; ++g, row += head + kGroup) {
    const int32_t first = sum_of_half(row + head);
    const int32_t second = sum_of_half(row + head + kGroup / 2);
    add_group(out, g, row + head, V::half(row), head == 4 ? V::half(row + 2) : 0.0F, first, second);
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

template <typename V, BlockKind kKind, int kRows>
void add_minima(const WeightChunk& w, int g, const RowChunk* rows, int64_t stride,
                typename V::F* acc) {
  if constexpr (layout_of(kKind).minima) {
    const typename V::F min = V::load(w.min[g]);
    for (int r = 0; r < kRows; ++r) {
      acc[r] = V::fma(min, V::broadcast(&rows[r * stride].sum[g]), acc[r]);
    }
  }
}

template <typename V, BlockKind kKind, int kRows>
void end_rows(const RowChunk* rows, int64_t stride, const typename V::F* acc, float* acc_rows) {
  constexpr bool kWide = layout_of(kKind).block_values == kChunk;
  for (int r = 0; r < kRows; ++r) {
    float* to = acc_rows + r * kPanel;
    const typename V::F scale = V::broadcast(&rows[r * stride].scale[0]);
    V::store(to, kWide ? V::fma(scale, acc[r], V::load(to)) : acc[r]);
  }
}

// acc[kRows][kPanel] += the chunk's products with as many rows, `stride` chunks apart.
template <typename V, BlockKind kKind, int kRows>
void multiply_tile(const WeightChunk& w, int n_groups, const RowChunk* rows, int64_t stride,
                   float* acc_rows) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr Layout kLayout = layout_of(kKind);
  constexpr int kHalves = kLayout.halves ? 2 : 1;
  constexpr int kDwords = kGroup / 4 / kHalves;
  F acc[kRows];
  begin_rows<V, kKind, kRows>(acc_rows, acc);
  for (int g = 0; g < n_groups; ++g) {
    for (int half = 0; half < kHalves; ++half) {
      I sums[kRows];
      for (int r = 0; r < kRows; ++r) {
        const RowChunk& row = rows[r * stride];
        sums[r] =
            V::template start<kKind>(kLayout.halves ? row.half_offset[g][half] : row.offset[g]);
      }
      V::template add_products<V, kKind, kRows, kDwords>(w.quants[g] + half * kDwords, rows, stride,
                                                         g * kGroup + half * 4 * kDwords, sums);
      const F scale = V::load(w.scale[g][half]);
      for (int r = 0; r < kRows; ++r) {
        const F sum = V::to_float(sums[r]);
        acc[r] = V::fma(scale_of<V, kKind>(scale, rows[r * stride], g), sum, acc[r]);
      }
    }
    add_minima<V, kKind, kRows>(w, g, rows, stride, acc);
  }
  end_rows<V, kKind, kRows>(rows, stride, acc, acc_rows);
}

// The tiles of up to kRows rows.
template <typename V, BlockKind kKind, int kRows>
void multiply_rest(int64_t n, const WeightChunk& w, int n_groups, const RowChunk* rows,
                   int64_t stride, float* acc) {
  if constexpr (kRows > 0) {
    if (n == kRows) return multiply_tile<V, kKind, kRows>(w, n_groups, rows, stride, acc);
    multiply_rest<V, kKind, kRows - 1>(n, w, n_groups, rows, stride, acc);
  }
}

// Q4_K and Q5_K times a few rows: each dword is multiplied as it is unpacked and never stored. More
// rows have more sums than there are registers, and Q8_0 gained nothing by it.
template <typename V, bool kFive, int kRows>
void multiply_45k(const PanelRows& weights, size_t at, const RowChunk* rows, int64_t stride,
                  float* acc_rows) {
  using I = typename V::I;
  constexpr BlockKind kKind = kFive ? BlockKind::kQ5K : BlockKind::kQ4K;
  const Head45k<V> head(weights, at);
  I fifth[8];
  if constexpr (kFive) V::transpose_8(weights, at + 16, fifth);
  typename V::F acc[kRows];
  begin_rows<V, kKind, kRows>(acc_rows, acc);
  for (int pair = 0; pair < 4; ++pair) {
    I sums[2][kRows];  // of both groups
    for (int r = 0; r < kRows; ++r) sums[0][r] = sums[1][r] = V::zero();
    unpack_pair_45k<V, kFive>(weights, at, pair, fifth, [&](int k, I low, I high) {
      for (int r = 0; r < kRows; ++r) {
        const int8_t* x = rows[r * stride].quants + 2 * pair * kGroup + 4 * k;
        sums[0][r] = V::template dot<kKind>(sums[0][r], low, x);
        sums[1][r] = V::template dot<kKind>(sums[1][r], high, x + kGroup);
      }
    });
    for (int i = 0; i < 2; ++i) {
      const int g = 2 * pair + i;
      const auto scale = head.scale(g);
      const auto min = head.min(g);
      for (int r = 0; r < kRows; ++r) {
        acc[r] = V::fma(scale, V::to_float(sums[i][r]), acc[r]);
        acc[r] = V::fma(min, V::broadcast(&rows[r * stride].sum[g]), acc[r]);
      }
    }
  }
  end_rows<V, kKind, kRows>(rows, stride, acc, acc_rows);
}

// The same of a chunk and up to kRows rows.
template <typename V, BlockKind kKind, int kRows>
void multiply_unstored(int64_t n, const PanelRows& weights, int64_t chunk, const RowChunk* rows,
                       int64_t stride, float* acc) {
  if constexpr (kRows > 0) {
    if (n < kRows) {
      return multiply_unstored<V, kKind, kRows - 1>(n, weights, chunk, rows, stride, acc);
    }
    const size_t at = static_cast<size_t>(chunk) * layout_of(kKind).block_bytes;
    multiply_45k<V, kKind == BlockKind::kQ5K, kRows>(weights, at, rows, stride, acc);
  }
}

// Asks for what the panel's outputs are read at next but one.
template <BlockKind kKind>
void prefetch(const ProductTask& task, const PanelRows& rows, int64_t chunk) {
  constexpr Layout kLayout = layout_of(kKind);
  constexpr int kBytes = kLayout.block_bytes * (kChunk / kLayout.block_values);
  constexpr int64_t kAhead = 2;
  const auto row_bytes = static_cast<int64_t>(task.weight_stride);
  int64_t at = (chunk + kAhead) * kBytes;
  if (at >= row_bytes) at += (kPanel - 1) * row_bytes;  // the panel behind this one
  for (const uint8_t* row : rows.at) {
    for (int i = 0; i < kBytes; i += 64) __builtin_prefetch(row + at + i);
  }
}

// The size of equal parts of n of which none is larger than `most`; the last may be smaller.
inline int64_t even_part(int64_t n, int64_t most) {
  const int64_t parts = (n + most - 1) / most;
  return (n + parts - 1) / parts;
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
  constexpr int kRows = V::template rows<kMultiplied>();
  constexpr bool k45k = kKind == BlockKind::kQ4K || kKind == BlockKind::kQ5K;
  constexpr int kUnstored = k45k ? V::kUnstoredRows : 0;
  static_assert(kLayout.block_values == kAs.block_values && kLayout.offset == kAs.offset &&
                kLayout.minima == kAs.minima && kLayout.halves == kAs.halves);
  const int64_t n_chunks = (task.n_in + kChunk - 1) / kChunk;
  const RowChunk* rows = task.rows + first_row * n_chunks;
  PanelRows at[kPanels];
  for (int p = 0; p < n_panels; ++p) {
    for (int i = 0; i < kPanel; ++i) {
      const int64_t output = first_out + p * kPanel + i;
      at[p].at[i] =
          task.weight + (output < task.end_out ? output : task.end_out - 1) * task.weight_stride;
    }
  }
  // What tiles leave is taken in parts as even as can be: a small one would leave the multipliers
  // waiting.
  const int64_t rest = tile_rows > 0 ? n_rows % tile_rows : n_rows;
  const int64_t even = rest <= kRows ? kRows : even_part(rest, kRows);
  memset(scratch.acc, 0, static_cast<size_t>(n_panels * n_rows) * kPanel * sizeof(float));
  for (int64_t c = 0; c < n_chunks; ++c) {
    const int64_t left = task.n_in / kGroup - c * kChunkGroups;
    const int n_groups = static_cast<int>(left < kChunkGroups ? left : kChunkGroups);
    if constexpr (kUnstored > 0) {
      if (n_rows <= kUnstored) {
        prefetch<kKind>(task, at[0], c);
        multiply_unstored<V, kKind, kUnstored>(n_rows, at[0], c, rows + c, n_chunks, scratch.acc);
        continue;
      }
    }
    for (int p = 0; p < n_panels; ++p) {
      prefetch<kKind>(task, at[p], c);
      unpack<V, kKind>(at[p], c, n_groups, scratch.chunks[p]);
    }
    int64_t r = 0;
    for (; tile_rows > 0 && r + tile_rows <= n_rows; r += tile_rows) {
      for (int p = 0; p < n_panels; ++p) {
        V::template multiply_tiles<kMultiplied>(tile_rows, scratch.chunks[p], n_groups,
                                                rows + r * n_chunks + c, n_chunks,
                                                scratch.acc + (p * n_rows + r) * kPanel);
      }
    }
    for (; r < n_rows; r += even) {
      const int64_t n = n_rows - r < even ? n_rows - r : even;
      for (int p = 0; p < n_panels; ++p) {
        multiply_rest<V, kMultiplied, kRows>(n, scratch.chunks[p], n_groups,
                                             rows + r * n_chunks + c, n_chunks,
                                             scratch.acc + (p * n_rows + r) * kPanel);
      }
    }
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
  const int64_t at_once = rows_at_once(task.n_in);
  for (int64_t row = 0; row < task.n_rows; row += at_once) {
    const int64_t n_rows = task.n_rows - row < at_once ? task.n_rows - row : at_once;
    const int most = n_rows > V::kFewRows ? kPanels : 1;
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

size_t scratch_bytes(int64_t n_rows) {
  const int64_t rows = n_rows < kMaxRows ? n_rows : kMaxRows;
  return kPanels * (sizeof(WeightChunk) + static_cast<size_t>(rows) * kPanel * sizeof(float));
}

}  // namespace
}  // namespace hcache::model
