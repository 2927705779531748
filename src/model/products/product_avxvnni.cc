#include "product_x86_256.h"

namespace hcache::model {
namespace {

struct AvxVnni : Halves256 {
  // Two chains a row. Their accumulators don't fit into 16 registers beside them, but are of use
  // once a group only.
  static constexpr int kRows = 4;

  template <BlockKind kKind>
  static I start(const int32_t& offset) {
    return layout_of(kKind).offset ? dwords(offset) : zero();
  }
  template <BlockKind kKind>
  static I weights(const uint8_t (*p)[4]) {
    return {load_256(*p), load_256(*(p + 8))};
  }
  template <BlockKind kKind>
  static I dot(I sum, I w, const int8_t* x) {
    int four;
    memcpy(&four, x, sizeof four);
    const __m256i rows = _mm256_set1_epi32(four);
    return {_mm256_dpbusd_avx_epi32(sum.a, w.a, rows), _mm256_dpbusd_avx_epi32(sum.b, w.b, rows)};
  }
};

}  // namespace

const ProductKernel kProductAvxVnni = {.prepare = prepare<AvxVnni>,
                                       .scratch_bytes = scratch_bytes<AvxVnni>,
                                       .multiply = multiply<AvxVnni>};

}  // namespace hcache::model
