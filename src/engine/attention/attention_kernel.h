// Private to hcache_attention: the arithmetic of one block of rows, one table per instruction set.
//
// The files behind the tables are compiled with their own target flags, so this header (the only
// one of ours that they include) holds plain types and no code: an inline function here could be
// emitted with instructions that the machine lacks and be chosen by the linker for everyone.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace hcache::engine {

// The most packed rows in a block; what a block keeps at hand then fits a 1 MiB cache.
inline constexpr int kMaxBlockRows = 192;

// Keys in a tile.
inline constexpr int kTile = 64;

// Accumulator rows are padded with unused columns to this many floats.
inline constexpr int kDimAlign = 16;

// The online softmax of a set of rows: after some keys with base-2 scores s_j and values v_j,
// max = max s_j, sum = Σ 2^(s_j - max), acc = Σ 2^(s_j - max) v_j.
struct AttentionState {
  float* max;  // [row]
  float* sum;  // [row]
  float* acc;  // [row][dim_v_padded], 64-byte aligned
};

// Packed rows of one KV head: the query heads that share it, row by row.
struct AttentionBlock {
  int n_rows;  // 1..kMaxBlockRows
  // [row], counted from the extent's start and non-decreasing: the first attended key and the one
  // behind the last. starts: null where all rows attend from the first key on.
  const int64_t* starts;
  const int64_t* limits;
  const float* q;    // [row][dim_k], multiplied by scale·log2(e)
  const uint8_t* k;  // this head's part of the extent's first cell
  const uint8_t* v;
  float soft_cap;   // of base-2 scores: cap·tanh(score / cap); 0: none
  size_t k_stride;  // bytes
  size_t v_stride;
  int dim_k;
  int dim_v;
  int dim_v_padded;  // dim_v rounded up to kDimAlign
};

// Scratch of one thread, 64-byte aligned. Holds finite values at first.
struct AttentionTiles {
  uint16_t* k_half;  // [dim_k][tile]
  float* k_wide;     // [dim_k][tile]
  float* v_wide;     // [tile][dim_v_padded]
  float* scores;     // [kMaxBlockRows][tile]
  // [kMaxBlockRows + kDimAlign]:
  float* row_max;  // before the tile, then with it
  float* row_sum;
  float* tile_max;
  float* tile_sum;
  float* rescale;
};

// What one KV head's attention falls on, summed over rows; see AttentionTally.
struct AttentionSums {
  float* sum;      // [key], padded to whole tiles
  float* top;      // [key], likewise
  int64_t n_keys;  // of those; a row's later keys count in its weights alone
  double small;
  double seen;
  double spread;
};

struct AttentionKernel {
  // Computes `state` over the keys [first_key, end_key) of one partition. end_key is at most the
  // last row's limit; first_key is a multiple of the tile's size, at or before the first row's
  // start. A row may attend none of them.
  void (*attend)(const AttentionBlock& block, int64_t first_key, int64_t end_key,
                 const AttentionState& state, const AttentionTiles& tiles);
  // Merges `from`, the next partition, into `into`.
  void (*merge)(const AttentionState& into, const AttentionState& from, int n_rows,
                int dim_v_padded);
  // Adds the weights of the block's rows to `sums`. weights: [n_rows][stride], the stride a
  // multiple of kTile that holds the last row's keys; left with the rows' weights.
  void (*observe)(const AttentionBlock& block, float* weights, size_t stride, AttentionSums* sums,
                  const AttentionTiles& tiles);
};

extern const AttentionKernel kAttentionPortable;
#ifdef HCACHE_ATTENTION_X86
extern const AttentionKernel kAttentionAvx2;
extern const AttentionKernel kAttentionAvx512;
#endif

}  // namespace hcache::engine
