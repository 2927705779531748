// Private to the projection: plain types only, since its kernel is compiled with target flags of
// its own (see attention_kernel.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace hcache::engine {

// How a block of 32 quants is stored.
enum class BlockKind {
  kQ8_0,  // half d, 32 int8
  kQ4_0,  // half d, 32 nibbles minus 8; low nibbles first
  kQ4_1,  // half d, half m, 32 nibbles
};

// out[row][first_out .. end_out) = rows · weightᵀ.
struct ProjectionTask {
  BlockKind kind;         // of the weight; rows are Q8_1 (half d, half s, 32 int8) with kQ4_1,
  const uint8_t* weight;  // else Q8_0
  size_t weight_stride;   // bytes of a row
  const uint8_t* rows;
  size_t row_stride;
  int64_t n_rows;
  int64_t n_blocks;  // of a row
  float* out;
  size_t out_stride;  // floats
  int64_t first_out;
  int64_t end_out;
};

// Outputs are computed in panels of so many.
inline constexpr int kPanel = 8;

// Bytes of scratch that a task needs, to be aligned to 64.
size_t projection_scratch_avx512vnni(int64_t n_rows, int64_t n_blocks);
void project_avx512vnni(const ProjectionTask& task, uint8_t* scratch);

}  // namespace hcache::engine
