#include "state/restorer.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>

#include "state/identity.h"

namespace hcache::state {
namespace {

using engine::BatchItem;
using engine::Engine;
using engine::Step;
using policy::Method;

// Where a chunk's rows stand in the history.
struct ChunkSpan {
  const store::MatchedChunk* chunk = nullptr;
  int64_t begin = 0;
  int64_t end = 0;
};

std::vector<ChunkSpan> chunk_spans(const store::Match& match, int64_t max_rows) {
  std::vector<ChunkSpan> spans;
  int64_t begin = 0;
  for (const store::MatchedChunk& chunk : match.chunks) {
    if (begin >= max_rows) break;
    const int64_t end = std::min<int64_t>(begin + chunk.usable_rows, max_rows);
    spans.push_back({&chunk, begin, end});
    begin = end;
  }
  return spans;
}

// The chunk's page for a method, or nullptr where this engine can't use what is stored.
const store::PageInfo* usable_page(Engine& engine, const store::ChunkInfo& info, int layer,
                                   Method method) {
  for (const store::PageInfo& page : info.pages) {
    if (page.layer != layer) continue;
    const size_t n_tokens = info.tokens.size();
    if (method == Method::kKv && page.encoding == store::Encoding::kKv) {
      const auto type = element_type(engine.options().kv_type);
      const bool fits = page.bytes == 2 * engine.kv_row_bytes() * n_tokens;
      if (info.k_type == type && info.v_type == type && fits) return &page;
    }
    if (method == Method::kHidden && store::is_hidden(page.encoding)) {
      const auto type = hidden_type(page.encoding);
      if (type && page.bytes == engine.hidden_row_bytes(*type) * n_tokens &&
          engine.can_project(*type)) {
        return &page;
      }
    }
  }
  return nullptr;
}

// One page of the schedule and the rows of it that are used.
struct PlannedPage {
  const store::PageInfo* info = nullptr;
  const store::ChunkInfo* chunk = nullptr;
  int64_t begin = 0;  // position of the first used row
  int64_t n_rows = 0;
  int64_t row = 0;  // of the page
};

// The pages of one layer in one run, in order, and what is done with them.
struct Segment {
  Method method = Method::kKv;
  std::vector<PlannedPage> pages;
};

class Restore {
 public:
  Restore(Env& env, Engine& engine, store::Store* store, const RestoreRun& run)
      : env_(env), engine_(engine), store_(store), run_(run), plan_(*run.plan) {}

  Result<RestoreOutcome> execute();

 private:
  Status collect_pages();
  Status open_reader();
  Status recompute_prefix();
  Status begin_new_tokens();
  Status restore_layer(int layer);
  Status stage_pages(int layer, const Segment& segment);
  Status load_pages(int layer, const Segment& segment);
  Status finish_new_tokens();
  // The next page of the schedule; kDataLoss and others with failure_ set when it can't be used.
  Result<store::PageView> next_page(const PlannedPage& page, int layer);
  Status release_done(bool all);
  Status report_progress(double fraction) {
    if (run_.progress && !run_.progress(fraction)) return cancelled("the restore was cancelled");
    return {};
  }
  [[nodiscard]] double elapsed(int64_t since_ns) const {
    return static_cast<double>(env_.monotonic_ns() - since_ns) * 1e-9;
  }
  // Runs an engine call and counts its time as compute.
  template <typename F>
  auto timed(F&& call) {
    const int64_t start = env_.monotonic_ns();
    auto result = call();
    compute_s_ += elapsed(start);
    return result;
  }

  Env& env_;
  Engine& engine_;
  store::Store* store_;
  const RestoreRun& run_;
  const policy::Plan& plan_;

  std::vector<std::vector<Segment>> layers_;  // per layer
  std::unique_ptr<store::PageReader> reader_;
  struct Held {
    Engine::Ticket ticket = 0;
    size_t index = 0;
  };
  std::deque<Held> held_;     // pages the device may still be reading
  std::optional<Step> step_;  // the first batch of new tokens
  int64_t step_tokens_ = 0;
  int step_layer_ = 0;
  std::optional<PageFailure> failure_;
  std::vector<float> logits_;
  double compute_s_ = 0;
};

Status Restore::collect_pages() {
  const int n_layer = engine_.n_layer();
  layers_.assign(n_layer, {});
  if (plan_.runs.empty()) return {};
  const std::vector<ChunkSpan> spans = chunk_spans(*run_.match, plan_.restored_tokens);
  for (int layer = plan_.recompute_layers; layer < n_layer; ++layer) {
    for (const policy::PlanRun& run : plan_.runs) {
      Segment segment{.method = run.layers[layer], .pages = {}};
      for (const ChunkSpan& span : spans) {
        const int64_t begin = std::max(span.begin, run.begin);
        const int64_t end = std::min(span.end, run.begin + run.tokens);
        if (begin >= end) continue;
        const store::ChunkInfo& info = span.chunk->chunk.info();
        const store::PageInfo* page = usable_page(engine_, info, layer, segment.method);
        if (page == nullptr) {
          return internal_error(
              fmt::format("the plan wants {} of layer {} of chunk {}, which has none",
                          policy::method_name(segment.method), layer, to_hex(info.id)));
        }
        segment.pages.push_back({page, &info, begin, end - begin, begin - span.begin});
      }
      layers_[layer].push_back(std::move(segment));
    }
  }
  return {};
}

Status Restore::open_reader() {
  std::vector<store::PageRequest> requests;
  size_t largest = 0;
  const std::vector<ChunkSpan> spans = chunk_spans(*run_.match, plan_.restored_tokens);
  for (const std::vector<Segment>& segments : layers_) {
    for (const Segment& segment : segments) {
      for (const PlannedPage& page : segment.pages) {
        largest = std::max<size_t>(largest, page.info->bytes);
        // Spans are in order of position: the page's chunk is the one that holds its first row.
        const auto span =
            std::upper_bound(spans.begin(), spans.end(), page.begin,
                             [](int64_t position, const ChunkSpan& s) { return position < s.end; });
        requests.push_back({span->chunk->chunk, page.info->layer, page.info->encoding});
      }
    }
  }
  if (requests.empty()) return {};
  store::ReaderOptions options;
  options.ring_bytes = std::max<uint64_t>(run_.ring_bytes, 8 * (largest + kDirectAlignment));
  options.link_bytes_per_s = run_.link_bytes_per_s;
  HCACHE_ASSIGN_OR_RETURN(reader_, store_->new_reader(options));
  return reader_->submit(requests);
}

// Gives back ring memory that the device has read; `all` waits for the rest.
Status Restore::release_done(bool all) {
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

Result<store::PageView> Restore::next_page(const PlannedPage& page, int layer) {
  HCACHE_RETURN_IF_ERROR(release_done(false));
  HCACHE_ASSIGN_OR_RETURN(std::optional<store::PageView> view, reader_->try_next());
  if (!view) {
    // The reader may be out of ring space because of pages that are still held.
    HCACHE_RETURN_IF_ERROR(release_done(true));
    HCACHE_ASSIGN_OR_RETURN(view, reader_->next());
  }
  if (!view->status.ok()) {
    failure_ = PageFailure{.chunk = page.chunk->id,
                           .layer = static_cast<uint16_t>(layer),
                           .encoding = page.info->encoding,
                           .status = view->status};
    reader_->release(view->index);
    return view->status;
  }
  return *view;
}

Status Restore::load_pages(int layer, const Segment& segment) {
  const size_t row_bytes = engine_.kv_row_bytes();
  for (const PlannedPage& page : segment.pages) {
    HCACHE_ASSIGN_OR_RETURN(const store::PageView view, next_page(page, layer));
    const std::byte* k = view.bytes.data() + page.row * row_bytes;
    const std::byte* v = k + page.chunk->tokens.size() * row_bytes;
    HCACHE_ASSIGN_OR_RETURN(const Engine::Ticket ticket, timed([&] {
                              return engine_.load_kv(run_.seq, layer, page.begin,
                                                     static_cast<int>(page.n_rows), k, v);
                            }));
    held_.push_back({ticket, view.index});
  }
  return {};
}

// Projects in slices of consecutive rows in one encoding.
Status Restore::stage_pages(int layer, const Segment& segment) {
  const int64_t slice_rows = std::min<int64_t>(run_.slice_rows, engine_.options().max_batch_rows);
  int64_t slice_begin = 0;
  int64_t n_staged = 0;
  ggml_type type = GGML_TYPE_COUNT;
  const auto project = [&]() -> Status {
    if (n_staged == 0) return {};
    const int n = static_cast<int>(n_staged);
    n_staged = 0;
    return timed([&] { return engine_.project_staged(run_.seq, layer, slice_begin, n, type); });
  };
  for (const PlannedPage& page : segment.pages) {
    const ggml_type page_type = *hidden_type(page.info->encoding);
    if (page_type != type) {
      HCACHE_RETURN_IF_ERROR(project());
      type = page_type;
    }
    HCACHE_ASSIGN_OR_RETURN(const store::PageView view, next_page(page, layer));
    const size_t row_bytes = engine_.hidden_row_bytes(type);
    Engine::Ticket ticket = 0;
    for (int64_t done = 0; done < page.n_rows;) {
      if (n_staged == slice_rows) HCACHE_RETURN_IF_ERROR(project());
      if (n_staged == 0) slice_begin = page.begin + done;
      const int64_t n = std::min(slice_rows - n_staged, page.n_rows - done);
      HCACHE_ASSIGN_OR_RETURN(ticket, timed([&] {
                                return engine_.stage_hidden(
                                    static_cast<int>(n_staged), static_cast<int>(n), type,
                                    view.bytes.data() + (page.row + done) * row_bytes);
                              }));
      n_staged += n;
      done += n;
    }
    held_.push_back({ticket, view.index});
  }
  return project();
}

// The layer prefix that no page covers: the history's tokens run through it, batch by batch; of the
// last such layer only K and V are needed.
Status Restore::recompute_prefix() {
  const int n = plan_.recompute_layers;
  if (n == 0) return {};
  const int64_t batch = engine_.options().max_batch_rows;
  for (int64_t begin = 0; begin < plan_.restored_tokens; begin += batch) {
    const int64_t rows = std::min(batch, plan_.restored_tokens - begin);
    const BatchItem item{.seq = run_.seq,
                         .tokens = run_.tokens.subspan(begin, rows),
                         .first_pos = begin,
                         .output = BatchItem::Output::kNone};
    HCACHE_ASSIGN_OR_RETURN(Step step, engine_.prepare({&item, 1}));
    HCACHE_RETURN_IF_ERROR(timed([&]() -> Status {
      HCACHE_RETURN_IF_ERROR(engine_.run_layers(step, 0, n - 1));
      return engine_.finish_with_kv(step, n - 1);
    }));
    HCACHE_RETURN_IF_ERROR(report_progress(0.5 * static_cast<double>(begin + rows) /
                                           static_cast<double>(plan_.restored_tokens)));
  }
  return {};
}

Status Restore::begin_new_tokens() {
  const int64_t first = plan_.restored_tokens;
  const auto n_new = static_cast<int64_t>(run_.tokens.size()) - first;
  step_tokens_ = std::min<int64_t>(n_new, engine_.options().max_batch_rows);
  const auto tokens = run_.tokens.subspan(first, step_tokens_);
  if (run_.before_step) run_.before_step(first, tokens);
  const BatchItem item{
      .seq = run_.seq,
      .tokens = tokens,
      .first_pos = first,
      .output = step_tokens_ == n_new ? BatchItem::Output::kLast : BatchItem::Output::kNone};
  HCACHE_ASSIGN_OR_RETURN(Step step, engine_.prepare({&item, 1}));
  step_.emplace(std::move(step));
  return {};
}

Status Restore::restore_layer(int layer) {
  for (const Segment& segment : layers_[layer]) {
    if (segment.pages.empty()) continue;
    HCACHE_RETURN_IF_ERROR(segment.method == Method::kHidden ? stage_pages(layer, segment)
                                                             : load_pages(layer, segment));
  }
  return {};
}

// The rest of the new tokens, batch by batch, and the logits of the last one.
Status Restore::finish_new_tokens() {
  const auto n_tokens = static_cast<int64_t>(run_.tokens.size());
  int64_t done = plan_.restored_tokens + step_tokens_;
  while (true) {
    HCACHE_ASSIGN_OR_RETURN(const engine::Logits logits,
                            timed([&] { return engine_.finish(*step_); }));
    if (!logits.rows.empty()) logits_.assign(logits.rows[0].begin(), logits.rows[0].end());
    HCACHE_RETURN_IF_ERROR(
        report_progress(static_cast<double>(done) / static_cast<double>(n_tokens)));
    if (done == n_tokens) return {};
    const int64_t n = std::min<int64_t>(n_tokens - done, engine_.options().max_batch_rows);
    const auto tokens = run_.tokens.subspan(done, n);
    if (run_.before_step) run_.before_step(done, tokens);
    const BatchItem item{
        .seq = run_.seq,
        .tokens = tokens,
        .first_pos = -1,
        .output = done + n == n_tokens ? BatchItem::Output::kLast : BatchItem::Output::kNone};
    HCACHE_ASSIGN_OR_RETURN(Step step, engine_.prepare({&item, 1}));
    step_.emplace(std::move(step));
    HCACHE_RETURN_IF_ERROR(timed([&] { return engine_.run_layers(*step_, 0, engine_.n_layer()); }));
    done += n;
  }
}

Result<RestoreOutcome> Restore::execute() {
  const int64_t start = env_.monotonic_ns();
  const int n_layer = engine_.n_layer();
  RestoreOutcome outcome;
  RestoreReport& report = outcome.report;

  const Status status = [&]() -> Status {
    HCACHE_RETURN_IF_ERROR(collect_pages());
    HCACHE_RETURN_IF_ERROR(open_reader());  // reads begin here
    HCACHE_RETURN_IF_ERROR(engine_.reserve_rows(run_.seq, plan_.restored_tokens));
    HCACHE_RETURN_IF_ERROR(recompute_prefix());
    HCACHE_RETURN_IF_ERROR(begin_new_tokens());
    if (plan_.runs.empty()) {
      HCACHE_RETURN_IF_ERROR(timed([&] { return engine_.run_layers(*step_, 0, n_layer); }));
    } else {
      for (int layer = 0; layer < n_layer; ++layer) {
        HCACHE_RETURN_IF_ERROR(restore_layer(layer));
        if (layer == n_layer - 1) report.restore_s = elapsed(start);
        HCACHE_RETURN_IF_ERROR(timed([&] { return engine_.run_layers(*step_, layer, layer + 1); }));
        HCACHE_RETURN_IF_ERROR(report_progress(static_cast<double>(layer + 1) / n_layer));
      }
      HCACHE_RETURN_IF_ERROR(release_done(true));
    }
    return finish_new_tokens();
  }();

  if (!status.ok()) {
    step_.reset();
    // Nothing may still be reading the ring, and the sequence goes back to empty.
    engine_.synchronize().ignore("the first error is the one to report");
    if (reader_) reader_->cancel();
    engine_.trim_sequence(run_.seq, 0).ignore("the first error is the one to report");
    if (!failure_) return status;
    outcome.failure = failure_;
    return outcome;
  }

  report.ttft_s = elapsed(start);
  report.schedule = plan_.schedule;
  report.restored_tokens = plan_.restored_tokens;
  report.prefilled_tokens = static_cast<int64_t>(run_.tokens.size()) - plan_.restored_tokens;
  report.predicted_s = plan_.predicted.makespan_s;
  report.compute_busy_s = compute_s_;
  for (const policy::PlanRun& run : plan_.runs) {
    const auto count = [&](Method m) {
      return std::count(run.layers.begin(), run.layers.end(), m);
    };
    const auto hidden = count(Method::kHidden);
    const auto kv = count(Method::kKv);
    const auto recomputed = count(Method::kRecompute);
    if (recomputed > hidden && recomputed > kv) {
      report.tokens_recomputed += run.tokens;
    } else if (hidden >= kv) {
      report.tokens_hidden += run.tokens;
    } else {
      report.tokens_kv += run.tokens;
    }
  }
  if (reader_) {
    const store::ReaderStats stats = reader_->stats();
    report.bytes_read = stats.disk_bytes;
    report.page_bytes = stats.page_bytes;
    report.io_busy_s = stats.busy_s;
  }
  outcome.logits = std::move(logits_);
  return outcome;
}

}  // namespace

policy::Availability availability(Engine& engine, const store::Match& match, int64_t max_rows) {
  policy::Availability result;
  for (const ChunkSpan& span : chunk_spans(match, max_rows)) {
    policy::AvailableRun run{.tokens = span.end - span.begin, .layers = {}};
    for (int layer = 0; layer < engine.n_layer(); ++layer) {
      const store::ChunkInfo& info = span.chunk->chunk.info();
      int mask = policy::kNoEncoding;
      if (usable_page(engine, info, layer, Method::kHidden) != nullptr) mask |= policy::kHasHidden;
      if (usable_page(engine, info, layer, Method::kKv) != nullptr) mask |= policy::kHasKv;
      run.layers.push_back(static_cast<policy::Encoding>(mask));
    }
    if (!result.runs.empty() && result.runs.back().layers == run.layers) {
      result.runs.back().tokens += run.tokens;
    } else {
      result.runs.push_back(std::move(run));
    }
  }
  return result;
}

Result<RestoreOutcome> run_restore(Env& env, Engine& engine, store::Store* store,
                                   const RestoreRun& run) {
  if (run.plan == nullptr || run.tokens.empty() ||
      run.plan->restored_tokens >= static_cast<int64_t>(run.tokens.size())) {
    return invalid_argument("a restore needs a plan that leaves at least the last token");
  }
  if (!run.plan->runs.empty() && (store == nullptr || run.match == nullptr)) {
    return invalid_argument("a plan that restores needs a store and a match");
  }
  return Restore(env, engine, store, run).execute();
}

}  // namespace hcache::state
