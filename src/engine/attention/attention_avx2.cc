// The kernel for AVX2 with FMA and F16C.
#include <immintrin.h>
#include <stdint.h>

#include "attention_kernel.h"
#include "attention_x86.h"

namespace hcache::engine {
namespace {

// Transposes 8 keys by 16 dimensions of F16: out[dim][key].
template <typename T>
void transpose_8x16(const uint16_t* const rows[8], int dim, T* out) {
  __m256i a[8];
  __m256i b[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + dim));
  }
  for (int i = 0; i < 8; i += 2) {  // pairs of keys
    b[i] = _mm256_unpacklo_epi16(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi16(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // four keys
    a[i] = _mm256_unpacklo_epi32(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi32(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi32(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi32(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // eight keys
    b[2 * i] = _mm256_unpacklo_epi64(a[i], a[i + 4]);
    b[2 * i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 4]);
  }
  for (int i = 0; i < 8; ++i) {  // lanes: dimension i, dimension 8 + i
    store_8(out + i * kTile, _mm256_castsi256_si128(b[i]));
    store_8(out + (i + 8) * kTile, _mm256_extracti128_si256(b[i], 1));
  }
}

struct Simd {
  static constexpr int kWidth = 8;
  static constexpr int kRows = 6;
  static constexpr int kCols = 2;
  static constexpr bool kHalfOperand = true;

  using F = __m256;

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  template <F (*op)(F, F)>
  static void reduce(const F (&x)[1], float* out) {
    F y = op(x[0], _mm256_permute2f128_ps(x[0], x[0], 0x01));
    y = op(y, _mm256_permute_ps(y, 0x4e));
    *out = _mm256_cvtss_f32(op(y, _mm256_permute_ps(y, 0xb1)));
  }
  template <F (*op)(F, F)>
  static void reduce(const F (&x)[4], float* out) {
    const F a = op(_mm256_permute2f128_ps(x[0], x[1], 0x20),
                   _mm256_permute2f128_ps(x[0], x[1], 0x31));  // lanes: row 0, row 1
    const F b = op(_mm256_permute2f128_ps(x[2], x[3], 0x20),
                   _mm256_permute2f128_ps(x[2], x[3], 0x31));  // row 2, row 3
    const F c = op(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
    const F d = op(c, _mm256_permute_ps(c, 0xb1));  // row 0, 0, 2, 2; row 1, 1, 3, 3
    const __m128 even = _mm256_castps256_ps128(d);
    const __m128 odd = _mm256_extractf128_ps(d, 1);
    const __m128 pairs = _mm_unpacklo_ps(even, odd);
    _mm_storeu_ps(out, _mm_movelh_ps(pairs, _mm_unpackhi_ps(even, odd)));
  }
  static F keep_first(F x, int n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes);
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, _mm256_castsi256_ps(keep));
  }
  static F pow2_mul(F y, F t, F x) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    const __m256 keep = _mm256_cmp_ps(x, _mm256_set1_ps(-125.0F), _CMP_NLT_UQ);
    const __m256i product = _mm256_add_epi32(_mm256_castps_si256(y), exponent);
    return _mm256_and_ps(keep, _mm256_castsi256_ps(product));
  }
  static F load_half(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static F load_half_n(const uint16_t* p, int n) {
    alignas(16) uint16_t padded[8] = {};
    for (int i = 0; i < n; ++i) padded[i] = p[i];
    return load_half(padded);
  }
  template <typename T>
  static void pack_keys(const uint8_t* k, size_t stride, int n_keys, int dim, T* out) {
    pack_key_groups<8>(k, stride, n_keys, dim, out, transpose_8x16<T>);
  }
};

}  // namespace
}  // namespace hcache::engine

#include "attention_kernel_impl.h"

namespace hcache::engine {

const AttentionKernel kAttentionAvx2 = {attend, merge, observe};

}  // namespace hcache::engine
