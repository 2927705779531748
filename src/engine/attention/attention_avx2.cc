// The kernel for AVX2 with FMA and F16C.
#include <immintrin.h>
#include <stdint.h>

#include "attention_kernel.h"
#include "attention_x86.h"

namespace hcache::engine {
namespace {

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
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static float hmax(F x) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }
  static float hsum(F x) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
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

const AttentionKernel kAttentionAvx2 = {attend, merge};

}  // namespace hcache::engine
