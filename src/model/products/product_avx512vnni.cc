#include "product_avx512.h"

namespace hcache::model {
namespace {

struct Avx512Vnni : Avx512 {
  // Twelve chains of integer products hide their latency; they and their accumulators take 24 of
  // 32 registers.
  static constexpr int kRows = 12;

  static I start(const int32_t* offset) { return offset == nullptr ? zero() : dwords(*offset); }
  template <bool kOffset>
  static I weights(const uint8_t (*p)[4]) {
    return _mm512_load_si512(p);
  }
  template <bool kOffset>
  static I dot(I sum, I w, const int8_t* x) {
    int four;
    memcpy(&four, x, sizeof four);
    return _mm512_dpbusd_epi32(sum, w, _mm512_set1_epi32(four));
  }
};

}  // namespace

const ProductKernel kProductAvx512Vnni = {.prepare = prepare<Avx512Vnni>,
                                          .scratch_bytes = scratch_bytes,
                                          .multiply = multiply<Avx512Vnni>};

}  // namespace hcache::model
