#include "product_x86_256.h"

namespace hcache::model {
namespace {

// Products of unsigned and signed bytes are added in pairs of 16 bits. With the largest weights
// these would overflow: they are stored as signed, and their signs moved to the rows' values. Small
// weights are stored as small numbers, of which several pairs fit into 16 bits before they are
// widened.
struct Avx2 : Halves256 {
  static constexpr bool kNarrow = true;
  static constexpr int kRows = 4;

  // Pairs of products, the rows' values up to 128, that fit.
  template <BlockKind kKind>
  static constexpr int pairs() {
    return 32767 / (2 * 128 * layout_of(kKind).largest);
  }

  template <BlockKind kKind>
  static I stored(I x) {
    constexpr Layout kLayout = layout_of(kKind);
    return kLayout.offset && kLayout.zero == 128 ? xor_(x, bytes(0x80)) : x;
  }

  struct Weights {
    I magnitude;
    I sign;  // those, with it
  };

  template <BlockKind kKind>
  static I start(const int32_t& offset) {
    constexpr Layout kLayout = layout_of(kKind);
    if constexpr (!kLayout.offset || kLayout.zero == 128) return zero();
    return dwords(offset >> offset_shift(kLayout));
  }
  static Weights with_signs(I quants) {
    return {{_mm256_abs_epi8(quants.a), _mm256_abs_epi8(quants.b)}, quants};
  }
  static __m256i broadcast_4(const int8_t* x) {
    int four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
  }
  static __m256i widen(__m256i sum, __m256i pairs) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  template <BlockKind kKind>
  static I dot(I sum, const Weights& w, const int8_t* x) {
    const __m256i row = broadcast_4(x);
    const auto pairs = [&](__m256i magnitude, __m256i sign) {
      return _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(row, sign));
    };
    return {widen(sum.a, pairs(w.magnitude.a, w.sign.a)),
            widen(sum.b, pairs(w.magnitude.b, w.sign.b))};
  }

  // quants(k) gives the stored dwords k of the group from first_dword on.
  template <BlockKind kKind, int kRows, int kDwords, typename Quants>
  static void add_dwords(const Quants& quants, int g, int first_dword, const RowChunk* rows,
                         I (&sums)[kRows]) {
    constexpr int kPairs = pairs<kKind>();
    if constexpr (kPairs < 2) {
      for (int k = first_dword; k < first_dword + kDwords; ++k) {
        const Weights w = with_signs(quants(k));
        for (int r = 0; r < kRows; ++r) {
          sums[r] = dot<kKind>(sums[r], w, rows[r].quants + g * kGroup + 4 * k);
        }
      }
    } else {
      static_assert(kDwords % kPairs == 0);
      for (int from = first_dword; from < first_dword + kDwords; from += kPairs) {
        I narrow[kRows];
        for (int k = from; k < from + kPairs; ++k) {
          const I w = quants(k);
          for (int r = 0; r < kRows; ++r) {
            const __m256i row = broadcast_4(rows[r].quants + g * kGroup + 4 * k);
            const I products = {_mm256_maddubs_epi16(w.a, row), _mm256_maddubs_epi16(w.b, row)};
            narrow[r] = k == from ? products
                                  : I{_mm256_add_epi16(narrow[r].a, products.a),
                                      _mm256_add_epi16(narrow[r].b, products.b)};
          }
        }
        for (int r = 0; r < kRows; ++r) {
          sums[r] = {widen(sums[r].a, narrow[r].a), widen(sums[r].b, narrow[r].b)};
        }
      }
    }
  }
  template <typename V, BlockKind kKind, int kRows, int kAcross, int kDwords>
  static void add_products(const WeightChunk* w, int g, int first_dword, const RowChunk* rows,
                           I (*sums)[kRows]) {
    static_assert(kAcross == 1);
    const auto quants = [&](int k) {
      return I{load_256(w->quants[g][k][0]), load_256(w->quants[g][k][8])};
    };
    add_dwords<kKind, kRows, kDwords>(quants, g, first_dword, rows, sums[0]);
  }
  template <typename V, BlockKind kKind, int kRows, int kDwords>
  static void add_unstored(const I* unpacked, int g, int first_dword, const RowChunk* rows,
                           I (&sums)[kRows]) {
    const auto quants = [&](int k) { return stored<kKind>(unpacked[k - first_dword]); };
    add_dwords<kKind, kRows, kDwords>(quants, g, first_dword, rows, sums);
  }
};

}  // namespace

const ProductKernel kProductAvx2 = {
    .prepare = prepare<Avx2>, .scratch_bytes = scratch_bytes<Avx2>, .multiply = multiply<Avx2>};

}  // namespace hcache::model
