#include "product_x86_256.h"

namespace hcache::model {
namespace {

// Products of unsigned and signed bytes are added in pairs of 16 bits, which would overflow with
// weights above 127: those are taken as signed, their signs moved to the rows' values.
struct Avx2 : Halves256 {
  static constexpr int kRows = 2;

  struct Weights {
    I magnitude;
    I sign;
  };

  static I start(const int32_t* /*offset*/) { return zero(); }
  template <bool kOffset>
  static auto weights(const uint8_t (*p)[4]) {
    const I w = {load_256(*p), load_256(*(p + 8))};
    if constexpr (kOffset) {
      const I sign = xor_(w, bytes(0x80));
      return Weights{{_mm256_abs_epi8(sign.a), _mm256_abs_epi8(sign.b)}, sign};
    } else {
      return w;
    }
  }
  static __m256i add_pairs(__m256i sum, __m256i w, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(w, x);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  template <bool kOffset, typename W>
  static I dot(I sum, const W& w, const int8_t* x) {
    int four;
    memcpy(&four, x, sizeof four);
    const __m256i rows = _mm256_set1_epi32(four);
    if constexpr (kOffset) {
      return {add_pairs(sum.a, w.magnitude.a, _mm256_sign_epi8(rows, w.sign.a)),
              add_pairs(sum.b, w.magnitude.b, _mm256_sign_epi8(rows, w.sign.b))};
    } else {
      return {add_pairs(sum.a, w.a, rows), add_pairs(sum.b, w.b, rows)};
    }
  }
};

}  // namespace

const ProductKernel kProductAvx2 = {
    .prepare = prepare<Avx2>, .scratch_bytes = scratch_bytes, .multiply = multiply<Avx2>};

}  // namespace hcache::model
