// Eight outputs (four vectors, each with two outputs' eight partial sums) times four rows are
// accumulated in registers over all blocks of a row. Per block and pair of outputs that is one
// integer product, a conversion, the product of the scales, and one fused multiply-add.
#include <immintrin.h>
#include <string.h>

#include "projection_kernel.h"

namespace hcache::engine {
namespace {

constexpr int kQuants = 32;         // of a block
constexpr int kPairs = kPanel / 2;  // vectors of a panel
constexpr int kRowTile = 4;

// A panel of the weight, taken apart: per block the quants as unsigned bytes and the scales, laid
// out as the inner loop wants them.
struct PanelBlock {
  uint8_t quants[kPairs][2][kQuants];
  float scale[kPairs][16];  // eight times the first output's, eight times the second's
};

float half_to_float(const uint8_t* p) {
  uint16_t bits;
  memcpy(&bits, p, sizeof bits);
  return _cvtsh_ss(bits);
}

template <BlockKind kKind>
constexpr size_t weight_block_bytes() {
  return kKind == BlockKind::kQ8_0 ? 34 : kKind == BlockKind::kQ4_0 ? 18 : 20;
}
template <BlockKind kKind>
constexpr size_t row_block_bytes() {
  return kKind == BlockKind::kQ4_1 ? 36 : 34;
}
// What was added to the weight's quants to make them unsigned.
template <BlockKind kKind>
constexpr int offset() {
  return kKind == BlockKind::kQ8_0 ? 128 : kKind == BlockKind::kQ4_0 ? 8 : 0;
}

template <BlockKind kKind>
__m256i unsigned_quants(const uint8_t* block) {
  if constexpr (kKind == BlockKind::kQ8_0) {
    const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block + 2));
    return _mm256_xor_si256(q, _mm256_set1_epi8(static_cast<char>(0x80)));
  } else {
    const uint8_t* nibbles = block + (kKind == BlockKind::kQ4_0 ? 2 : 4);
    const __m128i both = _mm_loadu_si128(reinterpret_cast<const __m128i*>(nibbles));
    const __m128i high = _mm_srli_epi16(both, 4);
    return _mm256_and_si256(_mm256_set_m128i(high, both), _mm256_set1_epi8(0x0F));
  }
}

// Outputs behind `end_out` are zero. `minima` ([block][kPanel]) holds the m of kQ4_1.
template <BlockKind kKind>
void pack_panel(const ProjectionTask& task, int64_t first_out, PanelBlock* panel, float* minima) {
  for (int i = 0; i < kPanel; ++i) {
    const bool real = first_out + i < task.end_out;
    const uint8_t* block = task.weight + (first_out + i) * task.weight_stride;
    for (int64_t b = 0; b < task.n_blocks; ++b, block += weight_block_bytes<kKind>()) {
      PanelBlock& to = panel[b];
      const __m256i quants = real ? unsigned_quants<kKind>(block) : _mm256_setzero_si256();
      _mm256_store_si256(reinterpret_cast<__m256i*>(to.quants[i / 2][i % 2]), quants);
      _mm256_store_ps(to.scale[i / 2] + 8 * (i % 2),
                      _mm256_set1_ps(real ? half_to_float(block) : 0.0F));
      if constexpr (kKind == BlockKind::kQ4_1) {
        minima[b * kPanel + i] = real ? half_to_float(block + 2) : 0.0F;
      }
    }
  }
}

// ggml's order: the halves, then the halves of that, then the last two.
float horizontal_sum(__m256 v) {
  __m128 sum = _mm_add_ps(_mm256_extractf128_ps(v, 1), _mm256_castps256_ps128(v));
  sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
  sum = _mm_add_ss(sum, _mm_movehdup_ps(sum));
  return _mm_cvtss_f32(sum);
}

// kRows rows from `row` on, times the panel. `scales` and `sums` are [row][block]: d, and the s of
// Q8_1.
template <BlockKind kKind, int kRows>
void multiply(const ProjectionTask& task, const PanelBlock* panel, const float* minima,
              int64_t first_out, int64_t row, const float* scales, const float* sums) {
  __m512 acc[kRows][kPairs];
  __m256 summs[kRows];
  const uint8_t* quants[kRows];
  for (int r = 0; r < kRows; ++r) {
    quants[r] = task.rows + (row + r) * task.row_stride + (row_block_bytes<kKind>() - kQuants);
    summs[r] = _mm256_setzero_ps();
    for (int p = 0; p < kPairs; ++p) acc[r][p] = _mm512_setzero_ps();
  }
  const __m512i offsets = _mm512_set1_epi8(static_cast<char>(offset<kKind>()));
  for (int64_t b = 0; b < task.n_blocks; ++b) {
    const PanelBlock& block = panel[b];
    __m512i w[kPairs];
    __m512 dw[kPairs];
    for (int p = 0; p < kPairs; ++p) {
      w[p] = _mm512_load_si512(block.quants[p]);
      dw[p] = _mm512_load_ps(block.scale[p]);
    }
    for (int r = 0; r < kRows; ++r) {
      const __m256i half = _mm256_loadu_si256(
          reinterpret_cast<const __m256i*>(quants[r] + b * row_block_bytes<kKind>()));
      const __m512i x = _mm512_broadcast_i64x4(half);
      // Σ (w + offset)·x - offset·Σ x, exactly.
      __m512i start = _mm512_setzero_si512();
      if constexpr (offset<kKind>() != 0) {
        start = _mm512_sub_epi32(start, _mm512_dpbusd_epi32(start, offsets, x));
      }
      const __m512 dx = _mm512_set1_ps(scales[(row + r) * task.n_blocks + b]);
      for (int p = 0; p < kPairs; ++p) {
        const __m512 dot = _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(start, w[p], x));
        acc[r][p] = _mm512_fmadd_ps(_mm512_mul_ps(dw[p], dx), dot, acc[r][p]);
      }
      if constexpr (kKind == BlockKind::kQ4_1) {
        const __m256 s = _mm256_set1_ps(sums[(row + r) * task.n_blocks + b]);
        summs[r] = _mm256_fmadd_ps(_mm256_load_ps(minima + b * kPanel), s, summs[r]);
      }
    }
  }
  const int64_t n_out = task.end_out - first_out < kPanel ? task.end_out - first_out : kPanel;
  for (int r = 0; r < kRows; ++r) {
    alignas(32) float result[kPanel];
    for (int p = 0; p < kPairs; ++p) {
      result[2 * p] = horizontal_sum(_mm512_castps512_ps256(acc[r][p]));
      result[2 * p + 1] = horizontal_sum(_mm512_extractf32x8_ps(acc[r][p], 1));
    }
    if constexpr (kKind == BlockKind::kQ4_1) {
      _mm256_store_ps(result, _mm256_add_ps(_mm256_load_ps(result), summs[r]));
    }
    memcpy(task.out + (row + r) * task.out_stride + first_out, result,
           static_cast<size_t>(n_out) * sizeof(float));
  }
}

size_t panel_bytes(int64_t n_blocks) {
  return static_cast<size_t>(n_blocks) * (sizeof(PanelBlock) + kPanel * sizeof(float));
}

template <BlockKind kKind>
void project(const ProjectionTask& task, uint8_t* scratch) {
  auto* panel = reinterpret_cast<PanelBlock*>(scratch);
  auto* minima = reinterpret_cast<float*>(scratch + task.n_blocks * sizeof(PanelBlock));
  auto* scales = reinterpret_cast<float*>(scratch + panel_bytes(task.n_blocks));
  float* sums = scales + task.n_rows * task.n_blocks;
  for (int64_t r = 0; r < task.n_rows; ++r) {
    const uint8_t* block = task.rows + r * task.row_stride;
    for (int64_t b = 0; b < task.n_blocks; ++b, block += row_block_bytes<kKind>()) {
      scales[r * task.n_blocks + b] = half_to_float(block);
      if constexpr (kKind == BlockKind::kQ4_1) {
        sums[r * task.n_blocks + b] = half_to_float(block + 2);
      }
    }
  }
  for (int64_t out = task.first_out; out < task.end_out; out += kPanel) {
    pack_panel<kKind>(task, out, panel, minima);
    int64_t row = 0;
    for (; row + kRowTile <= task.n_rows; row += kRowTile) {
      multiply<kKind, kRowTile>(task, panel, minima, out, row, scales, sums);
    }
    for (; row < task.n_rows; ++row) {
      multiply<kKind, 1>(task, panel, minima, out, row, scales, sums);
    }
  }
}

}  // namespace

size_t projection_scratch_avx512vnni(int64_t n_rows, int64_t n_blocks) {
  return panel_bytes(n_blocks) + static_cast<size_t>(n_rows * n_blocks) * 2 * sizeof(float);
}

void project_avx512vnni(const ProjectionTask& task, uint8_t* scratch) {
  switch (task.kind) {
    case BlockKind::kQ8_0: return project<BlockKind::kQ8_0>(task, scratch);
    case BlockKind::kQ4_0: return project<BlockKind::kQ4_0>(task, scratch);
    case BlockKind::kQ4_1: return project<BlockKind::kQ4_1>(task, scratch);
  }
}

}  // namespace hcache::engine
