// The kernel in plain C++ over the compiler's four-lane vectors (SSE2, NEON, VSX, or scalar code).
#include <stdint.h>
#include <string.h>

#include "attention_kernel.h"

namespace hcache::engine {
namespace {

struct Simd {
  static constexpr int kWidth = 4;
  static constexpr int kRows = 4;
  static constexpr int kCols = 2;
  static constexpr bool kHalfOperand = false;

  using F = float __attribute__((vector_size(16)));
  using I = int32_t __attribute__((vector_size(16)));

  static F zero() { return F{}; }
  static F set1(float x) { return F{x, x, x, x}; }
  static F load(const float* p) {
    F x;
    memcpy(&x, p, sizeof(x));
    return x;
  }
  static void store(float* p, F x) { memcpy(p, &x, sizeof(x)); }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  static F max(F a, F b) { return a > b ? a : b; }
  template <F (*op)(F, F), int N>
  static void reduce(const F (&x)[N], float* out) {
    for (int i = 0; i < N; ++i) {
      const F y = op(x[i], F{x[i][2], x[i][3], x[i][0], x[i][1]});
      out[i] = op(y, F{y[1], y[0], y[3], y[2]})[0];
    }
  }
  static F keep_first(F x, int n) {
    const I lane = {0, 1, 2, 3};
    return lane < n ? x : set1(-__builtin_inff());
  }
  static F pow2_mul(F y, F t, F x) {
    using U = uint32_t __attribute__((vector_size(16)));
    const auto bits = reinterpret_cast<U>(y) + (reinterpret_cast<U>(t) << 23);
    return x < set1(-125.0F) ? zero() : reinterpret_cast<F>(bits);
  }

  static float widen(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000U) << 16;
    uint32_t bits = static_cast<uint32_t>(h & 0x7fffU) << 13;
    if (bits >= (0x7c00U << 13)) {
      bits += (255U - 31U) << 23;  // infinity and NaN
    } else if (bits >= (0x0400U << 13)) {
      bits += (127U - 15U) << 23;
    } else {
      const float value = static_cast<float>(h & 0x03ffU) * 0x1p-24F;
      memcpy(&bits, &value, sizeof(bits));
    }
    bits |= sign;
    float wide;
    memcpy(&wide, &bits, sizeof(wide));
    return wide;
  }
  static F load_half(const uint16_t* p) {
    return F{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])};
  }
  static F load_half_n(const uint16_t* p, int n) {
    F x = zero();
    for (int i = 0; i < n; ++i) x[i] = widen(p[i]);
    return x;
  }
  static void convert(uint16_t h, uint16_t* out) { *out = h; }
  static void convert(uint16_t h, float* out) { *out = widen(h); }
  template <typename T>
  static void pack_keys(const uint8_t* k, size_t stride, int n_keys, int dim, T* out) {
    for (int key = 0; key < n_keys; ++key) {
      const auto* row = reinterpret_cast<const uint16_t*>(k + key * stride);
      for (int d = 0; d < dim; ++d) convert(row[d], out + d * kTile + key);
    }
  }
};

}  // namespace
}  // namespace hcache::engine

#include "attention_kernel_impl.h"

namespace hcache::engine {

const AttentionKernel kAttentionPortable = {attend, merge, observe};

}  // namespace hcache::engine
