// Causal attention on the CPU over an F16 KV arena: softmax(Q Kᵀ · scale) V with grouped heads.
//
// One kernel serves prefill and decode. It is entered by every thread of a pool at once (ggml's
// custom op is such a place), needs no barrier inside, and allocates nothing while it runs.
//
// Contract of the arithmetic (batch invariance). The bits of one output row are a function of its
// query row, the keys and values that it attends, their number, the scale, and the instruction set.
// They do not depend on the other rows of the segment or of the batch, on how a prompt was cut into
// steps, on whether the row was prefilled or decoded, on the extent's place in the arena, on the
// number of threads, or on who computed what. To that end, for each query head:
//   - keys count from the start of the sequence's extent; they form partitions of
//     kAttentionPartition keys, and those form tiles of kAttentionTile keys;
//   - a score is a chain of fused multiply-adds over the head's dimensions, in order;
//   - a partition keeps its own (maximum, sum, accumulator), updated tile by tile with the online
//     softmax; the tile's weights are summed as a fixed binary tree; the accumulator is a chain of
//     fused multiply-adds over the keys, in order;
//   - partitions are merged in order, a head's sink behind the last. A key that a row does not
//   attend changes none of its bits,
//     whatever the cell holds (NaN and infinity included).
// AVX2 and AVX-512 follow the same order and agree to the bit. The portable version rounds each
// product (no fused multiply-add) and agrees only within rounding.
//
// Arithmetic is F32 throughout; K and V are widened from F16 exactly. Against exact arithmetic on
// the same F16 inputs the error of an output is a few 1e-6 of the largest |v|.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace hcache::engine {

// Keys per tile and per partition: part of the contract above, so changing one changes bits.
inline constexpr int kAttentionTile = 64;
inline constexpr int kAttentionPartition = 512;

enum class AttentionIsa { kBest, kPortable, kAvx2, kAvx512 };

// Whether this build and this machine can run `isa`. kBest and kPortable always can.
[[nodiscard]] bool attention_isa_available(AttentionIsa isa);

// What kBest stands for on this machine.
[[nodiscard]] AttentionIsa attention_best_isa();

// "best", "portable", "avx2" or "avx512".
[[nodiscard]] const char* attention_isa_name(AttentionIsa isa);

// The geometry of one attention layer. Query head h reads KV head h / (n_head / n_head_kv).
struct AttentionShape {
  int32_t n_head = 0;
  int32_t n_head_kv = 0;   // divides n_head
  int32_t head_dim_k = 0;  // of q and k
  int32_t head_dim_v = 0;  // of v and of the output
  float scale = 1.0F;      // multiplies q·k, usually 1/sqrt(head_dim_k)
  float soft_cap = 0;      // scores become cap·tanh(score / cap); 0: they stay
  int64_t window = 0;      // of the cells below, a row attends the last so many; 0: all
};

// Any head counts that divide, head dimensions 1..1024 (multiples of 16 are the fast ones), and a
// finite scale. There is no bias.
[[nodiscard]] bool attention_supports(const AttentionShape& shape);

// The rows of one sequence in this step: prefill (many) or decode (one).
// Row first_row + r attends the n_past + r + 1 cells from first_cell on, the last being its own, or
// the last of them where the shape has a window.
struct AttentionSegment {
  int32_t first_row = 0;   // in q and out
  int32_t n_rows = 0;      // >= 0
  int64_t first_cell = 0;  // start of the sequence's extent in the arena
  int64_t n_past = 0;      // cells of the extent that precede this step's rows, >= 0
};

// Where the data lies. Heads of one row or cell are contiguous: [head][dim].
struct AttentionTensors {
  const float* q = nullptr;  // [row][n_head][head_dim_k]
  size_t q_stride = 0;       // bytes between rows, a multiple of 4
  const void* k = nullptr;   // IEEE F16, [cell][n_head_kv][head_dim_k]
  size_t k_stride = 0;       // bytes between cells, a multiple of 2
  const void* v = nullptr;   // IEEE F16, [cell][n_head_kv][head_dim_v]
  size_t v_stride = 0;       // bytes between cells, a multiple of 2
  float* out = nullptr;      // [row][n_head][head_dim_v]
  size_t out_stride = 0;     // bytes between rows, a multiple of 4
  // [n_head]: a score for each head that takes its part of the softmax and has no value; null:
  // none.
  const float* sinks = nullptr;
};

// What the attention of some rows falls on, of one KV head: a row's weights sum to one over all
// keys that it attends, and each query head that shares the KV head has rows of its own.
struct AttentionTally {
  int64_t n_keys = 0;
  std::vector<float> sum;  // per key, padded to whole tiles: of all rows' weights
  std::vector<float> top;  // likewise: the largest
  int64_t n_rows = 0;      // query heads times rows
  double seen = 0;         // weights
  double small = 0;        // of those, below a hundredth of their row's largest (CaR Fig. 4)
  // Summed over rows: 1 / Σw² over the number of keys; 1 where all keys get the same.
  double spread = 0;

  // Forgets all, and tells of the first n_keys keys from here on.
  void reset(int64_t n_keys);
};

// Rows first_row, first_row + stride, ... of a segment of the batch, end_row excluded.
struct AttentionObservation {
  AttentionTally* tallies = nullptr;  // [n_head_kv]; null: nothing is observed
  int32_t segment = 0;
  int32_t first_row = 0;
  int32_t end_row = 0;
  int32_t stride = 1;
  [[nodiscard]] bool any() const { return tallies != nullptr && first_row < end_row; }
};

// How the work of one step is cut into items, and the scratch memory for it. The engine makes one
// per shape, calls set_batch before a step's graph is computed, and run from each layer's op.
//
// Threading: set_batch is called by one thread while no run is in progress. run is entered by
// threads 0..nth-1 together, each once per op, with the same arguments but ith; the caller has a
// barrier between one op and the next (ggml has), none is needed inside.
class AttentionPlan {
 public:
  // Requires attention_supports(shape), max_threads >= 1 and attention_isa_available(isa).
  AttentionPlan(const AttentionShape& shape, int max_threads,
                AttentionIsa isa = AttentionIsa::kBest);
  ~AttentionPlan();
  AttentionPlan(const AttentionPlan&) = delete;
  AttentionPlan& operator=(const AttentionPlan&) = delete;

  // Plans one step. Memory only grows, so steps of a size seen before allocate nothing.
  // Segments' rows must not overlap; rows in no segment are left as they are in out.
  void set_batch(std::span<const AttentionSegment> segments);

  // Takes part in computing one layer: returns when no work is left to take, which may be before
  // the other threads are done. Requires 0 <= ith < nth <= max_threads. Reads only attended cells.
  // The weights of observed rows are computed apart and added to the tallies; no bit of the output
  // depends on that. Without a window or a soft cap alone.
  void run(const AttentionTensors& tensors, int ith, int nth,
           const AttentionObservation& observed = {});

  // Bytes held at present, for the engine's memory report.
  [[nodiscard]] size_t scratch_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::engine
