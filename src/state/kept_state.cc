#include "state/kept_state.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "new_tokens.h"
#include "policy/compression.h"
#include "state/snapshot_pages.h"

namespace hcache::state {
namespace {

constexpr uint32_t kMagic = 0x31535248;  // "HRS1"
// A sequence without rows is kept as it is up to this share of the rows that its budget leaves out.
constexpr double kMostAbove = 0.5;

struct Header {
  uint32_t magic = kMagic;
  uint32_t n_layer = 0;
  uint64_t n_tokens = 0;
  uint64_t row_bytes = 0;
};
static_assert(std::endian::native == std::endian::little && sizeof(Header) == 24);

// Adds so many bytes and returns where they begin.
std::byte* grow(std::vector<std::byte>& bytes, size_t more) {
  bytes.resize(bytes.size() + more);
  return bytes.data() + (bytes.size() - more);
}

double since(Env& env, int64_t ns) { return static_cast<double>(env.monotonic_ns() - ns) * 1e-9; }

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

std::vector<std::byte> snapshot_head(const engine::Engine& engine, int64_t n_tokens, int64_t rows) {
  std::vector<std::byte> bytes;
  append(bytes, Header{.n_layer = static_cast<uint32_t>(engine.n_layer()),
                       .n_tokens = static_cast<uint64_t>(n_tokens),
                       .row_bytes = engine.kv_row_bytes()});
  for (int layer = 0; layer < engine.n_layer(); ++layer) append(bytes, static_cast<uint64_t>(rows));
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
  bytes.reserve(bytes.size() + 2 * half * static_cast<size_t>(engine.n_layer()));
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
  int64_t bytes = 0;
  double slowness = 0;  // of the slowest tier that a part comes from
  for (size_t i = 0; i < chunk.info().pages.size(); ++i) {
    const store::PageInfo& page = chunk.info().pages[i];
    if (page.encoding != store::Encoding::kSnapshot) continue;
    bytes += page.bytes;
    if (origins[i] == store::PageOrigin::kDisk) slowness = std::max(slowness, 1.0);
    if (origins[i] == store::PageOrigin::kRemote) {
      slowness = std::max(slowness, costs.link.bytes_per_s / store.remote_bytes_per_s());
    }
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

KeptRestore::KeptRestore(Env& env, engine::Engine& engine, RestoreRun run, int64_t n_tokens,
                         const store::ChunkRef& chunk)
    : env_(env), engine_(engine), run_(std::move(run)), n_tokens_(n_tokens), chunk_(chunk) {
  begin_ns_ = env.monotonic_ns();
  record_.layers.resize(static_cast<size_t>(engine.n_layer()));
}

KeptRestore::~KeptRestore() = default;

Result<std::unique_ptr<KeptRestore>> KeptRestore::begin(Env& env, engine::Engine& engine,
                                                        store::Store& store, RestoreRun run,
                                                        int64_t n_tokens,
                                                        const store::ChunkRef& chunk) {
  const store::ReaderOptions reading{.ring_bytes = run.ring_bytes,
                                     .remote_timeout_s = run.remote_timeout_s};
  std::unique_ptr<KeptRestore> restore(
      new KeptRestore(env, engine, std::move(run), n_tokens, chunk));
  std::vector<store::PageRequest> requests;
  for (const store::PageInfo& page : chunk.info().pages) {
    if (page.encoding != store::Encoding::kSnapshot) continue;
    requests.push_back({chunk, page.layer, page.encoding});
    restore->n_bytes_ += page.bytes;
  }
  if (requests.empty()) return not_found("the chunk has no snapshot");
  restore->n_parts_ = requests.size();
  HCACHE_ASSIGN_OR_RETURN(restore->reader_, store.new_reader(reading));
  HCACHE_RETURN_IF_ERROR(restore->reader_->submit(requests));
  return restore;
}

double KeptRestore::fraction() const {
  return static_cast<double>(part_) / static_cast<double>(n_parts_);
}

Result<bool> KeptRestore::take_page(bool wait) {
  std::optional<store::PageView> view;
  if (wait) {
    HCACHE_ASSIGN_OR_RETURN(view, reader_->next());
  } else {
    HCACHE_ASSIGN_OR_RETURN(view, reader_->try_next());
  }
  if (!view) return false;
  failure_.remote = view->origin == store::PageOrigin::kRemote;
  failure_.status = view->status;
  const uint64_t n = view->bytes.size();
  switch (view->origin) {
    case store::PageOrigin::kMemory: record_.kv_pages.dram += n; break;
    case store::PageOrigin::kDisk: record_.kv_pages.disk += n; break;
    case store::PageOrigin::kRemote: record_.kv_pages.remote += n; break;
  }
  bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(used_));
  used_ = 0;
  bytes_.insert(bytes_.end(), view->bytes.begin(), view->bytes.end());
  reader_->release(view->index);
  if (failure_.status.ok()) ++part_;
  return true;
}

Status KeptRestore::read_header() {
  const auto n_layer = static_cast<size_t>(engine_.n_layer());
  const size_t head = kSnapshotFrame + sizeof(Header) + n_layer * sizeof(uint64_t);
  HCACHE_ASSIGN_OR_RETURN(const size_t length, snapshot_length(bytes_, n_bytes_));
  Header header;
  if (bytes_.size() < head) return data_loss("a snapshot of kept rows without its header");
  std::memcpy(&header, bytes_.data() + kSnapshotFrame, sizeof(header));
  std::vector<uint64_t> rows(n_layer);
  std::memcpy(rows.data(), bytes_.data() + kSnapshotFrame + sizeof(header),
              n_layer * sizeof(uint64_t));
  uint64_t all = 0;
  bool fits = header.magic == kMagic && header.n_layer == n_layer &&
              header.n_tokens == static_cast<uint64_t>(n_tokens_) &&
              header.row_bytes == engine_.kv_row_bytes();
  for (const uint64_t n : rows) {
    fits = fits && n > 0 && n <= header.n_tokens;
    all += fits ? n : 0;
  }
  if (!fits || head - kSnapshotFrame + 2 * all * header.row_bytes != length) {
    return data_loss("a snapshot of kept rows is not this conversation's");
  }
  rows_.assign(rows.begin(), rows.end());
  used_ = head;
  return {};
}

// Where the arena has room for them.
Status KeptRestore::begin_to_follow() {
  const int64_t fresh = static_cast<int64_t>(run_.tokens.size()) - n_tokens_;
  const int64_t n = std::min<int64_t>(fresh, engine_.options().max_batch_rows);
  if (following_ || layer_ > 0 || n < 1) return {};
  Result<NewTokens> tokens = NewTokens::begin(engine_, run_, n_tokens_, n);
  if (tokens.status().code() == Code::kResourceExhausted) return {};
  HCACHE_RETURN_IF_ERROR(tokens.status());
  following_ = std::make_unique<NewTokens>(std::move(*tokens));
  record_.prefilled_tokens = n;
  return {};
}

// The next one, whose rows have come, and what follows it.
Status KeptRestore::load_layer() {
  const int64_t n = rows_[static_cast<size_t>(layer_)];
  const std::byte* k = bytes_.data() + used_;
  const std::byte* v = k + static_cast<size_t>(n) * engine_.kv_row_bytes();
  policy::RestoredLayer& layer = record_.layers[static_cast<size_t>(layer_)];
  layer.method = policy::Method::kKv;
  layer.compute_begin_s = since(env_, begin_ns_);
  HCACHE_RETURN_IF_ERROR(engine_.load_kept(run_.seq, layer_, n, k, v));
  layer.compute_end_s = since(env_, begin_ns_);
  ++layer_;
  if (layer_ == engine_.n_layer()) record_.restore_s = layer.compute_end_s;
  return following_ ? following_->run_layer() : Status();
}

// Loads the layers whose rows have come. kDataLoss where they are not this model's.
Status KeptRestore::load_layers() {
  if (rows_.empty()) HCACHE_RETURN_IF_ERROR(read_header());
  while (layer_ < engine_.n_layer()) {
    const size_t bytes =
        2 * static_cast<size_t>(rows_[static_cast<size_t>(layer_)]) * engine_.kv_row_bytes();
    if (bytes_.size() - used_ < bytes) break;
    HCACHE_RETURN_IF_ERROR(load_layer());
    used_ += bytes;
  }
  return {};
}

KeptRestore::Phase KeptRestore::fail(size_t part, Status status, bool remote) {
  following_.reset();
  failure_ = {.chunk = chunk_.info().id,
              .layer = static_cast<uint16_t>(part),
              .encoding = store::Encoding::kSnapshot,
              .status = std::move(status),
              .remote = remote};
  return Phase::kFailed;
}

Status KeptRestore::finish() {
  if (following_) {
    const int64_t begin_ns = env_.monotonic_ns();
    HCACHE_ASSIGN_OR_RETURN(logits_, following_->finish());
    record_.compute_busy_s += since(env_, begin_ns);
    following_.reset();
  }
  const store::ReaderStats stats = reader_->stats();
  record_.io_busy_s = stats.busy_s;
  record_.overlap = policy::overlap(record_.io_busy_s, record_.compute_busy_s, record_.restore_s);
  record_.read = {.dram = stats.dram_bytes, .disk = stats.disk_bytes, .remote = stats.remote_bytes};
  record_.restored_tokens = n_tokens_;
  record_.kv_tokens = n_tokens_;
  record_.kept_rows = *std::max_element(rows_.begin(), rows_.end());
  record_.schedule =
      fmt::format("KV:{} ({} of {} rows)", engine_.n_layer(), record_.kept_rows, n_tokens_);
  return {};
}

Result<KeptRestore::Phase> KeptRestore::advance(double budget_s, bool alone) {
  const int64_t begin_ns = env_.monotonic_ns();
  if (alone) HCACHE_RETURN_IF_ERROR(begin_to_follow());
  while (layer_ < engine_.n_layer()) {
    if (part_ == n_parts_) {
      return fail(0, data_loss("a snapshot of kept rows lacks layers"), false);
    }
    HCACHE_ASSIGN_OR_RETURN(const bool came, take_page(alone));
    if (!came) return Phase::kWaitingForIo;
    if (!failure_.status.ok()) return fail(part_, failure_.status, failure_.remote);
    const int64_t load_ns = env_.monotonic_ns();
    const Status loaded = load_layers();
    record_.compute_busy_s += since(env_, load_ns);
    if (loaded.code() == Code::kDataLoss) return fail(0, loaded, false);
    HCACHE_RETURN_IF_ERROR(loaded);
    const bool spent = alone || since(env_, begin_ns) > budget_s;
    if (spent && layer_ < engine_.n_layer()) return Phase::kWorking;
  }
  HCACHE_RETURN_IF_ERROR(finish());
  return Phase::kDone;
}

}  // namespace hcache::state
