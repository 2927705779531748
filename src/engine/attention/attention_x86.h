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

// out[dim][key] for key < n_keys, from kGroup keys at a time: transpose(rows, dim, out) does 16
// dimensions. Cells are read whole and in order, as memory likes it; columns from n_keys up to the
// next multiple of kGroup repeat the last key.
template <int kGroup, typename T, typename Transpose>
void pack_key_groups(const uint8_t* k, size_t stride, int n_keys, int dim, T* out,
                     Transpose transpose) {
  for (int key = 0; key < n_keys; key += kGroup, out += kGroup) {
    const uint16_t* rows[kGroup];
    for (int i = 0; i < kGroup; ++i) {
      const int row = key + i < n_keys ? key + i : n_keys - 1;
      rows[i] = reinterpret_cast<const uint16_t*>(k + static_cast<size_t>(row) * stride);
    }
    int d = 0;
    for (; d + 16 <= dim; d += 16) transpose(rows, d, out + static_cast<size_t>(d) * kTile);
    for (; d < dim; ++d) {
      alignas(32) uint16_t column[kGroup];
      for (int i = 0; i < kGroup; ++i) column[i] = rows[i][d];
      for (int i = 0; i < kGroup; i += 8) {
        store_8(out + static_cast<size_t>(d) * kTile + i, load_128(column + i));
      }
    }
  }
}

}  // namespace
}  // namespace hcache::engine
