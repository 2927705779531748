// How weights are unpacked, whatever the instruction set: from the blocks of 16 outputs' rows, as
// the file has them, to vectors that hold the same four values of all 16. Over a trait of the
// instruction set, see product_kernel_impl.h, hence the anonymous namespace.
#pragma once

#include <string.h>

#include "product_kernel.h"

// Left to itself, GCC does not inline what is called for each group, and vectors go through memory.
// Sanitizers' checks of every access would make that functions of too many branches to compile.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HCACHE_ALWAYS_INLINE
#else
#define HCACHE_ALWAYS_INLINE __attribute__((always_inline))
#endif
#define HCACHE_INLINE inline HCACHE_ALWAYS_INLINE

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

// Bytes of an output's weights in a chunk.
constexpr int chunk_bytes(Layout layout) {
  return layout.block_bytes * (kChunk / layout.block_values);
}
// Dwords of a group, or of its half where halves have scales of their own.
constexpr int step_dwords(Layout layout) { return kGroup / 4 / (layout.halves ? 2 : 1); }

// What -128 times a sum is divided by for -zero times it, as a shift.
constexpr int offset_shift(Layout layout) {
  int shift = 0;
  while (layout.zero > 0 && layout.zero << shift < 128) ++shift;
  return shift;
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
// With 16 added.
alignas(16) constexpr uint8_t kSmallMxfp4Values[16] = {16, 17, 18, 19, 20, 22, 24, 28,
                                                       16, 15, 14, 13, 12, 10, 8,  4};

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

// ---- Steps. What unpacks calls each(g, half, scale, min, quants) for every group in order, or for
// its halves where they have scales of their own: 16 outputs' scales and minima, and 8 or 4 dwords
// of their quants. What it calls stores or multiplies them. With kSmall, signed quants have
// Layout::zero added and not 128, which is what most of them are stored with.

// Where a block of 32 values has what follows its scale.
constexpr size_t fifth_at(BlockKind kind) { return kind == BlockKind::kQ5_1 ? 4 : 2; }
constexpr size_t quants_at(BlockKind kind) {
  return static_cast<size_t>(layout_of(kind).block_bytes) -
         (kind == BlockKind::kQ8_0 ? kGroup : kGroup / 2);
}
constexpr bool has_fifth_bits(BlockKind kind) {
  return kind == BlockKind::kQ5_0 || kind == BlockKind::kQ5_1;
}

// From what a kind is stored with, Layout::zero added, to what is wanted.
template <typename V, BlockKind kKind, bool kSmall>
HCACHE_INLINE typename V::I with_offset(typename V::I quants) {
  constexpr Layout kLayout = layout_of(kKind);
  if constexpr (kSmall || !kLayout.offset) return quants;
  return V::add_bytes(quants, V::bytes(128 - kLayout.zero));
}

// A block of 32 values as group g: `x` are the four or eight dwords of its quants, `fifth` those of
// its fifth bits.
template <typename V, BlockKind kKind, bool kSmall, typename Each>
HCACHE_INLINE void unpack_group(int g, typename V::F scale, typename V::F min, typename V::I fifth,
                                const typename V::I* x, const Each& each) {
  using I = typename V::I;
  I quants[kGroup / 4];
  if constexpr (kKind == BlockKind::kQ8_0) {
    for (int k = 0; k < 8; ++k) quants[k] = V::xor_(x[k], V::bytes(0x80));
  } else {
    for (int k = 0; k < 4; ++k) {
      I low = low_nibbles<V>(x[k]);
      I high = high_nibbles<V>(x[k]);
      if constexpr (kKind == BlockKind::kIq4Nl || kKind == BlockKind::kMxfp4) {
        const uint8_t* values = kKind == BlockKind::kIq4Nl ? kIq4Values
                                : kSmall                   ? kSmallMxfp4Values
                                                           : kMxfp4Values;
        low = V::look_up(values, low);
        high = V::look_up(values, high);
      } else {
        if constexpr (has_fifth_bits(kKind)) {
          low = V::template with_fifth_bits<V>(low, fifth, k);
          high = V::template with_fifth_bits<V>(high, fifth, k + 4);
        }
        low = with_offset<V, kKind, kSmall>(low);
        high = with_offset<V, kKind, kSmall>(high);
      }
      quants[k] = low;
      quants[k + 4] = high;
    }
  }
  each(g, 0, scale, min, quants);
}

template <typename V, BlockKind kKind, bool kSmall, typename Each>
HCACHE_INLINE void unpack_block(const PanelRows& rows, size_t at, int g, const Each& each) {
  using I = typename V::I;
  const I head = V::gather(rows, at);  // scale, and minimum or what follows
  I x[8];
  if constexpr (kKind == BlockKind::kQ8_0) {
    V::transpose_8(rows, at + quants_at(kKind), x);
  } else {
    V::transpose_4(rows, at + quants_at(kKind), x);
  }
  I fifth = V::zero();
  if constexpr (has_fifth_bits(kKind)) fifth = V::gather(rows, at + fifth_at(kKind));
  typename V::F scale;
  if constexpr (kKind == BlockKind::kMxfp4) {
    scale = V::half_of_power(V::and_(head, V::dwords(0xFF)));
  } else {
    scale = V::low_half(head);
  }
  const auto min = layout_of(kKind).minima ? V::high_half(head) : V::no_sum();
  unpack_group<V, kKind, kSmall>(g, scale, min, fifth, x, each);
}

// ---- A whole chunk's blocks of 32 values, dword by dword from the first to the last: their scales
// come with their quants, where gathering these takes as long as transposing.

// The dword at any byte.
template <typename V, size_t kByte>
HCACHE_INLINE typename V::I dword_at(const typename V::I* dwords) {
  if constexpr (kByte % 4 == 0) {
    return dwords[kByte / 4];
  } else {
    return V::template across<kByte % 4>(dwords[kByte / 4], dwords[kByte / 4 + 1]);
  }
}
template <typename V, size_t kByte, int kCount>
HCACHE_INLINE void dwords_at(const typename V::I* dwords, typename V::I* x) {
  if constexpr (kCount > 0) {
    *x = dword_at<V, kByte>(dwords);
    dwords_at<V, kByte + 4, kCount - 1>(dwords, x + 1);
  }
}
// The half at a byte that is even.
template <typename V, size_t kByte>
HCACHE_INLINE typename V::F half_at(const typename V::I* dwords) {
  if constexpr (kByte % 4 == 0) return V::low_half(dwords[kByte / 4]);
  return V::high_half(dwords[kByte / 4]);
}
template <typename V, BlockKind kKind, size_t kByte>
HCACHE_INLINE typename V::F scale_at(const typename V::I* dwords) {
  if constexpr (kKind == BlockKind::kMxfp4) {
    return V::half_of_power(byte_of<V, kByte % 4>(dwords[kByte / 4]));
  } else {
    return half_at<V, kByte>(dwords);
  }
}

// kDone of the chunk's kAll dwords have been transposed; so many are wanted.
template <typename V, int kAll, int kDone, int kWanted>
HCACHE_INLINE void transpose_until(const PanelRows& rows, size_t at, typename V::I* dwords) {
  if constexpr (kDone + 8 <= kAll && kDone < kWanted) {
    V::transpose_8(rows, at + 4 * kDone, dwords + kDone);
    transpose_until<V, kAll, kDone + 8, kWanted>(rows, at, dwords);
  } else if constexpr (kDone < kWanted) {
    static_assert(kAll - kDone <= 4, "the rest is not read beyond its end");
    V::transpose_4(rows, at + 4 * (kAll - 4), dwords + kAll - 4);
  }
}

// Groups kFrom and those behind it.
template <typename V, BlockKind kKind, bool kSmall, int kFrom, typename Each>
HCACHE_INLINE void unpack_dwords(const PanelRows& rows, size_t at, typename V::I* dwords,
                                 const Each& each) {
  if constexpr (kFrom < kChunkGroups) {
    constexpr size_t kBytes = layout_of(kKind).block_bytes;
    constexpr int kAll = kChunkGroups * kBytes / 4;
    constexpr size_t kBlock = kFrom * kBytes;
    constexpr auto up_to = [](size_t byte) { return static_cast<int>(byte + 3) / 4; };
    constexpr auto in_eights = [](int n) { return (n + 7) / 8 * 8; };
    constexpr int kDone = in_eights(up_to(kBlock)) < kAll ? in_eights(up_to(kBlock)) : kAll;
    transpose_until<V, kAll, kDone, up_to(kBlock + kBytes)>(rows, at, dwords);
    typename V::I x[8];
    dwords_at<V, kBlock + quants_at(kKind), kKind == BlockKind::kQ8_0 ? 8 : 4>(dwords, x);
    typename V::I fifth = V::zero();
    if constexpr (has_fifth_bits(kKind)) fifth = dword_at<V, kBlock + fifth_at(kKind)>(dwords);
    typename V::F min = V::no_sum();
    if constexpr (layout_of(kKind).minima) min = half_at<V, kBlock + 2>(dwords);
    unpack_group<V, kKind, kSmall>(kFrom, scale_at<V, kKind, kBlock>(dwords), min, fifth, x, each);
    unpack_dwords<V, kKind, kSmall, kFrom + 1>(rows, at, dwords, each);
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

// Groups kFrom and those behind it; two share their bytes.
template <typename V, bool kFive, int kFrom, typename Each>
HCACHE_INLINE void unpack_q45k(const PanelRows& rows, size_t at, const Head45k<V>& head,
                               const typename V::I* fifth, typename V::I* x, const Each& each) {
  if constexpr (kFrom < kChunkGroups) {
    constexpr size_t kQuants = (kFive ? 48 : 16) + kFrom / 2 * kGroup;
    if constexpr (kFrom % 2 == 0) V::transpose_8(rows, at + kQuants, x);
    typename V::I quants[8];
    for (int k = 0; k < 8; ++k) {
      quants[k] = kFrom % 2 == 0 ? low_nibbles<V>(x[k]) : high_nibbles<V>(x[k]);
      if constexpr (kFive) quants[k] = V::or_(quants[k], fifth_of_group<V>(fifth[k], kFrom));
    }
    each(kFrom, 0, head.scale(kFrom), head.min(kFrom), quants);
    unpack_q45k<V, kFive, kFrom + 1>(rows, at, head, fifth, x, each);
  }
}
template <typename V, bool kFive, typename Each>
HCACHE_INLINE void unpack_q45k(const PanelRows& rows, size_t at, const Each& each) {
  const Head45k<V> head(rows, at);
  typename V::I fifth[8];
  if constexpr (kFive) V::transpose_8(rows, at + 16, fifth);
  typename V::I x[8];
  unpack_q45k<V, kFive, 0>(rows, at, head, fifth, x, each);
}

// Q6_K: 256 values with signed scales of 16 each. Groups kFrom and those behind it; four share the
// bytes of their upper bits.
template <typename V, bool kSmall, int kFrom, typename Each>
HCACHE_INLINE void unpack_q6k(const PanelRows& rows, size_t at, typename V::F d,
                              const typename V::I* scales, typename V::I (*low)[8],
                              typename V::I* high, const Each& each) {
  if constexpr (kFrom < kChunkGroups) {
    using I = typename V::I;
    constexpr size_t kFour = kFrom / 4;
    constexpr int kOfFour = kFrom % 4;
    if constexpr (kOfFour == 0) {
      V::transpose_8(rows, at + kFour * 64, low[0]);
      V::transpose_8(rows, at + kFour * 64 + 32, low[1]);
      V::transpose_8(rows, at + 128 + kFour * 32, high);
    }
    I quants[8];
    for (int k = 0; k < 8; ++k) {
      const I x = low[kOfFour % 2][k];
      const I bits = kOfFour == 0   ? V::template sll<4>(high[k])
                     : kOfFour == 1 ? V::template sll<2>(high[k])
                     : kOfFour == 2 ? high[k]
                                    : V::template srl<2>(high[k]);
      const I nibbles = kOfFour < 2 ? low_nibbles<V>(x) : high_nibbles<V>(x);
      quants[k] =
          with_offset<V, BlockKind::kQ6K, kSmall>(V::or_(nibbles, V::and_(bits, V::bytes(0x30))));
    }
    const auto scale = [&](int half) {
      return V::mul(d, V::to_float(signed_byte_of<V>(scales[kFrom / 2], 2 * (kFrom % 2) + half)));
    };
    each(kFrom, 0, scale(0), V::no_sum(), quants);
    each(kFrom, 1, scale(1), V::no_sum(), quants + 4);
    unpack_q6k<V, kSmall, kFrom + 1>(rows, at, d, scales, low, high, each);
  }
}
template <typename V, bool kSmall, typename Each>
HCACHE_INLINE void unpack_q6k(const PanelRows& rows, size_t at, const Each& each) {
  using I = typename V::I;
  const auto d = V::high_half(V::gather(rows, at + 206));
  I scales[4];
  V::transpose_4(rows, at + 192, scales);
  I low[2][8];
  I high[8];
  unpack_q6k<V, kSmall, 0>(rows, at, d, scales, low, high, each);
}

// IQ4_XS: 256 values of a table, with six-bit scales of 32 each.
template <typename V, typename Each>
HCACHE_INLINE void unpack_iq4xs(const PanelRows& rows, size_t at, const Each& each) {
  using I = typename V::I;
  const I head = V::gather(rows, at);
  const auto d = V::low_half(head);
  I high = V::template srl<16>(head);
  I low = V::gather(rows, at + 4);
  for (int g = 0; g < kChunkGroups; ++g) {
    const I scale =
        V::or_(V::and_(low, V::dwords(0xF)), V::template sll<4>(V::and_(high, V::dwords(3))));
    low = V::template srl<4>(low);
    high = V::template srl<2>(high);
    I x[4];
    V::transpose_4(rows, at + 8 + static_cast<size_t>(g) * 16, x);
    I quants[8];
    for (int k = 0; k < 4; ++k) {
      quants[k] = V::look_up(kIq4Values, low_nibbles<V>(x[k]));
      quants[k + 4] = V::look_up(kIq4Values, high_nibbles<V>(x[k]));
    }
    each(g, 0, V::mul(d, V::to_float(V::add(scale, V::dwords(-32)))), V::no_sum(), quants);
  }
}

// The steps of n_groups groups of a chunk of the rows.
template <typename V, BlockKind kKind, bool kSmall, typename Each>
HCACHE_INLINE void for_each_step(const PanelRows& rows, int64_t chunk, int n_groups,
                                 const Each& each) {
  constexpr Layout kLayout = layout_of(kKind);
  constexpr size_t kBytes = chunk_bytes(kLayout);
  size_t at = static_cast<size_t>(chunk) * kBytes;
  if constexpr (kKind == BlockKind::kQ4K) {
    unpack_q45k<V, false>(rows, at, each);
  } else if constexpr (kKind == BlockKind::kQ5K) {
    unpack_q45k<V, true>(rows, at, each);
  } else if constexpr (kKind == BlockKind::kQ6K) {
    unpack_q6k<V, kSmall>(rows, at, each);
  } else if constexpr (kKind == BlockKind::kIq4Xs) {
    unpack_iq4xs<V>(rows, at, each);
  } else {
    if constexpr (V::kByDwords) {
      if (n_groups == kChunkGroups) {
        typename V::I dwords[kBytes / 4];
        return unpack_dwords<V, kKind, kSmall, 0>(rows, at, dwords, each);
      }
    }
    for (int g = 0; g < n_groups; ++g, at += kLayout.block_bytes) {
      unpack_block<V, kKind, kSmall>(rows, at, g, each);
    }
  }
}

}  // namespace
}  // namespace hcache::model
