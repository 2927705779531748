#include "state/sparsity.h"

#include <algorithm>

namespace hcache::state {
namespace {

constexpr int64_t kMeasuredStride = 4;  // of the rows, whose attention takes a second look

}  // namespace

std::vector<double> SparsityProfile::density() const {
  std::vector<double> density(heads.size() / static_cast<size_t>(n_head_kv));
  for (size_t i = 0; i < heads.size(); ++i) {
    density[i / static_cast<size_t>(n_head_kv)] += (1 - heads[i].small) / n_head_kv;
  }
  return density;
}

Result<SparsityProfile> measure_sparsity(engine::Engine& engine, std::span<const int32_t> tokens) {
  tokens = tokens.first(std::min<size_t>(tokens.size(), kSparsityCells));
  HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine.create_sequence());
  engine::AttentionScores scores;
  Status measured = engine.observe({.seq = seq, .stride = kMeasuredStride, .n_keys = 1}, &scores);
  if (measured.ok()) measured = engine.prefill(seq, tokens);
  engine.observe({}, nullptr).ignore("ending it can't fail");
  HCACHE_RETURN_IF_ERROR(engine.release_sequence(seq));
  HCACHE_RETURN_IF_ERROR(measured);
  SparsityProfile profile{.n_head_kv = scores.n_head_kv};
  for (const engine::AttentionTally& tally : scores.tallies) {
    profile.heads.push_back({.small = tally.small / tally.seen,
                             .spread = tally.spread / static_cast<double>(tally.n_rows)});
  }
  return profile;
}

}  // namespace hcache::state
