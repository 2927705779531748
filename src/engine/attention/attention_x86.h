// What the AVX2 and AVX-512 versions share. See attention_kernel_impl.h.
#pragma once

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

namespace hcache::engine {
namespace {

inline __m128i load_128(const uint16_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}

// Eight F16 values, kept or widened.
inline void store_8(uint16_t* p, __m128i x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
inline void store_8(float* p, __m128i x) { _mm256_storeu_ps(p, _mm256_cvtph_ps(x)); }

// Transposes 8 keys by 16 dimensions of F16: out[dim][key], rows of `out_stride`.
template <typename T>
void transpose_8x16(const uint16_t* const rows[8], int dim, T* out, size_t out_stride) {
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
  for (int i = 0; i < 8; ++i) {
    store_8(out + i * out_stride, _mm256_castsi256_si128(b[i]));
    store_8(out + (i + 8) * out_stride, _mm256_extracti128_si256(b[i], 1));
  }
}

// The same for `n` <= 8 dimensions, one by one.
template <typename T>
void transpose_8xn(const uint16_t* const rows[8], int dim, int n, T* out, size_t out_stride) {
  for (int d = dim; d < dim + n; ++d, out += out_stride) {
    alignas(16) uint16_t column[8];
    for (int i = 0; i < 8; ++i) column[i] = rows[i][d];
    store_8(out, load_128(column));
  }
}

// See pack_keys in attention_kernel_impl.h. Cells are read whole and in order, as memory likes it.
template <typename T>
void pack_keys_x86(const uint8_t* k, size_t stride, int n_keys, int dim, T* out) {
  for (int key = 0; key < n_keys; key += 8, out += 8) {
    const uint16_t* rows[8];
    for (int i = 0; i < 8; ++i) {
      const int row = key + i < n_keys ? key + i : n_keys - 1;
      rows[i] = reinterpret_cast<const uint16_t*>(k + static_cast<size_t>(row) * stride);
    }
    int d = 0;
    for (; d + 16 <= dim; d += 16) {
      transpose_8x16(rows, d, out + static_cast<size_t>(d) * kTile, kTile);
    }
    if (d < dim) transpose_8xn(rows, d, dim - d, out + static_cast<size_t>(d) * kTile, kTile);
  }
}

}  // namespace
}  // namespace hcache::engine
