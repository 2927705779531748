// Numbers that depend on a seed and a place alone, so that any part of a tensor can be made on its
// own.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <string>

#include "base/status.h"
#include "gguf_writer.h"

namespace hcache::model {

// Uniform values in mean +- width.
struct Init {
  float mean;
  float width;
};

inline Init standard_deviation(float sigma) { return {0.0F, std::sqrt(3.0F) * sigma}; }

// SplitMix64: a hash of a counter, so that any element can be made on its own.
inline uint64_t mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

inline void fill_uniform(uint64_t stream, int64_t row, int64_t n, Init init, float* out) {
  const uint64_t base = mix(stream ^ static_cast<uint64_t>(row));
  constexpr float kUnit = 1.0F / 16777216.0F;  // 24 bits
  for (int64_t i = 0; i < n; i++) {
    const uint64_t bits = mix(base + static_cast<uint64_t>(i));
    const float u = static_cast<float>(bits >> 40) * kUnit;  // [0, 1)
    out[i] = init.mean + init.width * (2.0F * u - 1.0F);
  }
}

// Writes a file whose tensors are F32 and have values of `inits`, one for each. They depend on the
// seed and the tensor's name.
Status write_random(const GgufWriter& writer, std::span<const Init> inits, uint64_t seed,
                    const std::string& out);

}  // namespace hcache::model
