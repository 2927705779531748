// The trait of AVX-512 VNNI, whose vectors AMX's version takes too: 16 outputs are one register.
// See product_kernel_impl.h.
#pragma once

#include <immintrin.h>

#include "product_kernel_impl.h"

namespace hcache::model {
namespace {

struct Avx512Vnni : NoTiles {
  using I = __m512i;
  using F = __m512;
  // Of one panel. Twelve would have as many sums as a pair of panels and read more: as many values
  // as there are products, and addresses of twelve rows, which are more than there are registers.
  static constexpr int kRows = 8;
  static constexpr int64_t kSinglePanelRows = 8;
  // Twelve chains of integer products hide their latency; they and their accumulators take 24 of
  // 32 registers.
  static constexpr int kPairRows = 6;
  static constexpr int unstored_rows(BlockKind /*kind*/) { return 8; }
  static constexpr bool kByDwords = true;

  static I zero() { return _mm512_setzero_si512(); }
  static I bytes(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static I dwords(int x) { return _mm512_set1_epi32(x); }
  static I and_(I a, I b) { return _mm512_and_si512(a, b); }
  static I or_(I a, I b) { return _mm512_or_si512(a, b); }
  static I xor_(I a, I b) { return _mm512_xor_si512(a, b); }
  static I add(I a, I b) { return _mm512_add_epi32(a, b); }
  static I add_bytes(I a, I b) { return _mm512_add_epi8(a, b); }
  static I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
  template <int kBits>
  static I srl(I a) {
    return _mm512_srli_epi32(a, kBits);
  }
  template <int kBits>
  static I sll(I a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <int kBits>
  static I sra(I a) {
    return _mm512_srai_epi32(a, kBits);
  }
  // Of each dword of a what is behind so many bytes, then these bytes of b's.
  template <int kBytes>
  static I across(I a, I b) {
    constexpr uint64_t kOfB = 0x1111111111111111U * ((1U << kBytes) - 1);
    return _mm512_ror_epi32(_mm512_mask_blend_epi8(kOfB, a, b), 8 * kBytes);
  }
  static I look_up(const uint8_t* values, I codes) {
    const __m128i table = _mm_load_si128(reinterpret_cast<const __m128i*>(values));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
  }

  template <typename V>
  static I with_fifth_bits(I quants, I bits, int k) {
    const I first = _mm512_set4_epi32(0x0C0C0C0C, 0x08080808, 0x04040404, 0);  // of each dword
    const I byte = _mm512_shuffle_epi8(bits, add_bytes(first, bytes(k / 2)));
    const I bit = dwords(k % 2 == 0 ? 0x08040201 : static_cast<int>(0x80402010));
    return _mm512_mask_add_epi8(quants, _mm512_test_epi8_mask(byte, bit), quants, bytes(0x10));
  }

  static F no_sum() { return _mm512_setzero_ps(); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F negate(F a) {
    return _mm512_castsi512_ps(xor_(_mm512_castps_si512(a), dwords(static_cast<int>(0x80000000))));
  }
  static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static F low_half(I a) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(a)); }
  static F high_half(I a) { return low_half(srl<16>(a)); }
  static float half(const uint8_t* p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return _cvtsh_ss(bits);
  }
  // Half of 2 to the power of code - 127, as E8M0 has it.
  static F half_of_power(I code) {
    const __mmask16 tiny = _mm512_cmplt_epi32_mask(code, dwords(2));
    const I normal = sll<23>(add(code, dwords(-1)));
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, tiny, dwords(0x00200000), code));
  }

  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static void store(uint8_t (*p)[4], I x) { _mm512_store_si512(p, x); }
  static F broadcast(const float* p) { return _mm512_set1_ps(*p); }

  // The dword at `at` of each output's row.
  static I gather(const PanelRows& rows, size_t at) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(gather_8(rows.at, at)),
                              gather_8(rows.at + 8, at), 1);
  }
  static __m256i gather_8(const uint8_t* const* rows, size_t at) {
    const auto dword = [&](int i) {
      int x;
      memcpy(&x, rows[i] + at, sizeof x);
      return _mm256_set1_epi32(x);
    };
    const __m256i a = _mm256_blend_epi32(dword(0), dword(1), 0x02);
    const __m256i b = _mm256_blend_epi32(dword(2), dword(3), 0x08);
    const __m256i c = _mm256_blend_epi32(dword(4), dword(5), 0x20);
    const __m256i d = _mm256_blend_epi32(dword(6), dword(7), 0x80);
    return _mm256_blend_epi32(_mm256_blend_epi32(a, b, 0x0C), _mm256_blend_epi32(c, d, 0xC0), 0xF0);
  }

  // Four registers of four rows in each 128 bits: x[k] is dword k of those.
  static void transpose_quads(const I r[4], I x[4]) {
    const I a = _mm512_unpacklo_epi32(r[0], r[1]);
    const I b = _mm512_unpackhi_epi32(r[0], r[1]);
    const I c = _mm512_unpacklo_epi32(r[2], r[3]);
    const I d = _mm512_unpackhi_epi32(r[2], r[3]);
    x[0] = _mm512_unpacklo_epi64(a, c);
    x[1] = _mm512_unpackhi_epi64(a, c);
    x[2] = _mm512_unpacklo_epi64(b, d);
    x[3] = _mm512_unpackhi_epi64(b, d);
  }

  // x[k]: dword k of 16 bytes at `at` of each output's row.
  static void transpose_4(const PanelRows& rows, size_t at, I x[4]) {
    const auto load = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.at[i] + at));
    };
    I r[4];
    for (int j = 0; j < 4; ++j) {
      r[j] = _mm512_castsi128_si512(load(j));
      r[j] = _mm512_inserti32x4(r[j], load(j + 4), 1);
      r[j] = _mm512_inserti32x4(r[j], load(j + 8), 2);
      r[j] = _mm512_inserti32x4(r[j], load(j + 12), 3);
    }
    transpose_quads(r, x);
  }

  // x[k]: dword k of 32 bytes at `at` of each output's row.
  static void transpose_8(const PanelRows& rows, size_t at, I x[8]) {
    const auto load = [&](int i, int j) {
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.at[i] + at));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows.at[j] + at));
      return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    };
    I r[4];
    I first[4];  // by 128 bits: dwords k and k + 4 of outputs 0 to 3, then of 4 to 7
    I last[4];   // of 8 to 11 and 12 to 15
    for (int j = 0; j < 4; ++j) r[j] = load(j, j + 4);
    transpose_quads(r, first);
    for (int j = 0; j < 4; ++j) r[j] = load(j + 8, j + 12);
    transpose_quads(r, last);
    for (int k = 0; k < 4; ++k) {
      x[k] = _mm512_shuffle_i64x2(first[k], last[k], _MM_SHUFFLE(2, 0, 2, 0));
      x[k + 4] = _mm512_shuffle_i64x2(first[k], last[k], _MM_SHUFFLE(3, 1, 3, 1));
    }
  }

  template <BlockKind kKind>
  static I start(const int32_t& offset) {
    return layout_of(kKind).offset ? dwords(offset) : zero();
  }
  template <BlockKind kKind>
  static I weights(const uint8_t (*p)[4]) {
    return _mm512_load_si512(p);
  }
  template <BlockKind kKind>
  static I dot(I sum, I w, const int8_t* x) {
    int four;
    memcpy(&four, x, sizeof four);
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
  }
};

}  // namespace
}  // namespace hcache::model
