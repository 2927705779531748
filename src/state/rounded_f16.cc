#include "rounded_f16.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HCACHE_ROUNDED_X86
#include <immintrin.h>

#include <cstring>

#include "engine/attention.h"
#endif

namespace hcache::state {
namespace {

#ifdef HCACHE_ROUNDED_X86

#define HCACHE_AVX2 __attribute__((target("avx2,fma,f16c")))

constexpr size_t kBlock = 32;  // values
constexpr size_t kScaleBytes = 2;
constexpr size_t kQ8Bytes = kScaleBytes + kBlock;
constexpr size_t kQ4Bytes = kScaleBytes + kBlock / 2;

HCACHE_AVX2 __m256 scale_of(const std::byte* block) {
  uint16_t half = 0;
  std::memcpy(&half, block, sizeof(half));
  return _mm256_set1_ps(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half))));
}

// Sixteen integers of one byte.
HCACHE_AVX2 void put(__m128i integers, __m256 scale, std::byte* halves) {
  for (int i = 0; i < 2; ++i) {
    const __m256 values = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(integers)), scale);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + 16 * i),
                     _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
    integers = _mm_unpackhi_epi64(integers, integers);
  }
}

HCACHE_AVX2 void from_q8_0(const std::byte* blocks, std::span<std::byte> page) {
  for (size_t i = 0; i < page.size(); i += 2 * kBlock, blocks += kQ8Bytes) {
    const __m256 scale = scale_of(blocks);
    const auto* values = reinterpret_cast<const __m128i*>(blocks + kScaleBytes);
    put(_mm_loadu_si128(values), scale, &page[i]);
    put(_mm_loadu_si128(values + 1), scale, &page[i + kBlock]);
  }
}

HCACHE_AVX2 void from_q4_0(const std::byte* blocks, std::span<std::byte> page) {
  const __m128i nibble = _mm_set1_epi8(0x0F);
  const __m128i zero = _mm_set1_epi8(8);
  for (size_t i = 0; i < page.size(); i += 2 * kBlock, blocks += kQ4Bytes) {
    const __m256 scale = scale_of(blocks);
    const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(blocks + kScaleBytes));
    const __m128i low = _mm_and_si128(pairs, nibble);
    const __m128i high = _mm_and_si128(_mm_srli_epi16(pairs, 4), nibble);
    put(_mm_sub_epi8(low, zero), scale, &page[i]);
    put(_mm_sub_epi8(high, zero), scale, &page[i + kBlock]);
  }
}

#endif

}  // namespace

bool rounded_to_f16([[maybe_unused]] ggml_type type,
                    [[maybe_unused]] std::span<const std::byte> blocks,
                    [[maybe_unused]] std::span<std::byte> page) {
#ifdef HCACHE_ROUNDED_X86
  if (!engine::attention_isa_available(engine::AttentionIsa::kAvx2)) return false;
  if (type == GGML_TYPE_Q8_0) from_q8_0(blocks.data(), page);
  if (type == GGML_TYPE_Q4_0) from_q4_0(blocks.data(), page);
  return type == GGML_TYPE_Q8_0 || type == GGML_TYPE_Q4_0;
#else
  return false;
#endif
}

}  // namespace hcache::state
