#include "int8_peak.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hcache::bench {
namespace {

constexpr int kChains = 12;  // independent of each other, so that no latency is seen

#if defined(__x86_64__)
__attribute__((target("avx512f,avx512vnni"))) void run_512(int loops) {
  __m512i sums[kChains];
  for (__m512i& sum : sums) sum = _mm512_setzero_si512();
  __m512i w = _mm512_set1_epi8(3);
  for (int i = 0; i < loops; ++i) {
    asm volatile("" : "+v"(w));  // the products are not the same to the compiler
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) sums[c] = _mm512_dpbusd_epi32(sums[c], w, w);
  }
  for (__m512i& sum : sums) asm volatile("" ::"v"(sum));
}

__attribute__((target("avx2"))) void run_256(int loops) {
  __m256i sums[kChains];
  for (__m256i& sum : sums) sum = _mm256_setzero_si256();
  __m256i w = _mm256_set1_epi8(3);
  for (int i = 0; i < loops; ++i) {
    asm volatile("" : "+x"(w));
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      const __m256i pairs = _mm256_maddubs_epi16(w, w);
      sums[c] = _mm256_add_epi32(sums[c], _mm256_madd_epi16(pairs, w));
    }
  }
  for (__m256i& sum : sums) asm volatile("" ::"x"(sum));
}

bool has_512() {
  return __builtin_cpu_supports("avx512f") > 0 && __builtin_cpu_supports("avx512vnni") > 0;
}
#endif

}  // namespace

void run_int8_products(int loops) {
#if defined(__x86_64__)
  if (has_512()) return run_512(loops);
  if (__builtin_cpu_supports("avx2") > 0) return run_256(loops);
#endif
  (void)loops;
}

double int8_products_ops(int loops) {
#if defined(__x86_64__)
  const int bytes = has_512() ? 64 : 32;
#else
  const int bytes = 0;
#endif
  return 2.0 * loops * kChains * bytes;
}

}  // namespace hcache::bench
