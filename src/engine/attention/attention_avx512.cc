// The kernel for AVX-512 (F, BW, DQ, VL) with FMA and F16C.
#include <immintrin.h>
#include <stdint.h>

#include "attention_kernel.h"
#include "attention_x86.h"

namespace hcache::engine {
namespace {

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
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static __m256 upper(F x) { return _mm512_extractf32x8_ps(x, 1); }
  static float hmax(F x) {
    const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(x), upper(x));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }
  static float hsum(F x) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), upper(x));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
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
  static void pack_keys(const uint8_t* k, size_t stride, int n_keys, int dim, uint16_t* out);
};

}  // namespace
}  // namespace hcache::engine

#include "attention_kernel_impl.h"

namespace hcache::engine {
namespace {

void Simd::pack_keys(const uint8_t* k, size_t stride, int n_keys, int dim, uint16_t* out) {
  pack_keys_x86(k, stride, n_keys, dim, kTile, out);
}

}  // namespace

const AttentionKernel kAttentionAvx512 = {attend, merge};

}  // namespace hcache::engine
