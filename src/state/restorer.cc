#include "state/restorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <utility>

#include "planned_pages.h"
#include "state/identity.h"

namespace hcache::state {
namespace {

using engine::BatchItem;
using engine::Engine;
using engine::Step;
using policy::Method;

// Rows of a recomputation through several layers whose cost isn't known yet.
constexpr int64_t kFewRows = 16;

// The prefill of what is not restored, the first batch of it layer by layer behind the restore.
class NewTokens {
 public:
  NewTokens(Engine& engine, const RestoreRun& run, int64_t first)
      : engine_(engine), run_(run), next_(first) {}

  // Prepares the next batch, of at most so many tokens. kResourceExhausted: the arena has no room,
  // and nothing has changed.
  Status begin(int64_t most) {
    const auto n_tokens = static_cast<int64_t>(run_.tokens.size());
    const int64_t n = std::min<int64_t>({n_tokens - next_, engine_.options().max_batch_rows, most});
    const auto tokens = run_.tokens.subspan(next_, n);
    const BatchItem item{
        .seq = run_.seq,
        .tokens = tokens,
        .first_pos = next_,
        .output = next_ + n == n_tokens ? BatchItem::Output::kLast : BatchItem::Output::kNone};
    HCACHE_ASSIGN_OR_RETURN(Step step, engine_.prepare({&item, 1}));
    if (run_.before_step) run_.before_step(next_, tokens);
    step_.emplace(std::move(step));
    next_ += n;
    layers_ = 0;
    return {};
  }
  Status begin() { return begin(std::numeric_limits<int64_t>::max()); }
  Status run_layers(int begin, int end) {
    layers_ = end;
    return engine_.run_layers(*step_, begin, end);
  }
  // That the batch in hand has run through.
  [[nodiscard]] int layers() const { return layers_; }
  Status finish() {
    HCACHE_ASSIGN_OR_RETURN(const engine::Logits logits, engine_.finish(*step_));
    if (!logits.rows.empty()) logits_.assign(logits.rows[0].begin(), logits.rows[0].end());
    return {};
  }
  [[nodiscard]] bool done() const { return next_ == static_cast<int64_t>(run_.tokens.size()); }
  [[nodiscard]] double fraction() const {
    return static_cast<double>(next_) / static_cast<double>(run_.tokens.size());
  }
  std::vector<float> take_logits() { return std::move(logits_); }

 private:
  Engine& engine_;
  const RestoreRun& run_;
  int64_t next_;  // position behind the batch in hand
  std::optional<Step> step_;
  int layers_ = 0;
  std::vector<float> logits_;
};

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
    return static_cast<double>(cursor_.layer) / static_cast<double>(engine_.n_layer());
  }
  const RestoreReport& report() const override { return report_; }
  const std::optional<PageFailure>& failure() const override { return failure_; }

  // --- run_restore's ---
  Status reserve();
  Status recompute_prefix();
  Status restore_layer(int layer);
  // Nothing of the ring is read any more.
  Status finish();
  // Runs an engine call and counts its time as compute.
  template <typename F>
  auto timed(F&& call) {
    const int64_t start = env_.monotonic_ns();
    auto result = call();
    report_.compute_busy_s += elapsed(start);
    return result;
  }
  // The same for layers [begin, end) of the restore.
  template <typename F>
  auto timed_layers(int begin, int end, F&& call) {
    const double begin_s = elapsed(start_ns_);
    auto result = timed(std::forward<F>(call));
    for (int layer = begin; layer < end; ++layer) {
      LayerTimes& times = report_.layers[layer];
      if (times.compute_end_s == 0) times.compute_begin_s = begin_s;
      times.compute_end_s = elapsed(start_ns_);
    }
    return result;
  }
  // The same for rows of one layer that are projected.
  template <typename F>
  auto timed_projection(int layer, F&& call) {
    const double before_s = report_.compute_busy_s;
    auto result = timed_layers(layer, layer + 1, std::forward<F>(call));
    report_.project_busy_s += report_.compute_busy_s - before_s;
    return result;
  }
  Status report_progress(double fraction) {
    if (run_.progress && !run_.progress(fraction)) return cancelled("the restore was cancelled");
    return {};
  }
  [[nodiscard]] double elapsed(int64_t since_ns) const {
    return static_cast<double>(env_.monotonic_ns() - since_ns) * 1e-9;
  }
  // The sequence is empty again and nothing reads the ring.
  void abandon();

 private:
  // The next row to be restored: layer, segment of the layer, page of the segment, row of the page.
  struct Cursor {
    int layer = 0;
    size_t segment = 0;
    size_t page = 0;
    int64_t row = 0;
  };
  // Hidden rows that wait for their projection.
  struct Staged {
    int64_t begin = 0;
    int64_t rows = 0;
    ggml_type type = GGML_TYPE_COUNT;
  };

  // Runs new tokens through the next layer if it is restored. False: nothing could be done.
  Result<bool> follow(int64_t most_rows);
  Result<bool> begin_to_follow(int64_t most_rows);
  Status end_follow();
  Status recompute_rows(int64_t n);
  [[nodiscard]] int64_t recompute_slice(const Slice& slice, double left_s) const;
  // One page, or the part of it that fills a slice. False: the page has not been read yet.
  Result<bool> restore_some(const Slice& slice);
  Status stage(const PlannedPage& page, int64_t slice_rows);
  Status load(const PlannedPage& page);
  Status project();
  void next_page();
  // Makes view_ the cursor's page. False: it has not been read yet, and `wait` is false. An error
  // with failure_ set: the page can't be used.
  Result<bool> fetch_page(const PlannedPage& page, bool wait);
  void note_read(Method method);  // view_'s bytes, and its times as its layer's
  Status release_done(bool all);

  Env& env_;
  Engine& engine_;
  store::Store* store_;
  const RestoreRun run_;
  const policy::Plan& plan_;

  Phase phase_ = Phase::kWorking;
  int64_t start_ns_ = 0;
  bool reserved_ = false;
  int64_t recomputed_rows_ = 0;
  double recompute_row_s_ = 0;                // of the newest rows; 0: not known yet
  double unit_s_ = 0;                         // what a unit of advance() is expected to take
  std::vector<std::vector<Segment>> layers_;  // per layer
  Cursor cursor_;
  Staged staged_;
  std::optional<NewTokens> following_;  // on their way through the layers
  std::unique_ptr<store::PageReader> reader_;
  std::optional<store::PageView> view_;  // of the cursor's page
  struct Held {
    Engine::Ticket ticket = 0;
    size_t index = 0;
  };
  std::deque<Held> held_;  // pages the device may still be reading
  std::optional<PageFailure> failure_;
  RestoreReport report_;
};

Status RestorationImpl::open() {
  start_ns_ = env_.monotonic_ns();
  HCACHE_ASSIGN_OR_RETURN(layers_, planned_pages(engine_, run_.match, plan_));
  store::ReaderOptions options;
  options.ring_bytes = run_.ring_bytes;
  options.remote_timeout_s = run_.remote_timeout_s;
  HCACHE_ASSIGN_OR_RETURN(reader_, open_reader(store_, requests_of(layers_), options));
  report_.layers.resize(engine_.n_layer());
  for (int layer = 0; layer < engine_.n_layer() && !plan_.runs.empty(); ++layer) {
    report_.layers[layer].method = plan_.runs[0].layers[layer];
  }
  report_.schedule = plan_.schedule;
  report_.restored_tokens = plan_.restored_tokens;
  report_.predicted_s = plan_.predicted.makespan_s;
  report_.predicted_restore_s = plan_.predicted.restored_s;
  report_.predicted_project_s = plan_.predicted.project_busy_s;
  for (const policy::PlanRun& run : plan_.runs) {
    const auto count = [&](Method m) {
      return std::count(run.layers.begin(), run.layers.end(), m);
    };
    const auto hidden = count(Method::kHidden);
    const auto kv = count(Method::kKv);
    const auto recomputed = count(Method::kRecompute);
    if (recomputed > hidden && recomputed > kv) {
      report_.tokens_recomputed += run.tokens;
    } else if (hidden >= kv) {
      report_.tokens_hidden += run.tokens;
    } else {
      report_.tokens_kv += run.tokens;
    }
  }
  return {};
}

Status RestorationImpl::reserve() {
  HCACHE_RETURN_IF_ERROR(engine_.reserve_rows(run_.seq, plan_.restored_tokens));
  reserved_ = true;
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
    held_.pop_front();
  }
  return {};
}

Result<bool> RestorationImpl::fetch_page(const PlannedPage& page, bool wait) {
  if (view_) return true;
  HCACHE_RETURN_IF_ERROR(release_done(false));
  HCACHE_ASSIGN_OR_RETURN(view_, reader_->try_next());
  if (!view_) {
    // The reader may be out of ring space because of pages that are still held.
    HCACHE_RETURN_IF_ERROR(release_done(true));
    if (wait) {
      HCACHE_ASSIGN_OR_RETURN(view_, reader_->next());
    } else {
      HCACHE_ASSIGN_OR_RETURN(view_, reader_->try_next());
      if (!view_) return false;
    }
  }
  if (view_->status.ok()) {
    note_read(store::is_hidden(page.info->encoding) ? Method::kHidden : Method::kKv);
    return true;
  }
  const Status status = view_->status;
  failure_ = PageFailure{.chunk = page.chunk->info().id,
                         .layer = page.info->layer,
                         .encoding = page.info->encoding,
                         .status = status,
                         .remote = view_->origin == store::PageOrigin::kRemote};
  reader_->release(view_->index);
  view_.reset();
  return status;
}

void RestorationImpl::note_read(Method method) {
  TierBytes& pages = method == Method::kHidden ? report_.hidden_pages : report_.kv_pages;
  const uint64_t bytes = view_->bytes.size();
  switch (view_->origin) {
    case store::PageOrigin::kMemory: pages.dram += bytes; return;
    case store::PageOrigin::kDisk: pages.disk += bytes; break;
    case store::PageOrigin::kRemote: pages.remote += bytes; break;
  }
  const auto since_start = [&](int64_t ns) {
    return static_cast<double>(std::max<int64_t>(ns - start_ns_, 0)) * 1e-9;
  };
  LayerTimes& times = report_.layers[cursor_.layer];
  if (times.io_end_s == 0) times.io_begin_s = since_start(view_->read_begin_ns);
  times.io_begin_s = std::min(times.io_begin_s, since_start(view_->read_begin_ns));
  times.io_end_s = std::max(times.io_end_s, since_start(view_->read_end_ns));
}

Status RestorationImpl::load(const PlannedPage& page) {
  const size_t row_bytes = engine_.kv_row_bytes();
  const std::byte* k = view_->bytes.data() + page.row * row_bytes;
  const std::byte* v = k + page.chunk->info().tokens.size() * row_bytes;
  HCACHE_ASSIGN_OR_RETURN(const Engine::Ticket ticket,
                          timed_layers(cursor_.layer, cursor_.layer + 1, [&] {
                            return engine_.load_kv(run_.seq, cursor_.layer, page.begin,
                                                   static_cast<int>(page.n_rows), k, v);
                          }));
  held_.push_back({ticket, view_->index});
  next_page();
  return {};
}

// Projections are done in slices of consecutive rows in one encoding.
Status RestorationImpl::stage(const PlannedPage& page, int64_t slice_rows) {
  const ggml_type type = *hidden_type(page.info->encoding);
  if (type != staged_.type) HCACHE_RETURN_IF_ERROR(project());
  if (staged_.rows == 0) staged_ = {.begin = page.begin + cursor_.row, .rows = 0, .type = type};
  const int64_t n = std::min(slice_rows - staged_.rows, page.n_rows - cursor_.row);
  const std::byte* rows =
      view_->bytes.data() + (page.row + cursor_.row) * engine_.hidden_row_bytes(type);
  HCACHE_ASSIGN_OR_RETURN(const Engine::Ticket ticket, timed_projection(cursor_.layer, [&] {
                            return engine_.stage_hidden(run_.seq, cursor_.layer,
                                                        static_cast<int>(staged_.rows),
                                                        static_cast<int>(n), type, rows);
                          }));
  staged_.rows += n;
  cursor_.row += n;
  if (cursor_.row == page.n_rows) {
    held_.push_back({ticket, view_->index});
    next_page();
  }
  // At a segment's end the next rows are another layer's, or another method's.
  const bool segment_ends = cursor_.page == 0 && cursor_.row == 0;
  return staged_.rows >= slice_rows || segment_ends ? project() : Status();
}

Status RestorationImpl::project() {
  if (staged_.rows == 0) return {};
  const Staged staged = std::exchange(staged_, {});
  return timed_projection(cursor_.layer, [&] {
    return engine_.project_staged(run_.seq, cursor_.layer, staged.begin,
                                  static_cast<int>(staged.rows), staged.type);
  });
}

void RestorationImpl::next_page() {
  view_.reset();
  cursor_.row = 0;
  if (++cursor_.page < layers_[cursor_.layer][cursor_.segment].pages.size()) return;
  cursor_.page = 0;
  ++cursor_.segment;
}

Result<bool> RestorationImpl::restore_some(const Slice& slice) {
  const std::vector<Segment>& segments = layers_[cursor_.layer];
  if (cursor_.segment == segments.size()) {
    cursor_ = {.layer = cursor_.layer + 1};
    return true;
  }
  const Segment& segment = segments[cursor_.segment];
  const PlannedPage& page = segment.pages[cursor_.page];
  HCACHE_ASSIGN_OR_RETURN(const bool ready, fetch_page(page, slice.wait));
  if (!ready) {
    HCACHE_RETURN_IF_ERROR(project());  // rather than idle
    return false;
  }
  if (segment.method != Method::kHidden) {
    HCACHE_RETURN_IF_ERROR(load(page));
    return true;
  }
  const int64_t most = engine_.options().max_batch_rows;
  HCACHE_RETURN_IF_ERROR(stage(page, std::clamp<int64_t>(slice.rows, 1, most)));
  return true;
}

// A slice's rows are meant for one layer's projection; so many as fit run through several layers.
int64_t RestorationImpl::recompute_slice(const Slice& slice, double left_s) const {
  const auto rows = std::clamp<int64_t>(slice.rows, 1, engine_.options().max_batch_rows);
  if (plan_.recompute_layers == 1 || std::isinf(slice.budget_s)) return rows;
  const int64_t few = std::min(rows, kFewRows);
  if (recompute_row_s_ <= 0) return few;
  return std::clamp(static_cast<int64_t>(left_s / recompute_row_s_), few, rows);
}

// The layer prefix that no page covers: the history's tokens run through it, batch by batch; of the
// last such layer only K and V are needed.
Status RestorationImpl::recompute_rows(int64_t n) {
  const int layers = plan_.recompute_layers;
  n = std::min(n, plan_.restored_tokens - recomputed_rows_);
  const BatchItem item{.seq = run_.seq,
                       .tokens = run_.tokens.subspan(recomputed_rows_, n),
                       .first_pos = recomputed_rows_,
                       .output = BatchItem::Output::kNone};
  HCACHE_ASSIGN_OR_RETURN(Step step, engine_.prepare({&item, 1}));
  const double before_s = report_.compute_busy_s;
  const int64_t start = env_.monotonic_ns();
  HCACHE_RETURN_IF_ERROR(timed_layers(0, layers, [&]() -> Status {
    HCACHE_RETURN_IF_ERROR(engine_.run_layers(step, 0, layers - 1));
    return engine_.finish_with_kv(step, layers - 1);
  }));
  if (layers > 1) report_.project_busy_s += report_.compute_busy_s - before_s;
  recomputed_rows_ += n;
  recompute_row_s_ = elapsed(start) / static_cast<double>(n);
  return {};
}

Status RestorationImpl::recompute_prefix() {
  if (plan_.recompute_layers == 0) return {};
  while (recomputed_rows_ < plan_.restored_tokens) {
    HCACHE_RETURN_IF_ERROR(recompute_rows(engine_.options().max_batch_rows));
    HCACHE_RETURN_IF_ERROR(report_progress(0.5 * static_cast<double>(recomputed_rows_) /
                                           static_cast<double>(plan_.restored_tokens)));
  }
  return {};
}

Status RestorationImpl::restore_layer(int layer) {
  const Slice whole{.rows = run_.slice_rows};
  while (cursor_.layer <= layer) HCACHE_RETURN_IF_ERROR(restore_some(whole).status());
  return {};
}

Status RestorationImpl::finish() {
  HCACHE_RETURN_IF_ERROR(release_done(true));
  phase_ = Phase::kDone;
  if (!reader_) return {};
  const store::ReaderStats stats = reader_->stats();
  report_.bytes_read = stats.disk_bytes;
  report_.bytes_dram = stats.dram_bytes;
  report_.bytes_remote = stats.remote_bytes;
  report_.page_bytes = stats.page_bytes;
  report_.io_busy_s = stats.busy_s;
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

Result<bool> RestorationImpl::begin_to_follow(int64_t most_rows) {
  const int64_t first = plan_.restored_tokens;
  // The last token is the caller's: it wants the logits.
  const int64_t fresh = static_cast<int64_t>(run_.tokens.size()) - first - 1;
  const int64_t n = std::min<int64_t>({fresh, most_rows, engine_.options().max_batch_rows});
  if (n < kFewRows || cursor_.layer == 0) return false;
  NewTokens tokens(engine_, run_, first);
  const Status begun = tokens.begin(n);
  // Without room the caller finds some when they are due.
  if (begun.code() == Code::kResourceExhausted) return false;
  HCACHE_RETURN_IF_ERROR(begun);
  following_.emplace(std::move(tokens));
  report_.prefilled_tokens = n;
  return true;
}

Result<bool> RestorationImpl::follow(int64_t most_rows) {
  if (!following_) {
    HCACHE_ASSIGN_OR_RETURN(const bool begun, begin_to_follow(most_rows));
    if (!begun) return false;
  }
  const int layer = following_->layers();
  if (layer == cursor_.layer) return false;
  HCACHE_RETURN_IF_ERROR(timed([&] { return following_->run_layers(layer, layer + 1); }));
  return true;
}

Status RestorationImpl::end_follow() {
  const Status status = timed([&] { return following_->finish(); });
  following_.reset();
  return status;
}

Result<Restoration::Phase> RestorationImpl::advance(const Slice& slice) {
  if (phase_ == Phase::kDone || phase_ == Phase::kFailed) return phase_;
  const Status status = [&]() -> Status {
    const int64_t begin = env_.monotonic_ns();
    phase_ = Phase::kWorking;
    if (!reserved_) HCACHE_RETURN_IF_ERROR(reserve());
    double used_s = 0;
    do {
      if (plan_.recompute_layers > 0 && recomputed_rows_ < plan_.restored_tokens) {
        HCACHE_RETURN_IF_ERROR(recompute_rows(recompute_slice(slice, slice.budget_s - used_s)));
      } else if (cursor_.layer < engine_.n_layer()) {
        HCACHE_ASSIGN_OR_RETURN(bool went_on, restore_some(slice));
        if (!went_on) {
          HCACHE_ASSIGN_OR_RETURN(went_on, follow(slice.follow_rows));
        }
        if (!went_on) {
          phase_ = Phase::kWaitingForIo;
          return {};
        }
      } else {
        if (report_.restore_s == 0) report_.restore_s = elapsed(start_ns_);
        if (!following_) return finish();
        HCACHE_ASSIGN_OR_RETURN(const bool went_on, follow(0));
        if (!went_on) HCACHE_RETURN_IF_ERROR(end_follow());
      }
      const double unit_s = elapsed(begin) - used_s;
      used_s += unit_s;
      // One that was held up counts for a few units, cheap ones between dear ones don't hide these.
      unit_s_ = std::max(unit_s, unit_s_ / 2);
    } while (used_s + unit_s_ < slice.budget_s);
    return {};
  }();
  if (status.ok()) return phase_;
  abandon();
  if (failure_) return phase_;
  return status;
}

Status restore_and_prefill(RestorationImpl& restore, NewTokens& fresh, const policy::Plan& plan,
                           int n_layer, int64_t start_ns, double* restore_s) {
  HCACHE_RETURN_IF_ERROR(restore.reserve());
  HCACHE_RETURN_IF_ERROR(restore.recompute_prefix());
  HCACHE_RETURN_IF_ERROR(fresh.begin());
  if (plan.runs.empty()) {
    HCACHE_RETURN_IF_ERROR(restore.timed([&] { return fresh.run_layers(0, n_layer); }));
  }
  for (int layer = 0; layer < n_layer && !plan.runs.empty(); ++layer) {
    HCACHE_RETURN_IF_ERROR(restore.restore_layer(layer));
    if (layer == n_layer - 1) *restore_s = restore.elapsed(start_ns);
    HCACHE_RETURN_IF_ERROR(restore.timed([&] { return fresh.run_layers(layer, layer + 1); }));
    HCACHE_RETURN_IF_ERROR(
        restore.report_progress(static_cast<double>(layer + 1) / static_cast<double>(n_layer)));
  }
  while (true) {
    HCACHE_RETURN_IF_ERROR(restore.timed([&] { return fresh.finish(); }));
    HCACHE_RETURN_IF_ERROR(restore.report_progress(fresh.fraction()));
    if (fresh.done()) return restore.finish();
    HCACHE_RETURN_IF_ERROR(fresh.begin());
    HCACHE_RETURN_IF_ERROR(restore.timed([&] { return fresh.run_layers(0, n_layer); }));
  }
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

Result<RestoreOutcome> run_restore(Env& env, Engine& engine, store::Store* store,
                                   const RestoreRun& run) {
  HCACHE_RETURN_IF_ERROR(check_run(store, run));
  const policy::Plan& plan = *run.plan;
  if (plan.restored_tokens >= static_cast<int64_t>(run.tokens.size())) {
    return invalid_argument("a prefill needs a plan that leaves at least the last token");
  }
  const int64_t start = env.monotonic_ns();
  RestorationImpl restore(env, engine, store, run);
  HCACHE_RETURN_IF_ERROR(restore.open());
  NewTokens fresh(engine, run, plan.restored_tokens);
  double restore_s = 0;
  const Status status =
      restore_and_prefill(restore, fresh, plan, engine.n_layer(), start, &restore_s);
  RestoreOutcome outcome;
  if (!status.ok()) {
    restore.abandon();
    if (!restore.failure()) return status;
    outcome.failure = restore.failure();
    return outcome;
  }
  outcome.report = restore.report();
  outcome.report.restore_s = restore_s;
  outcome.report.ttft_s = restore.elapsed(start);
  outcome.report.prefilled_tokens = static_cast<int64_t>(run.tokens.size()) - plan.restored_tokens;
  outcome.logits = fresh.take_logits();
  return outcome;
}

}  // namespace hcache::state
