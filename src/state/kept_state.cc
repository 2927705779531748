#include "state/kept_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "kept_header.h"
#include "planned_pages.h"
#include "policy/compression.h"

namespace hcache::state {
namespace {

// A sequence without rows is kept as it is up to this share of the rows that its budget leaves out.
constexpr double kMostAbove = 0.5;

// Adds so many bytes and returns where they begin.
std::byte* grow(std::vector<std::byte>& bytes, size_t more) {
  bytes.resize(bytes.size() + more);
  return bytes.data() + (bytes.size() - more);
}

// Budgets that differ by less are the same.
constexpr double kBudgetUnits = 1e4;

template <typename Id>
Id with_budget(const Id& base, double kv_budget) {
  Hasher hasher("hcache.kv-budget.1");
  hasher.add(base);
  hasher.add_u64(static_cast<uint64_t>(std::llround(kv_budget * kBudgetUnits)));
  return hasher.finish<Id>();
}

template <typename T>
void append(std::vector<std::byte>& bytes, const T& value) {
  std::memcpy(grow(bytes, sizeof(value)), &value, sizeof(value));
}

// What attention fell on while the last of these tokens were computed once more, in their place.
Result<policy::RowScores> score_rows(engine::Engine& engine, engine::SeqId seq,
                                     std::span<const int32_t> tokens) {
  const model::HParams& hp = engine.model().hparams();
  const auto n = static_cast<int64_t>(tokens.size());
  const int64_t first = n - policy::kWindow;
  engine::AttentionScores told;
  HCACHE_RETURN_IF_ERROR(engine.observe({.seq = seq, .first_pos = first, .n_keys = n}, &told));
  const engine::BatchItem item{.seq = seq,
                               .tokens = tokens.last(policy::kWindow),
                               .first_pos = first,
                               .output = engine::BatchItem::Output::kLast};
  const Status computed = engine.decode({&item, 1}).status();
  HCACHE_RETURN_IF_ERROR(engine.observe({}, nullptr));
  HCACHE_RETURN_IF_ERROR(computed);
  policy::RowScores scores{.n_layer = hp.n_layer, .n_head_kv = hp.n_head_kv, .n_rows = n};
  for (const engine::AttentionTally& tally : told.tallies) {
    scores.sum.insert(scores.sum.end(), tally.sum.begin(), tally.sum.begin() + n);
  }
  return scores;
}

// With room for so many rows of each layer.
std::vector<std::byte> snapshot_head(const engine::Engine& engine, int64_t n_tokens, int64_t rows) {
  const auto n_layer = static_cast<size_t>(engine.n_layer());
  std::vector<std::byte> bytes;
  bytes.reserve(sizeof(KeptHeader) + n_layer * (sizeof(uint64_t) + 2 * static_cast<size_t>(rows) *
                                                                       engine.kv_row_bytes()));
  append(bytes, KeptHeader{.n_layer = static_cast<uint32_t>(n_layer),
                           .n_tokens = static_cast<uint64_t>(n_tokens),
                           .row_bytes = engine.kv_row_bytes()});
  for (size_t layer = 0; layer < n_layer; ++layer) append(bytes, static_cast<uint64_t>(rows));
  return bytes;
}

}  // namespace

Salt budgeted(const Salt& base, double kv_budget) {
  if (kv_budget >= 1) return base;
  Salt salt = base;
  salt.id = with_budget(base.id, kv_budget);
  salt.kv_budget = std::round(kv_budget * kBudgetUnits) / kBudgetUnits;
  return salt;
}

Fingerprint budgeted(const Fingerprint& base, double kv_budget) {
  return kv_budget < 1 ? with_budget(base, kv_budget) : base;
}

Status check_keeps_rows(engine::Engine& engine) {
  if (engine.stages_overlap()) {
    return unimplemented(
        "steps of several devices are in flight at once, between which no rows "
        "can be chosen");
  }
  if (engine.options().max_batch_rows < policy::kWindow) {
    return invalid_argument(
        fmt::format("steps of {} rows are too short to see which rows count; take --batch {} at "
                    "least",
                    engine.options().max_batch_rows, policy::kWindow));
  }
  HCACHE_ASSIGN_OR_RETURN(const engine::SeqId seq, engine.create_sequence());
  engine::AttentionScores scores;
  Status status = engine.observe({.seq = seq, .n_keys = 1}, &scores);
  if (status.ok()) status = engine.observe({}, nullptr);
  if (status.ok() && !engine.options().separate_layers) {
    status = failed_precondition("the engine's layers all hold the same rows");
  }
  engine.release_sequence(seq).ignore("it was created above");
  return status;
}

Result<std::optional<std::vector<std::byte>>> kept_state(engine::Engine& engine, engine::SeqId seq,
                                                         std::span<const int32_t> tokens,
                                                         double budget) {
  using Snapshot = std::optional<std::vector<std::byte>>;
  const auto n_tokens = static_cast<int64_t>(tokens.size());
  if (n_tokens < kLeastKeptTokens) return Snapshot();
  const size_t row_bytes = engine.kv_row_bytes();
  const int64_t wanted = policy::kept_rows(n_tokens, budget);
  const int64_t held = engine.held_rows(seq, 0) - (engine.length(seq) - n_tokens);
  if (held < n_tokens) {
    const auto most = static_cast<int64_t>(kMostAbove * static_cast<double>(n_tokens - wanted));
    if (held > wanted + most || engine.shortest(seq) > n_tokens) return Snapshot();
    std::vector<std::byte> bytes = snapshot_head(engine, n_tokens, held);
    const size_t half = static_cast<size_t>(held) * row_bytes;
    for (int layer = 0; layer < engine.n_layer(); ++layer) {
      std::byte* k = grow(bytes, 2 * half);
      HCACHE_RETURN_IF_ERROR(
          engine.read_kv(seq, layer, n_tokens - held, static_cast<int>(held), k, k + half));
    }
    return Snapshot(std::move(bytes));
  }
  HCACHE_ASSIGN_OR_RETURN(const policy::RowScores scores, score_rows(engine, seq, tokens));
  std::vector<std::byte> bytes = snapshot_head(engine, n_tokens, wanted);
  const size_t half = static_cast<size_t>(wanted) * row_bytes;
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    const std::vector<int32_t> kept =
        policy::choose_rows(policy::Compression::kSnap, scores, layer, budget, 0);
    std::byte* k = grow(bytes, 2 * half);
    HCACHE_RETURN_IF_ERROR(engine.read_kept(seq, layer, kept, k, k + half));
  }
  return Snapshot(std::move(bytes));
}

Result<policy::Plan> plan_kept(const engine::Engine& engine, const store::Store& store,
                               policy::RestoreCosts costs, const store::ChunkRef& chunk,
                               int64_t n_tokens, int64_t n_new) {
  const auto n_layer = static_cast<int32_t>(engine.n_layer());
  const auto token_bytes = static_cast<int64_t>(2 * engine.kv_row_bytes());
  for (policy::LayerCosts& layer : costs.layers) layer.kv_bytes = token_bytes;
  const std::vector<store::PageOrigin> origins = store.origins(chunk);
  const TierSlowness tiers{.store = &store,
                           .remote = costs.link.bytes_per_s / store.remote_bytes_per_s()};
  int64_t bytes = 0;
  double slowness = 0;  // of the slowest tier that a part comes from
  for (size_t i = 0; i < chunk.info().pages.size(); ++i) {
    const store::PageInfo& page = chunk.info().pages[i];
    if (page.encoding != store::Encoding::kSnapshot) continue;
    bytes += page.bytes;
    slowness = std::max(slowness, tiers.of(origins[i]));
  }
  // As a history of so many rows, all of whose K and V are loaded.
  policy::RestoreRequest request;
  request.mode = policy::Mode::kKv;
  const int64_t rows = std::clamp<int64_t>(bytes / (token_bytes * n_layer), 1, n_tokens);
  request.available = policy::Availability::uniform(rows, n_layer, policy::kHasKv);
  request.available.runs.front().slowness.assign(static_cast<size_t>(n_layer), slowness);
  request.new_tokens = n_new;
  return policy::plan_restore(costs, request);
}

}  // namespace hcache::state
