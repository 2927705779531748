// What the AVX2 and AVX-512 versions share. See attention_kernel_impl.h.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace hcache::engine {
namespace {

// Transposes 8 keys by 16 dimensions of F16: out[dim][key], rows of `out_stride`.
inline void transpose_8x16(const uint8_t* const rows[8], int dim, uint16_t* out,
                           size_t out_stride) {
  __m256i a[8];
  __m256i b[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm256_loadu_si256(
        reinterpret_cast<const __m256i*>(reinterpret_cast<const uint16_t*>(rows[i]) + dim));
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
  for (int i = 0; i < 8; ++i) {
    auto* low = reinterpret_cast<__m128i*>(out + i * out_stride);
    auto* high = reinterpret_cast<__m128i*>(out + (i + 8) * out_stride);
    _mm_storeu_si128(low, _mm256_castsi256_si128(b[i]));
    _mm_storeu_si128(high, _mm256_extracti128_si256(b[i], 1));
  }
}

// The same for 8 dimensions.
inline void transpose_8x8(const uint8_t* const rows[8], int dim, uint16_t* out, size_t out_stride) {
  __m128i a[8];
  __m128i b[8];
  for (int i = 0; i < 8; ++i) {
    a[i] = _mm_loadu_si128(
        reinterpret_cast<const __m128i*>(reinterpret_cast<const uint16_t*>(rows[i]) + dim));
  }
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm_unpacklo_epi16(a[i], a[i + 1]);
    b[i + 1] = _mm_unpackhi_epi16(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm_unpacklo_epi32(b[i], b[i + 2]);
    a[i + 1] = _mm_unpackhi_epi32(b[i], b[i + 2]);
    a[i + 2] = _mm_unpacklo_epi32(b[i + 1], b[i + 3]);
    a[i + 3] = _mm_unpackhi_epi32(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    b[2 * i] = _mm_unpacklo_epi64(a[i], a[i + 4]);
    b[2 * i + 1] = _mm_unpackhi_epi64(a[i], a[i + 4]);
  }
  for (int i = 0; i < 8; ++i) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i * out_stride), b[i]);
  }
}

// out[dim][key] for n_keys keys. Columns from n_keys up to the next multiple of 8 repeat the last.
inline void pack_keys_x86(const uint8_t* k, size_t stride, int n_keys, int dim, int tile,
                          uint16_t* out) {
  const uint8_t* rows[8];
  // Dimensions outside, so that the entries the product reads first are written first.
  for (int d = 0; d < dim; d += 16) {
    for (int key = 0; key < n_keys; key += 8) {
      for (int i = 0; i < 8; ++i) {
        rows[i] = k + static_cast<size_t>(key + i < n_keys ? key + i : n_keys - 1) * stride;
      }
      uint16_t* target = out + static_cast<size_t>(d) * tile + key;
      if (d + 16 <= dim) {
        transpose_8x16(rows, d, target, tile);
        continue;
      }
      int tail = d;
      if (tail + 8 <= dim) {
        transpose_8x8(rows, tail, target, tile);
        target += static_cast<size_t>(8) * tile;
        tail += 8;
      }
      for (; tail < dim; ++tail, target += tile) {
        for (int i = 0; i < 8; ++i) target[i] = reinterpret_cast<const uint16_t*>(rows[i])[tail];
      }
    }
  }
}

}  // namespace
}  // namespace hcache::engine
