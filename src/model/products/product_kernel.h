// Private to hcache_products: the arithmetic of a product, one table per instruction set.
//
// The files behind the tables are compiled with their own target flags, so this header (the only
// one of ours that they include) holds plain types and no code: an inline function here could be
// emitted with instructions that the machine lacks and be chosen by the linker for everyone.
//
// What a product is, whatever computes it, of each output and row, in F32, over groups of 32 values
// in order and with their exact integer sums:
//   blocks of 32:   acc = fma(w_scale · x_scale, Σ w·x, acc); acc = fma(w_min, x_sum, acc);
//   blocks of 256:  in = 0; of each group in = fma(w_scale, Σ w·x, in); in = fma(w_min, x_sum, in);
//                   acc = fma(x_scale, in, acc);
// without the minima's terms where there are none, and with two steps a group where its halves have
// scales of their own (Q6_K). The order depends on neither the number of rows nor on their company,
// nor on the instruction set.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace hcache::model {

inline constexpr int kGroup = 32;       // values of a row that share a step
inline constexpr int kChunkGroups = 8;  // groups that are unpacked together
inline constexpr int kPanel = 16;       // outputs that are computed side by side
inline constexpr int kChunk = kGroup * kChunkGroups;

// How the weight's blocks are stored; the names are ggml's.
enum class BlockKind {
  kQ8_0,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ4K,
  kQ5K,
  kQ6K,
  kIq4Nl,
  kIq4Xs,
  kMxfp4
};

// How the rows are stored that it multiplies.
enum class RowKind { kQ8_0, kQ8_1, kQ8K };

// 256 values of a quantised row as the kernels read them. ggml aligns tensors to 32 bytes, and so
// is each chunk.
struct RowChunk {
  int8_t quants[kChunk];
  float scale[kChunkGroups];
  float sum[kChunkGroups];       // of Q8_1: scale · Σ quants, as it has it; of Q8_K: Σ quants
  int32_t offset[kChunkGroups];  // -128 · Σ quants
  int32_t half_offset[kChunkGroups][2];
};

// out[row][first_out .. end_out) = rows · weightᵀ.
struct ProductTask {
  BlockKind kind;
  const uint8_t* weight;
  size_t weight_stride;  // bytes of an output's row
  int64_t n_in;          // a multiple of kGroup, of kChunk for the kinds of 256 values
  const RowChunk* rows;  // [chunks of n_in][n_rows]
  int64_t n_rows;
  float* out;
  size_t out_stride;        // floats
  const int64_t* out_rows;  // [n_rows]: which row of `out` each is; null: row r is row r
  int64_t first_out;        // a multiple of kPanel
  int64_t end_out;
  // Whether memory is asked for weights a panel ahead; changes no result.
  bool reads_ahead;
};

struct ProductKernel {
  // From values of a row of that kind (up to kChunk) to a chunk.
  void (*prepare)(RowKind kind, const uint8_t* values, int64_t n, RowChunk* out);
  // Bytes of scratch that multiply() needs, aligned to 64.
  size_t (*scratch_bytes)(int64_t n_rows);
  void (*multiply)(const ProductTask& task, void* scratch);
};

extern const ProductKernel kProductPortable;
#ifdef HCACHE_PRODUCTS_X86
extern const ProductKernel kProductAvx2;
extern const ProductKernel kProductAvxVnni;
extern const ProductKernel kProductAvx512Vnni;
extern const ProductKernel kProductAmx;
#endif

}  // namespace hcache::model
