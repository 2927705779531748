// Algorithm 1 and Eq. 11: how many blocks of each kind the host and each request hold.
#include "policy/hybrid_cache.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace hcache::policy {

namespace {

Status check(const HybridCosts& costs, const HostMemory& memory) {
  const BlockSizes& s = memory.sizes;
  if (s.block_tokens < 1 || s.kv_bytes < 1 || s.act_bytes < 0) {
    return invalid_argument(
        fmt::format("host blocks: {} tokens, {} bytes of KV and {} of activations a block; the "
                    "first two must be positive, the last not negative",
                    s.block_tokens, s.kv_bytes, s.act_bytes));
  }
  if (memory.bytes < 0 || memory.act_on_device < 0) {
    return invalid_argument(
        fmt::format("host blocks: {} bytes for blocks, {} ACT blocks on the device; neither can be "
                    "negative (do the weights fit?)",
                    memory.bytes, memory.act_on_device));
  }
  if (!(costs.load_weights_s >= 0)) {
    return invalid_argument("host blocks: the time of loading weights can't be negative");
  }
  return {};
}

// Whole blocks in `blocks`, which may be infinite; what is a whole number but for rounding stays
// one.
int64_t whole_blocks(double blocks, int64_t most) {
  if (!(blocks > 0)) return 0;
  blocks += 1e-9 * blocks;
  return blocks >= static_cast<double>(most) ? most : static_cast<int64_t>(blocks);
}

}  // namespace

Result<HostBlocks> allocate_host_blocks(const HybridCosts& costs, const HostMemory& memory) {
  HCACHE_RETURN_IF_ERROR(check(costs, memory));
  const BlockSizes& sizes = memory.sizes;
  HostBlocks blocks;
  if (!sizes.act_pays()) {
    blocks.remaining.kv = memory.bytes / sizes.kv_bytes;
    return blocks;
  }
  const auto block_tokens = static_cast<double>(sizes.block_tokens);
  // Compute that one more ACT block adds over the link time that it adds itself.
  const double act_gain_s = (costs.kv_gen.slope - costs.load_act.slope) * block_tokens;
  if (act_gain_s <= 0) {
    blocks.remaining.act = memory.bytes / sizes.act_bytes;
    return blocks;
  }
  // Link time less compute before any block of the host; every kind of work begins once a layer.
  const double device_tokens = static_cast<double>(memory.act_on_device) * block_tokens;
  const double budget_s = costs.load_weights_s + costs.load_kv.intercept +
                          costs.load_act.intercept - costs.kv_gen.intercept -
                          costs.kv_gen.slope * device_tokens - memory.other_compute_s;
  if (budget_s >= 0) {
    blocks.initial.act = whole_blocks(budget_s / act_gain_s, memory.bytes / sizes.act_bytes);
  } else {
    blocks.initial.kv = whole_blocks(-budget_s / (costs.load_kv.slope * block_tokens),
                                     memory.bytes / sizes.kv_bytes);
  }
  int64_t left =
      memory.bytes - blocks.initial.act * sizes.act_bytes - blocks.initial.kv * sizes.kv_bytes;
  // S_act a + S_kv k = left and act_gain a = T_load_kv's slope k, rounded down.
  const double kv_per_act = act_gain_s / (costs.load_kv.slope * block_tokens);
  const double pair_bytes =
      static_cast<double>(sizes.act_bytes) + kv_per_act * static_cast<double>(sizes.kv_bytes);
  blocks.remaining.act =
      whole_blocks(static_cast<double>(left) / pair_bytes, left / sizes.act_bytes);
  left -= blocks.remaining.act * sizes.act_bytes;
  blocks.remaining.kv = left / sizes.kv_bytes;
  left -= blocks.remaining.kv * sizes.kv_bytes;
  blocks.remaining.act += left / sizes.act_bytes;
  return blocks;
}

BlockKind next_block(const BlockCounts& request, const BlockCounts& ratio) {
  // ACT where (act + 1/2) <= (n + 1) times the share, in whole numbers.
  const int64_t all = ratio.total();
  if (all <= 0) return BlockKind::kKv;
  return (2 * request.act + 1) * all <= 2 * (request.total() + 1) * ratio.act ? BlockKind::kAct
                                                                              : BlockKind::kKv;
}

BlockCounts first_blocks(int64_t n, const BlockCounts& ratio) {
  const int64_t all = ratio.total();
  if (all <= 0) return {.kv = n};
  const int64_t act = (2 * n * ratio.act + all) / (2 * all);
  return {.act = act, .kv = n - act};
}

RequestContext split_context(int64_t tokens, int64_t block_tokens, const BlockCounts& ratio) {
  const int64_t full = tokens / block_tokens;
  const int64_t partial = tokens % block_tokens;
  const BlockCounts blocks = first_blocks(full, ratio);
  RequestContext context{.kv_tokens = blocks.kv * block_tokens,
                         .act_tokens = blocks.act * block_tokens,
                         .new_rows = next_block(blocks, ratio)};
  (context.new_rows == BlockKind::kAct ? context.act_tokens : context.kv_tokens) += partial;
  return context;
}

}  // namespace hcache::policy
