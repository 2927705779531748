// Batches whose weights and context lie in host memory: which context blocks hold K and V (KV
// blocks), which the activations that K and V are generated from (ACT blocks), and which requests
// share a mini-batch (HybridServe §4.3). docs/planner.md, "Hybrid cache".
//
// Pure functions. Units: seconds, bytes, tokens; a block holds block_tokens tokens of one request
// in all layers. Threading: plain values.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "policy/linear_fit.h"

namespace hcache::policy {

// What one layer takes. Fits are over tokens if nothing else is said.
struct HybridCosts {
  int32_t n_layer = 1;
  double load_weights_s = 0;  // T_load_w: one layer's weights over the link
  LinearFit kv_gen;           // T_kv_gen: K and V from activation rows, compute
  LinearFit load_kv;          // T_load_kv: K and V over the link
  LinearFit load_act;         // T_load_act: activation rows; the paper leaves it out
  LinearFit store_kv;         // new rows, back over the link
  LinearFit store_act;
  LinearFit forward;        // rows through the layer's products; over rows that go together
  int64_t pass_rows = 0;    // most that do, of all mini-batches; 0: each mini-batch by itself
  LinearFit attend;         // decode attention, over the keys that all rows together read
  LinearFit attend_prompt;  // a whole context computed at once, over pairs of row and key
  double step_s = 0;        // compute, once a step: embedding, output head, sampling
};

enum class BlockKind : uint8_t { kKv, kAct };
struct BlockCounts {
  int64_t act = 0;
  int64_t kv = 0;
  [[nodiscard]] int64_t total() const { return act + kv; }
  [[nodiscard]] double act_share() const {
    return total() > 0 ? static_cast<double>(act) / static_cast<double>(total()) : 0;
  }
  friend bool operator==(const BlockCounts&, const BlockCounts&) = default;
};

// Sizes of a block in all layers.
struct BlockSizes {
  int64_t block_tokens = 64;
  int64_t kv_bytes = 0;
  int64_t act_bytes = 0;
  // An ACT block that is no smaller than a KV block only costs compute: grouped-query models from
  // four query heads a KV head on (F16, values of a head times heads equal to the width).
  [[nodiscard]] bool act_pays() const { return act_bytes > 0 && act_bytes < kv_bytes; }
};

// ---- Algorithm 1: blocks of the host's memory (§4.3.1) ----

struct HostMemory {
  BlockSizes sizes;
  int64_t bytes = 0;           // M_host - S_weight: for blocks
  int64_t act_on_device = 0;   // #ACT_GPU: blocks whose rows need no loading
  double other_compute_s = 0;  // of one layer beside KV generation; 0: the paper's
};

struct HostBlocks {
  BlockCounts initial;    // step 1: evens out weights against the device's ACT blocks
  BlockCounts remaining;  // step 2: fills the memory in balance
  [[nodiscard]] BlockCounts total() const {
    return {initial.act + remaining.act, initial.kv + remaining.kv};
  }
};

// The numbers of blocks that fill the memory and even out, in one layer,
//   T_load_w + T_load_kv(KV) + T_load_act(ACT) = T_kv_gen(ACT + ACT on device) + other_compute_s,
// rounded down to whole blocks: never more bytes than there are, and room for less than one ACT
// block left (one KV block where ACT doesn't pay: all blocks are KV then). The fits' intercepts are
// part of step 1, so that step 2 has slopes alone and counts nothing twice. Where activations take
// as long to load as to use, all blocks are ACT. kInvalidArgument: sizes that are not positive,
// negative bytes or blocks.
[[nodiscard]] Result<HostBlocks> allocate_host_blocks(const HybridCosts& costs,
                                                      const HostMemory& memory);

// ---- Eq. 11: a request's blocks (§4.3.2) ----

// What a request's next block becomes, in prefill and in generation: the kind that keeps its share
// closest to `ratio`. From an empty request on it is never further than half a block away; a
// request with another share gets there as fast as new blocks can. An empty ratio is all KV.
[[nodiscard]] BlockKind next_block(const BlockCounts& request, const BlockCounts& ratio);
// The blocks that next_block gives an empty request, n of them.
[[nodiscard]] BlockCounts first_blocks(int64_t n, const BlockCounts& ratio);

// ---- Eq. 12, 13: mini-batches (§4.3.3) ----

// One request's context in one step.
struct RequestContext {
  int64_t kv_tokens = 0;
  int64_t act_tokens = 0;         // all, those on the device included
  int64_t act_device_tokens = 0;  // need no loading
  BlockKind new_rows = BlockKind::kKv;
  int64_t rows = 1;  // new tokens of this step
  [[nodiscard]] int64_t tokens() const { return kv_tokens + act_tokens; }
};
// A context of `tokens` whose blocks are those of first_blocks, the last one filled in part.
[[nodiscard]] RequestContext split_context(int64_t tokens, int64_t block_tokens,
                                           const BlockCounts& ratio);

// What the device's buffers hold of one layer and one mini-batch.
struct MiniBatchLimits {
  int64_t kv_tokens = 0;   // #KV_max
  int64_t act_tokens = 0;  // #ACT_max, of rows that are loaded
  int64_t tokens = 0;      // of context: what attention reads, generated K and V included
};

struct MiniBatch {
  std::vector<int32_t> members{};  // indices of requests
  // Sums over the members.
  int64_t rows = 0;
  int64_t kv_tokens = 0;
  int64_t act_tokens = 0;
  int64_t act_device_tokens = 0;
  int64_t kv_rows = 0;  // new rows that are stored as KV
  int64_t act_rows = 0;
  double squared_tokens = 0;  // of each member's context: pairs, were it computed again
  [[nodiscard]] int64_t tokens() const { return kv_tokens + act_tokens; }
};
[[nodiscard]] MiniBatch mini_batch_of(const std::vector<RequestContext>& requests,
                                      std::vector<int32_t> members);

// Eq. 12, T_kv_gen / (T_load_kv + T_load_act); infinity if nothing is loaded, 1 if there is
// nothing.
[[nodiscard]] double balance(const HybridCosts& costs, const MiniBatch& batch);
// Eq. 13, max(b / target, target / b). The paper's target is 1; that of the whole batch leaves
// every mini-batch the same time for the weights.
[[nodiscard]] double imbalance(double balance, double target);

enum class Packing : uint8_t {
  kArrival,  // in their order, a new mini-batch when the next one doesn't fit
  kBalance,  // the greedy algorithm of §4.3.3
  kEven,     // as many, each with as much to load and to compute as the others
};

// Every request lands in exactly one mini-batch, and none exceeds the limits. kBalance: a
// mini-batch begins with the largest request left and takes the one that brings the imbalance down
// most, while one fits and none raises it; then the smallest mini-batches are dissolved into the
// others where their requests fit, each where it unbalances least. The imbalance is against the
// whole batch's balance. It fills one after the other, so that the last may be small: then the link
// waits for a buffer, or computing for what is loaded into it. kEven, which is not the paper's,
// spreads the requests over as many mini-batches, the largest first, and exchanges members between
// two of them until none is left to be evened; where that does not fit, it is kBalance. At most
// O(n^2) for n requests, a few times with kEven. kInvalidArgument names a request that exceeds the
// limits alone.
[[nodiscard]] Result<std::vector<MiniBatch>> form_mini_batches(
    const HybridCosts& costs, const std::vector<RequestContext>& requests,
    const MiniBatchLimits& limits, Packing packing);

}  // namespace hcache::policy
