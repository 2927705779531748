// The kernel for AVX-512 (F, BW, DQ, VL) with FMA and F16C.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC bug 105593: its own headers
#pragma GCC diagnostic ignored "-Wuninitialized"        // likewise
#endif
#include <immintrin.h>
#include <stdint.h>

#include "attention_kernel.h"
#include "attention_x86.h"

namespace hcache::engine {
namespace {

inline void store_16(uint16_t* p, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
inline void store_16(float* p, __m256i x) { _mm512_storeu_ps(p, _mm512_cvtph_ps(x)); }

// Transposes 16 keys by 16 dimensions of F16: out[dim][key].
template <typename T>
void transpose_16x16(const uint16_t* const rows[16], int dim, T* out) {
  __m512i a[8];
  __m512i b[8];
  for (int i = 0; i < 8; ++i) {
    // Lanes: eight dimensions of key i, of key 8 + i, the next eight of key i, of key 8 + i.
    // Gathered by masked loads, which leave the shuffle port to the steps below.
    a[i] = _mm512_broadcast_i64x2(load_128(rows[i] + dim));
    a[i] = _mm512_mask_broadcast_i64x2(a[i], 0x0c, load_128(rows[i + 8] + dim));
    a[i] = _mm512_mask_broadcast_i64x2(a[i], 0x30, load_128(rows[i] + dim + 8));
    a[i] = _mm512_mask_broadcast_i64x2(a[i], 0xc0, load_128(rows[i + 8] + dim + 8));
  }
  for (int i = 0; i < 8; i += 2) {  // pairs of keys
    b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // four keys
    a[i] = _mm512_unpacklo_epi32(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi32(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi32(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi32(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // eight keys
    b[2 * i] = _mm512_unpacklo_epi64(a[i], a[i + 4]);
    b[2 * i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 4]);
  }
  for (int i = 0; i < 8; ++i) {  // halves: dimension i, dimension 8 + i, of sixteen keys
    store_16(out + i * kTile, _mm512_castsi512_si256(b[i]));
    store_16(out + (i + 8) * kTile, _mm512_extracti64x4_epi64(b[i], 1));
  }
}

struct Simd {
  static constexpr int kWidth = 16;
  static constexpr int kRows = 6;
  static constexpr int kCols = 4;
  static constexpr bool kHalfOperand = true;

  using F = __m512;

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  template <F (*op)(F, F)>
  static F reduce_quarters(F x) {  // each 128-bit lane on its own, to all of its elements
    x = op(x, _mm512_permute_ps(x, 0x4e));
    return op(x, _mm512_permute_ps(x, 0xb1));
  }
  template <F (*op)(F, F)>
  static void reduce(const F (&x)[1], float* out) {
    const F eight = op(x[0], _mm512_shuffle_f32x4(x[0], x[0], 0x4e));
    const F four = op(eight, _mm512_shuffle_f32x4(eight, eight, 0xb1));
    *out = _mm512_cvtss_f32(reduce_quarters<op>(four));
  }
  template <F (*op)(F, F)>
  static void reduce(const F (&x)[4], float* out) {
    const F a = op(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee));
    const F b = op(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee));
    const F c =
        reduce_quarters<op>(op(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd)));
    const __m512i first = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
    _mm512_mask_storeu_ps(out, 0xf, _mm512_permutexvar_ps(first, c));
  }
  static __mmask16 first_lanes(int n) {
    return static_cast<__mmask16>(n <= 0 ? 0U : n >= 16 ? 0xffffU : (1U << n) - 1U);
  }
  static F keep_first(F x, int n) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), first_lanes(n), x);
  }
  static F pow2_mul(F y, F t, F x) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    const __mmask16 keep = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-125.0F), _CMP_NLT_UQ);
    return _mm512_castsi512_ps(_mm512_maskz_add_epi32(keep, _mm512_castps_si512(y), exponent));
  }
  static F load_half(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static F load_half_n(const uint16_t* p, int n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  }
  template <typename T>
  static void pack_keys(const uint8_t* k, size_t stride, int n_keys, int dim, T* out) {
    pack_key_groups<16>(k, stride, n_keys, dim, out, transpose_16x16<T>);
  }
};

}  // namespace
}  // namespace hcache::engine

#include "attention_kernel_impl.h"

namespace hcache::engine {

const AttentionKernel kAttentionAvx512 = {attend, merge, observe};

}  // namespace hcache::engine
