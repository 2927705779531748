#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "kept_header.h"
#include "new_tokens.h"
#include "planned_pages.h"
#include "restore_timer.h"
#include "state/kept_state.h"
#include "state/snapshot_pages.h"

namespace hcache::state {
namespace {

// Parts come in their order; a layer is loaded as soon as its rows are there.
class KeptRestore final : public Restoration {
 public:
  KeptRestore(Env& env, engine::Engine& engine, const RestoreRun& run, int64_t n_tokens,
              const store::ChunkRef& chunk, const policy::Prediction& predicted)
      : engine_(engine), run_(run), n_tokens_(n_tokens), chunk_(chunk), timer_(env, record_) {
    timer_.start();
    record_.layers.resize(static_cast<size_t>(engine.n_layer()));
    record_.predicted_first_s = predicted.makespan_s;
    record_.predicted_restore_s = predicted.restored_s;
  }
  KeptRestore(const KeptRestore&) = delete;
  KeptRestore& operator=(const KeptRestore&) = delete;
  ~KeptRestore() override {
    if (!done_) empty_sequence().ignore("a destructor has nobody to tell");
  }

  // Submits all parts.
  Status open(store::Store& store);

  Result<Phase> advance(const Slice& slice) override;
  double fraction() const override {
    return static_cast<double>(part_) / static_cast<double>(n_parts_);
  }
  const policy::RestoreRecord& record() const override { return record_; }
  std::span<const float> logits() const override { return logits_; }

 private:
  // The next part; nullopt: it is not there yet.
  Result<std::optional<Status>> take_part(bool wait);
  // Loads the layers whose rows have come. kDataLoss where they are not this model's.
  Status load_layers();
  Status load_layer();
  Status begin_to_follow();
  Status finish();
  Result<Phase> fail(size_t part, const Status& status);
  Status empty_sequence() {
    following_.reset();
    return engine_.trim_sequence(run_.seq, 0);
  }

  engine::Engine& engine_;
  const RestoreRun run_;
  const int64_t n_tokens_;
  const store::ChunkRef chunk_;
  size_t n_parts_ = 0;
  size_t n_bytes_ = 0;  // of all parts
  std::unique_ptr<store::PageReader> reader_;
  size_t part_ = 0;               // that comes next
  bool remote_ = false;           // the last one came from the remote tier
  std::vector<std::byte> bytes_;  // that have come
  size_t used_ = 0;               // of them, that are in a layer
  std::vector<int64_t> rows_;     // of each layer; empty before the header has come
  int layer_ = 0;                 // that is loaded next
  std::optional<NewTokens> following_;
  std::vector<float> logits_;
  bool done_ = false;
  policy::RestoreRecord record_;
  RestoreTimer timer_;
};

Status KeptRestore::open(store::Store& store) {
  std::vector<store::PageRequest> requests;
  for (const store::PageInfo& page : chunk_.info().pages) {
    if (page.encoding != store::Encoding::kSnapshot) continue;
    requests.push_back({chunk_, page.layer, page.encoding});
    n_bytes_ += page.bytes;
  }
  if (requests.empty()) return not_found("the chunk has no snapshot");
  n_parts_ = requests.size();
  HCACHE_ASSIGN_OR_RETURN(
      reader_, store.new_reader({.ring_bytes = run_.ring_bytes,
                                 .remote_timeout_s = run_.remote_timeout_s,
                                 .check_with = run_.alone ? checks_of(engine_) : nullptr}));
  return reader_->submit(requests);
}

Result<std::optional<Status>> KeptRestore::take_part(bool wait) {
  std::optional<store::PageView> view;
  if (wait) {
    HCACHE_ASSIGN_OR_RETURN(view, reader_->next());
  } else {
    HCACHE_ASSIGN_OR_RETURN(view, reader_->try_next());
  }
  if (!view) return std::optional<Status>();
  remote_ = view->origin == store::PageOrigin::kRemote;
  record_.kv_pages += tier_bytes(*view);
  bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(used_));
  used_ = 0;
  bytes_.insert(bytes_.end(), view->bytes.begin(), view->bytes.end());
  reader_->release(view->index);
  if (view->status.ok()) ++part_;
  return std::optional(view->status);
}

// Where the arena has room for them.
Status KeptRestore::begin_to_follow() {
  const int64_t fresh = static_cast<int64_t>(run_.tokens.size()) - n_tokens_;
  const int64_t n = std::min<int64_t>(fresh, engine_.options().max_batch_rows);
  if (following_ || layer_ > 0 || n < 1) return {};
  Result<NewTokens> tokens = NewTokens::begin(engine_, run_, n_tokens_, n);
  if (tokens.status().code() == Code::kResourceExhausted) return {};
  HCACHE_RETURN_IF_ERROR(tokens.status());
  following_.emplace(std::move(*tokens));
  record_.prefilled_tokens = n;
  return {};
}

// The next one, whose rows have come, and what follows it.
Status KeptRestore::load_layer() {
  const int64_t n = rows_[static_cast<size_t>(layer_)];
  const std::byte* k = bytes_.data() + used_;
  const std::byte* v = k + static_cast<size_t>(n) * engine_.kv_row_bytes();
  record_.layers[static_cast<size_t>(layer_)].method = policy::Method::kKv;
  HCACHE_RETURN_IF_ERROR(timer_.timed_layers(
      layer_, layer_ + 1, [&] { return engine_.load_kept(run_.seq, layer_, n, k, v); }));
  ++layer_;
  if (layer_ == engine_.n_layer()) record_.restore_s = timer_.elapsed();
  return following_ ? timer_.timed([&] { return following_->run_layer(); }) : Status();
}

Status KeptRestore::load_layers() {
  if (rows_.empty()) {
    HCACHE_ASSIGN_OR_RETURN(auto head, read_kept_head(engine_, bytes_, n_bytes_, n_tokens_));
    if (!head) return {};
    rows_ = std::move(head->rows);
    used_ = head->n_bytes;
    if (run_.on_scores && head->scores.n_rows > 0) run_.on_scores(std::move(head->scores));
  }
  while (layer_ < engine_.n_layer()) {
    const size_t bytes =
        2 * static_cast<size_t>(rows_[static_cast<size_t>(layer_)]) * engine_.kv_row_bytes();
    if (bytes_.size() - used_ < bytes) break;
    HCACHE_RETURN_IF_ERROR(load_layer());
    used_ += bytes;
  }
  return {};
}

Result<Restoration::Phase> KeptRestore::fail(size_t part, const Status& status) {
  ++record_.damaged_pages;
  done_ = true;
  HCACHE_RETURN_IF_ERROR(empty_sequence());
  run_.on_damage({.chunk = chunk_.info().id,
                  .layer = static_cast<uint16_t>(part),
                  .encoding = store::Encoding::kSnapshot,
                  .status = status,
                  .remote = remote_});
  return Phase::kFailed;
}

Status KeptRestore::finish() {
  if (following_) {
    HCACHE_ASSIGN_OR_RETURN(logits_, timer_.timed([&] { return following_->finish(); }));
    following_.reset();
  }
  const store::ReaderStats stats = reader_->stats();
  record_.io_busy_s = stats.busy_s;
  record_.overlap = policy::overlap(record_.io_busy_s, record_.compute_busy_s, record_.restore_s);
  record_.read = {.dram = stats.dram_bytes, .disk = stats.disk_bytes, .remote = stats.remote_bytes};
  record_.restored_tokens = n_tokens_;
  record_.kv_tokens = n_tokens_;
  const int64_t all = std::accumulate(rows_.begin(), rows_.end(), int64_t{0});
  record_.kept_rows = (all + engine_.n_layer() / 2) / engine_.n_layer();
  record_.schedule =
      fmt::format("KV:{} ({} of {} rows)", engine_.n_layer(), record_.kept_rows, n_tokens_);
  done_ = true;
  return {};
}

Result<Restoration::Phase> KeptRestore::advance(const Slice& slice) {
  const double begin_s = timer_.elapsed();
  const bool alone = slice.proceed != nullptr;
  if (alone) HCACHE_RETURN_IF_ERROR(begin_to_follow());
  while (layer_ < engine_.n_layer()) {
    if (part_ == n_parts_) return fail(0, data_loss("a snapshot of kept rows lacks layers"));
    HCACHE_ASSIGN_OR_RETURN(const std::optional<Status> taken, take_part(alone));
    if (!taken) return Phase::kWaitingForIo;
    if (!taken->ok()) return fail(part_, *taken);
    const Status loaded = load_layers();
    if (loaded.code() == Code::kDataLoss) return fail(0, loaded);
    HCACHE_RETURN_IF_ERROR(loaded);
    if (layer_ == engine_.n_layer()) break;
    const bool goes_on =
        alone ? slice.proceed(fraction()) : timer_.elapsed() - begin_s <= slice.budget_s;
    if (!goes_on) return Phase::kWorking;
  }
  HCACHE_RETURN_IF_ERROR(finish());
  return Phase::kDone;
}

}  // namespace

Result<std::unique_ptr<Restoration>> begin_kept_restore(Env& env, engine::Engine& engine,
                                                        store::Store& store, const RestoreRun& run,
                                                        const store::ChunkRef& chunk,
                                                        int64_t n_tokens,
                                                        const policy::Prediction& predicted) {
  auto restore = std::make_unique<KeptRestore>(env, engine, run, n_tokens, chunk, predicted);
  HCACHE_RETURN_IF_ERROR(restore->open(store));
  return std::unique_ptr<Restoration>(std::move(restore));
}

}  // namespace hcache::state
