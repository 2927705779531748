// What the versions with 256-bit registers share: 16 outputs are two registers. Their files define
// the products of bytes; see product_kernel_impl.h.
#pragma once

#include <immintrin.h>

#include "product_kernel_impl.h"

namespace hcache::model {
namespace {

struct Halves256 : NoTiles {
  struct I {
    __m256i a;
    __m256i b;
  };
  struct F {
    __m256 a;
    __m256 b;
  };

  static I both(__m256i x) { return {x, x}; }
  static I zero() { return both(_mm256_setzero_si256()); }
  static I bytes(int x) { return both(_mm256_set1_epi8(static_cast<char>(x))); }
  static I dwords(int x) { return both(_mm256_set1_epi32(x)); }
  static I and_(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
  static I or_(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
  static I xor_(I x, I y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
  static I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
  static I add_bytes(I x, I y) { return {_mm256_add_epi8(x.a, y.a), _mm256_add_epi8(x.b, y.b)}; }
  static I mul(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
  template <int kBits>
  static I srl(I x) {
    return {_mm256_srli_epi32(x.a, kBits), _mm256_srli_epi32(x.b, kBits)};
  }
  template <int kBits>
  static I sll(I x) {
    return {_mm256_slli_epi32(x.a, kBits), _mm256_slli_epi32(x.b, kBits)};
  }
  template <int kBits>
  static I sra(I x) {
    return {_mm256_srai_epi32(x.a, kBits), _mm256_srai_epi32(x.b, kBits)};
  }
  static I look_up(const uint8_t* values, I codes) {
    const __m256i table =
        _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(values)));
    return {_mm256_shuffle_epi8(table, codes.a), _mm256_shuffle_epi8(table, codes.b)};
  }

  static F no_sum() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
  static F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
  }
  static F negate(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0F);
    return {_mm256_xor_ps(x.a, sign), _mm256_xor_ps(x.b, sign)};
  }
  static F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
  // Of dwords whose upper halves are zero.
  static __m256 halves_to_float(__m256i x) {
    const __m256i packed = _mm256_packus_epi32(x, x);  // by 128 bits
    return _mm256_cvtph_ps(
        _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, _MM_SHUFFLE(2, 0, 2, 0))));
  }
  static F low_half(I x) { return high_half(sll<16>(x)); }
  static F high_half(I x) {
    const I upper = srl<16>(x);
    return {halves_to_float(upper.a), halves_to_float(upper.b)};
  }
  static float half(const uint8_t* p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    return _cvtsh_ss(bits);
  }
  static __m256 half_of_power(__m256i code) {
    const __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), code);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(code, _mm256_set1_epi32(1)), 23);
    const __m256i denormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), code);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, denormal, tiny));
  }
  // Half of 2 to the power of code - 127, as E8M0 has it.
  static F half_of_power(I code) { return {half_of_power(code.a), half_of_power(code.b)}; }

  static __m256i load_256(const uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
  static void store(float* p, F x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
  }
  static void store(uint8_t (*p)[4], I x) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_store_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
  }
  static F broadcast(const float* p) {
    const __m256 x = _mm256_set1_ps(*p);
    return {x, x};
  }

  // The dword at `at` of each output's row.
  static I gather(const PanelRows& rows, size_t at) {
    return {gather_8(rows.at, at), gather_8(rows.at + 8, at)};
  }
  static __m256i gather_8(const uint8_t* const* rows, size_t at) {
    const auto dword = [&](int i) {
      int x;
      memcpy(&x, rows[i] + at, sizeof x);
      return x;
    };
    return _mm256_setr_epi32(dword(0), dword(1), dword(2), dword(3), dword(4), dword(5), dword(6),
                             dword(7));
  }

  // Four registers of four rows in each 128 bits: x[k] is dword k of those.
  static void transpose_quads(const __m256i r[4], __m256i x[4]) {
    const __m256i a = _mm256_unpacklo_epi32(r[0], r[1]);
    const __m256i b = _mm256_unpackhi_epi32(r[0], r[1]);
    const __m256i c = _mm256_unpacklo_epi32(r[2], r[3]);
    const __m256i d = _mm256_unpackhi_epi32(r[2], r[3]);
    x[0] = _mm256_unpacklo_epi64(a, c);
    x[1] = _mm256_unpackhi_epi64(a, c);
    x[2] = _mm256_unpacklo_epi64(b, d);
    x[3] = _mm256_unpackhi_epi64(b, d);
  }

  // x[k]: dword k of 16 bytes at `at` of each output's row.
  static void transpose_4(const PanelRows& rows, size_t at, I x[4]) {
    const auto load = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.at[i] + at));
    };
    for (int half = 0; half < 2; ++half) {
      __m256i r[4];
      for (int j = 0; j < 4; ++j) {
        r[j] = _mm256_set_m128i(load(half * 8 + j + 4), load(half * 8 + j));
      }
      __m256i out[4];
      transpose_quads(r, out);
      for (int k = 0; k < 4; ++k) (half == 0 ? x[k].a : x[k].b) = out[k];
    }
  }

  // x[k]: dword k of 32 bytes at `at` of each output's row.
  static void transpose_8(const PanelRows& rows, size_t at, I x[8]) {
    for (int half = 0; half < 2; ++half) {
      __m256i r[4];
      __m256i first[4];  // dwords k and k + 4 of four outputs
      __m256i last[4];   // of the four behind them
      for (int j = 0; j < 4; ++j) r[j] = load_256(rows.at[half * 8 + j] + at);
      transpose_quads(r, first);
      for (int j = 0; j < 4; ++j) r[j] = load_256(rows.at[half * 8 + 4 + j] + at);
      transpose_quads(r, last);
      for (int k = 0; k < 4; ++k) {
        (half == 0 ? x[k].a : x[k].b) = _mm256_permute2x128_si256(first[k], last[k], 0x20);
        (half == 0 ? x[k + 4].a : x[k + 4].b) = _mm256_permute2x128_si256(first[k], last[k], 0x31);
      }
    }
  }
};

}  // namespace
}  // namespace hcache::model
