#include "state/restorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "new_tokens.h"
#include "packed_kv.h"
#include "planned_pages.h"
#include "restore_lanes.h"
#include "restore_timer.h"
#include "state/identity.h"

namespace hcache::state {
namespace {

using engine::BatchItem;
using engine::Engine;
using engine::Step;
using policy::Method;

// Rows of a recomputation through several layers whose cost isn't known yet.
constexpr int64_t kFewRows = 16;
// How long one wait for a page takes before the caller is asked whether to go on.
constexpr int64_t kLookUpNs = 1'000'000;
// Damaged pages are computed again up to this part of what computing all restored rows would be,
// or as many as so many pages of the last layer would take.
constexpr int64_t kRepairShare = 4;
constexpr int64_t kRepairedPages = 2;
constexpr double kUnitMargin = 1.2;  // a unit may take longer than those before it
// For one page that is read in another encoding; more where pages are large.
constexpr uint64_t kSpareRingBytes = 1U << 20;
// Of pages, while others take steps: what some turns take in, and checked in a millisecond.
constexpr uint64_t kAheadBesideOthers = 8U << 20;

class RestorationImpl : public Restoration {
 public:
  RestorationImpl(Env& env, Engine& engine, store::Store* store, const RestoreRun& run)
      : env_(env), engine_(engine), store_(store), run_(run), plan_(*run.plan) {}
  RestorationImpl(const RestorationImpl&) = delete;
  RestorationImpl& operator=(const RestorationImpl&) = delete;
  ~RestorationImpl() override {
    if (phase_ != Phase::kDone) abandon();
  }

  // Reads begin here.
  Status open();
  Result<Phase> advance(const Slice& slice) override;
  double fraction() const override {
    return static_cast<double>(lanes_.n_done()) / static_cast<double>(engine_.n_layer());
  }
  const policy::RestoreRecord& record() const override { return record_; }
  std::span<const float> logits() const override { return logits_; }

 private:
  using Lane = RestoreLane;
  // A damaged page that is computed once the layers before are restored.
  struct Repair {
    int layer = 0;
    const PlannedPage* page = nullptr;
  };
  enum class Fetched : uint8_t { kReady, kWaiting, kDamaged };

  // One unit of work. False: there is none until a page has been read.
  Result<bool> work(const Slice& slice, double left_s);
  Status recompute_rows(int64_t n);
  // Between two batches of it: a turn of other devices' pages, as far as they have been read.
  Result<bool> restore_beside(const Slice& slice);
  [[nodiscard]] int64_t recompute_slice(const Slice& slice, double left_s) const;
  // One page, or the part of it that fills a slice. False: the page has not been read yet.
  Result<bool> restore_some(const Slice& slice);
  Status stage(Lane& lane, const PlannedPage& page, int64_t slice_rows);
  Status load(Lane& lane, const PlannedPage& page);
  Status project(Lane& lane);
  // The device reads the view until `ticket` is done; the next page comes next.
  Status leave_page(Lane& lane, Engine::Ticket ticket);
  void next_page(Lane& lane);
  // Leading layers with all of their rows; what is next is in the one behind them.
  [[nodiscard]] int restored_layers() const;
  Status unpack(const PlannedPage& page);
  // Makes view_ the next lane's page.
  Result<Fetched> fetch_page(const PlannedPage& page, const Slice& slice);
  Result<bool> wait_for_page(const Slice& slice);
  // view_'s bytes, and its times as its layer's.
  void note_read(const store::PageInfo& page);
  void count_reads(const store::PageReader& reader);
  Status release_done(bool all);

  // The lane's page can't be used.
  Status repair(Lane& lane, PlannedPage& page);
  // Gives the rows of the partial last chunk up.
  Status drop_tail(Lane& lane);
  // The repair whose layers before it are restored, if there is one.
  [[nodiscard]] std::optional<Repair> take_due_repair();
  Status compute_page(const Repair& repair);
  Status hand_over(const Repair& repair);

  // Runs new tokens through the next layer if it is restored. False: nothing could be done.
  Result<bool> follow();
  // The same between others' steps, while a page is waited for.
  Result<bool> follow_beside(const Slice& slice, double left_s);
  // The same where nothing else wants the device: they begin before the first layer.
  Status begin_to_follow_all();
  Result<bool> begin_to_follow(int64_t most_rows);
  Status begin_new_tokens(int64_t n);
  // Those that have begun, if there are any, may go on.
  [[nodiscard]] bool may_follow(const Slice& slice) const {
    if (slice.proceed) return true;
    return following_ && following_->rows() <= slice.keep_rows && follow_layer_s_ <= slice.keep_s;
  }
  Status end_follow();
  // What has begun is the caller's again, and so are all rows from `rows` on.
  Status give_up_following(int64_t rows);
  Status finish();  // nothing of the ring is read any more
  void abandon();   // the sequence is empty again and nothing reads the ring

  [[nodiscard]] bool recomputes() const {
    return plan_.recompute_layers > 0 && recomputed_rows_ < rows_;
  }

  Env& env_;
  Engine& engine_;
  store::Store* store_;
  const RestoreRun run_;
  const policy::Plan& plan_;

  Phase phase_ = Phase::kWorking;
  bool reserved_ = false;
  int64_t rows_ = 0;  // that are restored: the plan's, or without those of its last chunk
  int64_t recomputed_rows_ = 0;
  double recompute_row_s_ = 0;  // of the newest rows; 0: not known yet
  double unit_s_ = 0;           // what a unit of advance() is expected to take
  RestoreLanes lanes_;
  bool beside_ = false;          // a turn of other devices' pages is due
  std::vector<Repair> repairs_;  // that wait
  int64_t repair_rows_ = 0;      // of all repairs, those that wait included; as repaired_layer_rows
  std::optional<NewTokens> following_;  // on their way through the layers
  double follow_layer_s_ = 0;           // what the last of these took; 0: not known yet
  std::vector<float> logits_;
  std::unique_ptr<store::PageReader> reader_;
  // Of the next lane's page alone, which was damaged: it reads another encoding of it.
  std::unique_ptr<store::PageReader> spare_;
  std::optional<store::PageView> view_;  // of the next lane's page
  KvPacker packer_;
  std::vector<std::byte> unpacked_;  // view_'s page, if it was packed
  SpareBuffers buffers_;
  struct Held {
    Engine::Ticket ticket = 0;
    size_t index = 0;
    std::vector<std::byte> unpacked;
  };
  std::deque<Held> held_;  // pages of reader_ that the device may still be reading
  bool too_damaged_ = false;
  bool no_room_ = false;      // for the new tokens behind the restored ones
  double busy_at_end_s_ = 0;  // of compute, when the last layer was restored
  policy::RestoreRecord record_;
  RestoreTimer timer_{env_, record_};
  std::vector<size_t> device_of_;  // per layer, in record_.devices
};

Status RestorationImpl::open() {
  timer_.start();
  rows_ = plan_.restored_tokens;
  HCACHE_ASSIGN_OR_RETURN(PlannedPages pages,
                          planned_pages(engine_, run_.match, plan_, run_.devices_at_once));
  store::ReaderOptions options;
  options.ring_bytes = run_.ring_bytes;
  options.remote_timeout_s = run_.remote_timeout_s;
  if (run_.alone) {
    options.check_with = checks_of(engine_);
  } else {
    options.ahead_bytes = kAheadBesideOthers;
  }
  HCACHE_ASSIGN_OR_RETURN(reader_, open_reader(store_, requests_of(pages), options));
  lanes_ = RestoreLanes(std::move(pages));
  record_ = policy::planned_record(plan_, engine_.n_layer());
  record_.devices = restored_devices(engine_, &device_of_);
  // Layer 0's K and V alone see no other rows: those that it needs are enough.
  if (plan_.recompute_layers == 1) recomputed_rows_ = engine_.first_row_needed(0, rows_);
  return {};
}

// Gives back ring memory that the device has read; `all` waits for the rest.
Status RestorationImpl::release_done(bool all) {
  while (!held_.empty()) {
    if (!engine_.done(held_.front().ticket)) {
      if (!all) return {};
      HCACHE_RETURN_IF_ERROR(engine_.wait(held_.front().ticket));
    }
    reader_->release(held_.front().index);
    buffers_.give_back(std::move(held_.front().unpacked));
    held_.pop_front();
  }
  return {};
}

// False: it has not come yet.
Result<bool> RestorationImpl::wait_for_page(const Slice& slice) {
  store::PageReader& reader = spare_ ? *spare_ : *reader_;
  while (true) {
    HCACHE_RETURN_IF_ERROR(release_done(false));
    HCACHE_ASSIGN_OR_RETURN(view_, reader.try_next());
    if (view_) return true;
    if (held_.empty()) break;
    // The reader may be out of ring space because of pages that are still held. The others may be
    // another device's, which is not waited for.
    HCACHE_RETURN_IF_ERROR(engine_.wait(held_.front().ticket));
  }
  while (!view_ && slice.proceed && slice.proceed(fraction())) {
    HCACHE_ASSIGN_OR_RETURN(view_, reader.next_within(kLookUpNs));
  }
  return view_.has_value();
}

Result<RestorationImpl::Fetched> RestorationImpl::fetch_page(const PlannedPage& page,
                                                             const Slice& slice) {
  if (view_) return Fetched::kReady;
  HCACHE_ASSIGN_OR_RETURN(const bool there, wait_for_page(slice));
  if (!there) return Fetched::kWaiting;
  if (view_->status.ok()) {
    note_read(*page.info);
    view_->status = unpack(page);
  }
  if (view_->status.ok()) return Fetched::kReady;
  ++record_.damaged_pages;
  if (run_.on_damage) {
    run_.on_damage({.chunk = page.chunk->info().id,
                    .layer = page.info->layer,
                    .encoding = page.info->encoding,
                    .status = view_->status,
                    .remote = view_->origin == store::PageOrigin::kRemote});
  }
  (spare_ ? *spare_ : *reader_).release(view_->index);
  view_.reset();
  return Fetched::kDamaged;
}

void RestorationImpl::note_read(const store::PageInfo& page) {
  const policy::TierBytes bytes = tier_bytes(*view_);
  (store::is_hidden(page.encoding) ? record_.hidden_pages : record_.kv_pages) += bytes;
  record_.devices[device_of_[page.layer]].pages += bytes;
  if (view_->origin == store::PageOrigin::kMemory) return;
  const auto since_start = [&](int64_t ns) {
    return static_cast<double>(std::max<int64_t>(ns - timer_.start_ns(), 0)) * 1e-9;
  };
  policy::RestoredLayer& times = record_.layers[page.layer];
  if (times.io_end_s == 0) times.io_begin_s = since_start(view_->read_begin_ns);
  times.io_begin_s = std::min(times.io_begin_s, since_start(view_->read_begin_ns));
  times.io_end_s = std::max(times.io_end_s, since_start(view_->read_end_ns));
}

// Makes view_'s bytes the page as the arena has it.
Status RestorationImpl::unpack(const PlannedPage& page) {
  if (page.info->encoding != store::Encoding::kKvPacked) return {};
  const int layer = page.info->layer;
  unpacked_ = buffers_.take(2 * engine_.kv_row_bytes() * page.chunk->info().tokens.size());
  const Status status = timer_.timed_layers(
      layer, layer + 1, [&] { return packer_.unpack(view_->bytes, unpacked_); });
  view_->bytes = unpacked_;
  return status;
}

Status RestorationImpl::load(Lane& lane, const PlannedPage& page) {
  const int layer = lane.layer;
  const size_t row_bytes = engine_.kv_row_bytes();
  const std::byte* k = view_->bytes.data() + page.row * row_bytes;
  const std::byte* v = k + page.chunk->info().tokens.size() * row_bytes;
  HCACHE_ASSIGN_OR_RETURN(const Engine::Ticket ticket, timer_.timed_layers(layer, layer + 1, [&] {
    return engine_.load_kv(run_.seq, layer, page.begin, static_cast<int>(page.n_rows), k, v);
  }));
  // Each was rounded when it happened to the row that was held.
  for (const int64_t moved : page.moves) {
    HCACHE_RETURN_IF_ERROR(engine_.move_positions(run_.seq, layer, page.begin, page.n_rows, moved));
  }
  return leave_page(lane, ticket);
}

// Projections are done in slices of consecutive rows in one encoding.
Status RestorationImpl::stage(Lane& lane, const PlannedPage& page, int64_t slice_rows) {
  StagedRows& staged = lane.staged;
  const ggml_type type = *hidden_type(page.info->encoding);
  if (type != staged.type) HCACHE_RETURN_IF_ERROR(project(lane));
  if (staged.rows == 0) staged = {.begin = page.begin + lane.row, .rows = 0, .type = type};
  const int64_t n = std::min(slice_rows - staged.rows, page.n_rows - lane.row);
  const std::byte* rows =
      view_->bytes.data() + (page.row + lane.row) * engine_.hidden_row_bytes(type);
  HCACHE_ASSIGN_OR_RETURN(const Engine::Ticket ticket, timer_.timed_projection(lane.layer, [&] {
    return engine_.stage_hidden(run_.seq, lane.layer, static_cast<int>(staged.rows),
                                static_cast<int>(n), type, rows);
  }));
  staged.rows += n;
  lane.row += n;
  if (lane.row == page.n_rows) HCACHE_RETURN_IF_ERROR(leave_page(lane, ticket));
  // At a segment's end the next rows are another layer's, or another method's.
  const bool segment_ends = lane.page == 0 && lane.row == 0;
  return staged.rows >= slice_rows || segment_ends ? project(lane) : Status();
}

Status RestorationImpl::project(Lane& lane) {
  if (lane.staged.rows == 0) return {};
  const StagedRows staged = std::exchange(lane.staged, {});
  return timer_.timed_projection(lane.layer, [&] {
    return engine_.project_staged(run_.seq, lane.layer, staged.begin, static_cast<int>(staged.rows),
                                  staged.type);
  });
}

Status RestorationImpl::leave_page(Lane& lane, Engine::Ticket ticket) {
  if (spare_) {
    HCACHE_RETURN_IF_ERROR(engine_.wait(ticket));
    count_reads(*spare_);
    spare_->release(view_->index);
    spare_.reset();
  } else {
    held_.push_back({ticket, view_->index, std::move(unpacked_)});
    unpacked_.clear();
  }
  next_page(lane);
  return {};
}

void RestorationImpl::next_page(Lane& lane) {
  view_.reset();
  lanes_.pass_page(lane);
}

int RestorationImpl::restored_layers() const {
  if (recomputes()) return 0;
  int layers = lanes_.leading_layers();
  for (const Repair& repair : repairs_) layers = std::min(layers, repair.layer);
  return layers;
}

Result<bool> RestorationImpl::restore_some(const Slice& slice) {
  Lane& lane = lanes_.next();
  if (lanes_.at_layer_end(lane)) {
    RestoreLanes::pass_layer_end(lane);
    return true;
  }
  PlannedPage& page = lanes_.page(lane);
  HCACHE_ASSIGN_OR_RETURN(const Fetched fetched, fetch_page(page, slice));
  if (fetched != Fetched::kReady) {
    for (Lane& each : lanes_.all()) HCACHE_RETURN_IF_ERROR(project(each));  // rather than idle
  }
  if (fetched == Fetched::kWaiting) return false;
  if (page.begin >= rows_) {
    if (view_) reader_->release(view_->index);
    next_page(lane);
    return true;
  }
  if (fetched == Fetched::kDamaged) {
    HCACHE_RETURN_IF_ERROR(repair(lane, page));
    return true;
  }
  if (!store::is_hidden(page.info->encoding)) {
    HCACHE_RETURN_IF_ERROR(project(lane));  // of a damaged page before it, maybe
    HCACHE_RETURN_IF_ERROR(load(lane, page));
    return true;
  }
  const int64_t most = engine_.options().max_batch_rows;
  HCACHE_RETURN_IF_ERROR(stage(lane, page, std::clamp<int64_t>(slice.rows, 1, most)));
  return true;
}

Result<bool> RestorationImpl::restore_beside(const Slice& slice) {
  if (!beside_ || !lanes_.has_pages()) return false;
  const size_t turns = lanes_.turns();
  Slice without_waiting = slice;
  without_waiting.proceed = nullptr;
  HCACHE_ASSIGN_OR_RETURN(const bool went_on, restore_some(without_waiting));
  beside_ = went_on && turns == lanes_.turns();
  return went_on;
}

// A slice's rows are meant for one layer's projection; so many as fit run through several layers.
int64_t RestorationImpl::recompute_slice(const Slice& slice, double left_s) const {
  const auto rows = std::clamp<int64_t>(slice.rows, 1, engine_.options().max_batch_rows);
  if (plan_.recompute_layers == 1 || slice.proceed || std::isinf(slice.budget_s)) return rows;
  const int64_t few = std::min(rows, kFewRows);
  if (recompute_row_s_ <= 0) return few;
  return std::clamp(static_cast<int64_t>(left_s / recompute_row_s_), few, rows);
}

// The layer prefix that no page covers: the history's tokens run through it, batch by batch; of the
// last such layer only K and V are needed.
Status RestorationImpl::recompute_rows(int64_t n) {
  const int layers = plan_.recompute_layers;
  n = std::min(n, rows_ - recomputed_rows_);
  const BatchItem item{.seq = run_.seq,
                       .tokens = run_.tokens.subspan(recomputed_rows_, n),
                       .first_pos = recomputed_rows_,
                       .output = BatchItem::Output::kNone};
  HCACHE_ASSIGN_OR_RETURN(Step step, engine_.prepare({&item, 1}));
  const double before_s = record_.compute_busy_s;
  const int64_t start = env_.monotonic_ns();
  HCACHE_RETURN_IF_ERROR(timer_.timed_layers(0, layers, [&]() -> Status {
    HCACHE_RETURN_IF_ERROR(engine_.run_layers(step, 0, layers - 1));
    return engine_.finish_with_kv(step, layers - 1);
  }));
  if (layers > 1) record_.project_busy_s += record_.compute_busy_s - before_s;
  recomputed_rows_ += n;
  beside_ = lanes_.size() > 1;
  recompute_row_s_ = timer_.elapsed(start) / static_cast<double>(n);
  return {};
}

void RestorationImpl::count_reads(const store::PageReader& reader) {
  const store::ReaderStats stats = reader.stats();
  record_.read +=
      {.dram = stats.dram_bytes, .disk = stats.disk_bytes, .remote = stats.remote_bytes};
  record_.io_busy_s += stats.busy_s;
}

Status RestorationImpl::finish() {
  HCACHE_RETURN_IF_ERROR(release_done(true));
  phase_ = Phase::kDone;
  if (reader_) count_reads(*reader_);
  record_.overlap = policy::overlap(record_.io_busy_s, busy_at_end_s_, record_.restore_s);
  return {};
}

void RestorationImpl::abandon() {
  phase_ = Phase::kFailed;
  following_.reset();
  if (reader_) reader_->cancel();
  if (!reserved_) return;
  reserved_ = false;
  // Nothing may still be reading the ring.
  engine_.synchronize().ignore("the first error is the one to report");
  engine_.trim_sequence(run_.seq, 0).ignore("the first error is the one to report");
}

// ---- Damage

Status RestorationImpl::drop_tail(Lane& lane) {
  const int64_t whole = rows_ - (rows_ + run_.dropped) % store::kChunkTokens;
  HCACHE_RETURN_IF_ERROR(give_up_following(whole));
  int64_t dropped = rows_ - whole;
  record_.restored_tokens = rows_ = whole;
  for (int64_t* tokens : {&record_.recomputed_tokens, &record_.kv_tokens, &record_.hidden_tokens}) {
    const int64_t n = std::min(dropped, *tokens);
    *tokens -= n;
    dropped -= n;
  }
  std::erase_if(repairs_, [&](const Repair& repair) { return repair.page->begin >= rows_; });
  run_.on_shorter(rows_);
  next_page(lane);
  return {};
}

Status RestorationImpl::repair(Lane& lane, PlannedPage& page) {
  const int layer = lane.layer;
  const bool was_spare = spare_ != nullptr;
  if (spare_) count_reads(*spare_);
  spare_.reset();
  const int64_t tail_rows = (rows_ + run_.dropped) % store::kChunkTokens;
  const bool is_tail = tail_rows != 0 && page.begin >= rows_ - tail_rows;
  if (is_tail && run_.on_shorter) return drop_tail(lane);
  const Method other = store::is_hidden(page.info->encoding) ? Method::kKv : Method::kHidden;
  const store::PageInfo* replacement = usable_page(engine_, page.chunk->info(), layer, other);
  if (!was_spare && replacement != nullptr) {
    page.info = replacement;
    const store::PageRequest request{*page.chunk, replacement->layer, replacement->encoding};
    store::ReaderOptions options;
    options.ring_bytes = kSpareRingBytes;
    options.remote_timeout_s = run_.remote_timeout_s;
    HCACHE_ASSIGN_OR_RETURN(spare_, open_reader(store_, {&request, 1}, options));
    ++record_.replaced_pages;
    return {};
  }
  if (was_spare) --record_.replaced_pages;
  if (run_.dropped > 0 || (layer > 0 && engine_.shortest(run_.seq) > 0)) {
    too_damaged_ = true;
    return data_loss(
        "what layers hold of a truncated conversation, or of a window, can't be computed again in "
        "parts");
  }
  repair_rows_ += page.n_rows * (layer + 1);
  const int64_t most = std::max(rows_ * engine_.n_layer() / kRepairShare,
                                kRepairedPages * page.n_rows * engine_.n_layer());
  if (repair_rows_ > most) {
    too_damaged_ = true;
    return data_loss("too much of the saved state is damaged");
  }
  const Repair needed{.layer = layer, .page = &page};
  if (restored_layers() >= layer) {
    HCACHE_RETURN_IF_ERROR(compute_page(needed));
  } else {
    repairs_.push_back(needed);
  }
  next_page(lane);
  return {};
}

std::optional<RestorationImpl::Repair> RestorationImpl::take_due_repair() {
  const auto first =
      std::min_element(repairs_.begin(), repairs_.end(),
                       [](const Repair& a, const Repair& b) { return a.layer < b.layer; });
  if (first == repairs_.end() || restored_layers() < first->layer) return std::nullopt;
  const Repair due = *first;
  repairs_.erase(first);
  return due;
}

// Its rows run through the layers up to its own, of which those before have all their rows; of the
// last only K and V are needed.
Status RestorationImpl::compute_page(const Repair& repair) {
  const int64_t most = engine_.options().max_batch_rows;
  const PlannedPage& page = *repair.page;
  const int layer = repair.layer;
  for (int64_t row = 0; row < page.n_rows; row += most) {
    const int64_t n = std::min(most, page.n_rows - row);
    const BatchItem item{.seq = run_.seq,
                         .tokens = run_.tokens.subspan(static_cast<size_t>(page.begin + row),
                                                       static_cast<size_t>(n)),
                         .first_pos = page.begin + row,
                         .output = BatchItem::Output::kNone};
    HCACHE_ASSIGN_OR_RETURN(Step step, engine_.prepare({&item, 1}));
    HCACHE_RETURN_IF_ERROR(timer_.timed_layers(layer, layer + 1, [&]() -> Status {
      HCACHE_RETURN_IF_ERROR(engine_.run_layers(step, 0, layer));
      return engine_.finish_with_kv(step, layer);
    }));
    record_.repaired_layer_rows += n * (layer + 1);
  }
  return hand_over(repair);
}

// Rows of a chunk that is only used in part are saved again with what follows them.
Status RestorationImpl::hand_over(const Repair& repair) {
  const PlannedPage& page = *repair.page;
  const store::ChunkInfo& chunk = page.chunk->info();
  if (!run_.on_computed || page.n_rows != static_cast<int64_t>(chunk.tokens.size())) return {};
  const size_t half = engine_.kv_row_bytes() * static_cast<size_t>(page.n_rows);
  std::vector<std::byte> kv(2 * half);
  HCACHE_RETURN_IF_ERROR(engine_.read_kv(run_.seq, repair.layer, page.begin,
                                         static_cast<int>(page.n_rows), kv.data(),
                                         kv.data() + half));
  run_.on_computed({chunk, static_cast<uint16_t>(repair.layer), kv});
  return {};
}

// ---- The prefill behind the restored layers

Status RestorationImpl::begin_new_tokens(int64_t n) {
  HCACHE_ASSIGN_OR_RETURN(NewTokens tokens, NewTokens::begin(engine_, run_, rows_, n));
  following_.emplace(std::move(tokens));
  record_.prefilled_tokens = n;
  return {};
}

Status RestorationImpl::begin_to_follow_all() {
  if (following_ || record_.prefilled_tokens > 0 || no_room_) return {};
  const int64_t fresh = static_cast<int64_t>(run_.tokens.size()) - rows_;
  if (fresh == 0) return {};
  const Status begun = begin_new_tokens(std::min<int64_t>(fresh, engine_.options().max_batch_rows));
  // Without room the caller finds some when they are due.
  no_room_ = begun.code() == Code::kResourceExhausted;
  return no_room_ ? Status() : begun;
}

Result<bool> RestorationImpl::begin_to_follow(int64_t most_rows) {
  // The last token is the caller's: it wants the logits.
  const int64_t fresh = static_cast<int64_t>(run_.tokens.size()) - rows_ - 1;
  const int64_t n = std::min<int64_t>({fresh, most_rows, engine_.options().max_batch_rows});
  if (n < kFewRows || restored_layers() == 0 || record_.prefilled_tokens > 0) return false;
  const Status begun = begin_new_tokens(n);
  if (begun.code() == Code::kResourceExhausted) return false;
  HCACHE_RETURN_IF_ERROR(begun);
  return true;
}

Result<bool> RestorationImpl::follow() {
  if (!following_ || following_->layers() == restored_layers()) return false;
  const int64_t start = env_.monotonic_ns();
  HCACHE_RETURN_IF_ERROR(timer_.timed([&] { return following_->run_layer(); }));
  follow_layer_s_ = timer_.elapsed(start);
  return true;
}

// The first unit of a turn has all of its budget, which the rows were chosen for.
Result<bool> RestorationImpl::follow_beside(const Slice& slice, double left_s) {
  const bool fits =
      left_s == slice.budget_s || (0 < follow_layer_s_ && kUnitMargin * follow_layer_s_ <= left_s);
  if (!fits) return false;
  if (following_) return may_follow(slice) ? follow() : false;
  HCACHE_ASSIGN_OR_RETURN(const bool begun, begin_to_follow(slice.follow_rows));
  return begun ? follow() : false;
}

Status RestorationImpl::end_follow() {
  HCACHE_ASSIGN_OR_RETURN(logits_, timer_.timed([&] { return following_->finish(); }));
  following_.reset();
  return {};
}

Status RestorationImpl::give_up_following(int64_t rows) {
  following_.reset();
  follow_layer_s_ = 0;
  record_.prefilled_tokens = 0;
  HCACHE_RETURN_IF_ERROR(engine_.synchronize());
  return engine_.trim_sequence(run_.seq, rows);
}

// ---- Slices

Result<bool> RestorationImpl::work(const Slice& slice, double left_s) {
  if (!reserved_) {
    HCACHE_RETURN_IF_ERROR(engine_.reserve_rows(run_.seq, plan_.restored_tokens));
    reserved_ = true;
  }
  if (recomputes()) {
    HCACHE_ASSIGN_OR_RETURN(const bool beside, restore_beside(slice));
    if (beside) return true;
    HCACHE_RETURN_IF_ERROR(recompute_rows(recompute_slice(slice, left_s)));
    return true;
  }
  const bool alone = slice.proceed != nullptr;
  if (alone) HCACHE_RETURN_IF_ERROR(begin_to_follow_all());
  if (const std::optional<Repair> repair = take_due_repair()) {
    HCACHE_RETURN_IF_ERROR(compute_page(*repair));
    return true;
  }
  const bool restored = restored_layers() == engine_.n_layer();
  if (restored && record_.restore_s == 0) {
    record_.restore_s = timer_.elapsed();
    busy_at_end_s_ = record_.compute_busy_s;
  }
  if (alone || (restored && may_follow(slice))) {
    HCACHE_ASSIGN_OR_RETURN(const bool followed, follow());
    if (followed) return true;
  }
  if (restored) {
    const bool whole = following_ && following_->layers() == engine_.n_layer();
    if (whole) HCACHE_RETURN_IF_ERROR(end_follow());
    if (following_) HCACHE_RETURN_IF_ERROR(give_up_following(rows_));
    HCACHE_RETURN_IF_ERROR(finish());
    return true;
  }
  HCACHE_ASSIGN_OR_RETURN(const bool went_on, restore_some(slice));
  if (went_on || alone) return went_on;
  return follow_beside(slice, left_s);
}

Result<Restoration::Phase> RestorationImpl::advance(const Slice& slice) {
  if (phase_ == Phase::kDone || phase_ == Phase::kFailed) return phase_;
  phase_ = Phase::kWorking;
  if (reader_) reader_->set_ahead(slice.proceed ? UINT64_MAX : kAheadBesideOthers);
  const int64_t begin = env_.monotonic_ns();
  double used_s = 0;
  const auto goes_on = [&] {
    if (phase_ == Phase::kDone) return false;
    return slice.proceed ? slice.proceed(fraction())
                         : used_s + kUnitMargin * unit_s_ < slice.budget_s;
  };
  do {
    const Result<bool> worked = work(slice, slice.budget_s - used_s);
    if (!worked.ok()) {
      abandon();
      if (too_damaged_) return phase_;
      return worked.status();
    }
    if (!*worked) {
      phase_ = Phase::kWaitingForIo;
      return phase_;
    }
    const double unit_s = timer_.elapsed(begin) - used_s;
    used_s += unit_s;
    // One that was held up counts for a few units, cheap ones between dear ones don't hide these.
    unit_s_ = std::max(unit_s, unit_s_ / 2);
  } while (goes_on());
  return phase_;
}

Status check_run(const store::Store* store, const RestoreRun& run) {
  if (run.plan == nullptr || run.plan->restored_tokens > static_cast<int64_t>(run.tokens.size())) {
    return invalid_argument("a restore needs a plan for its tokens");
  }
  if (!run.plan->runs.empty() && (store == nullptr || run.match == nullptr)) {
    return invalid_argument("a plan that restores needs a store and a match");
  }
  return {};
}

}  // namespace

Result<std::unique_ptr<Restoration>> Restoration::begin(Env& env, Engine& engine,
                                                        store::Store* store,
                                                        const RestoreRun& run) {
  HCACHE_RETURN_IF_ERROR(check_run(store, run));
  auto restoration = std::make_unique<RestorationImpl>(env, engine, store, run);
  HCACHE_RETURN_IF_ERROR(restoration->open());
  return std::unique_ptr<Restoration>(std::move(restoration));
}

}  // namespace hcache::state
