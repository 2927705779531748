#include "state/kept_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "kept_header.h"
#include "planned_pages.h"

namespace hcache::state {
namespace {

// A sequence without rows is kept as it is up to this share of the rows that its budget leaves out.
constexpr double kMostAbove = 0.5;

// Of a reader of a snapshot's part (kSnapshotPart at most) at a time.
constexpr uint64_t kScoresRing = 16U << 20;

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

// Of the first n_tokens of a sequence, the rows that each layer holds.
std::vector<int64_t> held_rows(const engine::Engine& engine, engine::SeqId seq, int64_t n_tokens) {
  const int64_t behind = engine.length(seq) - n_tokens;
  std::vector<int64_t> rows;
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    rows.push_back(engine.held_rows(seq, layer) - behind);
  }
  return rows;
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

bool lacks_rows(const engine::Engine& engine, engine::SeqId seq) {
  const int64_t length = engine.length(seq);
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    if (engine.held_rows(seq, layer) < length) return true;
  }
  return false;
}

Result<policy::RowScores> score_by_last_rows(engine::Engine& engine, engine::SeqId seq,
                                             int64_t n_rows, std::span<const int32_t> last) {
  const model::HParams& hp = engine.model().hparams();
  const int64_t first = n_rows - static_cast<int64_t>(last.size());
  engine::AttentionScores told;
  HCACHE_RETURN_IF_ERROR(engine.observe({.seq = seq, .first_pos = first, .n_keys = n_rows}, &told));
  const engine::BatchItem item{.seq = seq,
                               .tokens = last,
                               .first_pos = first,
                               .output = engine::BatchItem::Output::kLast,
                               .captured = false};
  const Status computed = engine.decode({&item, 1}).status();
  HCACHE_RETURN_IF_ERROR(engine.observe({}, nullptr));
  HCACHE_RETURN_IF_ERROR(computed);
  policy::RowScores scores{.n_layer = hp.n_layer, .n_head_kv = hp.n_head_kv, .n_rows = n_rows};
  for (const engine::AttentionTally& tally : told.tallies) {
    scores.sum.insert(scores.sum.end(), tally.sum.begin(), tally.sum.begin() + n_rows);
  }
  return scores;
}

Result<policy::RowScores> score_by_last_rows(engine::Engine& engine, engine::SeqId seq,
                                             std::span<const int32_t> tokens) {
  return score_by_last_rows(engine, seq, static_cast<int64_t>(tokens.size()),
                            tokens.last(policy::kWindow));
}

KeptSnapshot::KeptSnapshot(const engine::Engine& engine, policy::Compression how,
                           policy::RowScores scores, double budget)
    : how_(how), scores_(std::move(scores)), shares_(policy::served_budgets(how, scores_, budget)) {
  std::vector<int64_t> rows;
  for (const double share : shares_) rows.push_back(policy::kept_rows(scores_.n_rows, share));
  bytes_ = kept_head(engine, scores_.n_rows, rows, scores_);
}

Result<bool> KeptSnapshot::add_layer(engine::Engine& engine, engine::SeqId seq) {
  const double share = shares_[static_cast<size_t>(layer_)];
  const std::vector<int32_t> kept = policy::choose_rows(how_, scores_, layer_, share, 0);
  const size_t n = kept.size() / static_cast<size_t>(scores_.n_head_kv);
  const size_t half = n * engine.kv_row_bytes();
  std::byte* k = grow(bytes_, 2 * half);
  HCACHE_RETURN_IF_ERROR(engine.read_kept(seq, layer_, kept, k, k + half));
  ++layer_;
  return layer_ == engine.n_layer();
}

Result<std::optional<std::vector<std::byte>>> held_state(engine::Engine& engine, engine::SeqId seq,
                                                         int64_t n_tokens,
                                                         const policy::RowScores& scores,
                                                         double budget) {
  using Snapshot = std::optional<std::vector<std::byte>>;
  const std::vector<int64_t> rows = held_rows(engine, seq, n_tokens);
  const auto n_layer = static_cast<int64_t>(rows.size());
  const int64_t held = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const int64_t wanted = n_layer * policy::kept_rows(n_tokens, budget);
  const double most_above = kMostAbove * static_cast<double>(n_layer * n_tokens - wanted);
  if (static_cast<double>(held - wanted) > most_above || engine.shortest(seq) > n_tokens) {
    return Snapshot();
  }
  std::vector<std::byte> bytes = kept_head(engine, n_tokens, rows, scores);
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    const int64_t n = rows[static_cast<size_t>(layer)];
    const size_t half = static_cast<size_t>(n) * engine.kv_row_bytes();
    std::byte* k = grow(bytes, 2 * half);
    HCACHE_RETURN_IF_ERROR(
        engine.read_kv(seq, layer, n_tokens - n, static_cast<int>(n), k, k + half));
  }
  return Snapshot(std::move(bytes));
}

std::optional<policy::RowScores> saved_scores(const engine::Engine& engine, store::Store& store,
                                              const store::ChunkRef& chunk, int64_t n_tokens) {
  const std::vector<store::PageOrigin> origins = store.origins(chunk);
  const std::vector<store::PageInfo>& pages = chunk.info().pages;
  size_t n_bytes = 0;
  for (const store::PageInfo& page : pages) {
    if (page.encoding == store::Encoding::kSnapshot) n_bytes += page.bytes;
  }
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < pages.size(); ++i) {
    if (pages[i].encoding != store::Encoding::kSnapshot) continue;
    if (origins[i] == store::PageOrigin::kRemote) return std::nullopt;  // that may take its time
    const store::PageRequest part{chunk, pages[i].layer, pages[i].encoding};
    const auto reader = open_reader(&store, {&part, 1}, {.ring_bytes = kScoresRing});
    if (!reader.ok()) return std::nullopt;
    const Result<store::PageView> view = (*reader)->next();
    if (!view.ok() || !view->status.ok()) return std::nullopt;
    bytes.insert(bytes.end(), view->bytes.begin(), view->bytes.end());
    (*reader)->release(view->index);
    Result<std::optional<KeptHead>> head = read_kept_head(engine, bytes, n_bytes, n_tokens);
    if (!head.ok()) return std::nullopt;
    if (!head->has_value()) continue;
    if ((*head)->scores.n_rows == 0) return std::nullopt;
    return std::move((*head)->scores);
  }
  return std::nullopt;
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
