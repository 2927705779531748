// How weights are unpacked, whatever the instruction set: from the blocks of 16 outputs' rows, as
// the file has them, to vectors that hold the same four values of all 16. Over a trait of the
// instruction set, see product_kernel_impl.h, hence the anonymous namespace.
#pragma once

#include <string.h>

#include "product_kernel.h"

namespace hcache::model {
namespace {

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

}  // namespace
}  // namespace hcache::model
