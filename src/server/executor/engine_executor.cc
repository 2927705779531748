#include "engine_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.h"

namespace hcache::server {
namespace {

using engine::BatchItem;
using scheduler::RestoreStatus;
using scheduler::SeqId;
using state::Restoration;

// A slice of fewer rows pays more for reading the weights than for its rows.
constexpr int64_t kMinSliceRows = 32;
// Each attempt beyond the first drops a damaged page.
constexpr int kMaxAttempts = 16;
// Requests whose state is read ahead at a time: one, and one to go on with while a step computes.
constexpr size_t kMaxAhead = 2;
constexpr size_t kMaxSpans = 12;  // of a timeline: what a person can take in

// Neighbours with the same method in groups, few enough to look at.
std::vector<scheduler::RestoreSpan> timeline(const std::vector<state::LayerTimes>& layers) {
  const size_t most = (layers.size() + kMaxSpans - 1) / kMaxSpans;  // layers of a group
  std::vector<scheduler::RestoreSpan> spans;
  for (size_t i = 0; i < layers.size(); ++i) {
    const state::LayerTimes& layer = layers[i];
    const auto number = static_cast<int32_t>(i);
    const std::string method(policy::method_name(layer.method));
    if (spans.empty() || spans.back().method != method ||
        number - spans.back().first_layer >= static_cast<int32_t>(most)) {
      spans.push_back({.first_layer = number,
                       .last_layer = number,
                       .method = method,
                       .io_begin_s = layer.io_begin_s,
                       .io_end_s = layer.io_end_s,
                       .compute_begin_s = layer.compute_begin_s,
                       .compute_end_s = layer.compute_end_s});
      continue;
    }
    scheduler::RestoreSpan& span = spans.back();
    span.last_layer = number;
    span.io_end_s = std::max(span.io_end_s, layer.io_end_s);
    span.compute_end_s = std::max(span.compute_end_s, layer.compute_end_s);
  }
  return spans;
}

}  // namespace

// A restore in flight. Its tokens and plan stay where they are: the restoration points to them.
struct EngineExecutor::Restore {
  std::vector<int32_t> tokens;  // of the whole request
  int64_t n_upto = 0;           // of them: how many are restored at most
  double compute_share = 1;     // policy::RestoreCosts'
  state::PlannedRestore planned;
  std::unique_ptr<Restoration> work;  // null: there is nothing to restore
  int attempts = 0;
  double busy_s = 0;
};

EngineExecutor::EngineExecutor(Env& env, state::Runtime& runtime,
                               const EngineExecutorOptions& options)
    : env_(env),
      runtime_(runtime),
      options_(options),
      window_(options.fetch, static_cast<double>(options.dram_bytes)) {
  const engine::EngineOptions& engine = runtime.engine().options();
  limits_.arena_cells = engine.arena_tokens;
  limits_.context = std::min<int64_t>(runtime.model().hparams().n_ctx_train, limits_.arena_cells);
  limits_.max_step_rows = engine.max_batch_rows;
  limits_.max_sequences = options.max_sequences;
  store::Store* store = runtime.store();
  if (options.fetch == policy::FetchPolicy::kSchedulerAware && options.dram_bytes > 0 &&
      store != nullptr) {
    read_ahead_ = state::ReadAhead::begin(*store, {});
  }
}

EngineExecutor::~EngineExecutor() {
  while (!sequences_.empty()) release(sequences_.begin()->first);
}

Result<EngineExecutor::Sequence*> EngineExecutor::find(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end()) return not_found(fmt::format("there is no sequence {}", seq));
  return &it->second;
}

void EngineExecutor::begin_saving(SeqId seq, const Sequence& sequence,
                                  std::span<const int32_t> tokens, store::ChunkRef tail) {
  if (!sequence.save) return;
  runtime_.saver()->begin(seq, runtime_.fingerprint(), sequence.salt, tokens, std::move(tail));
}

Result<SeqId> EngineExecutor::create(const Salt& salt, bool save) {
  HCACHE_ASSIGN_OR_RETURN(const SeqId seq, runtime_.engine().create_sequence());
  Sequence& sequence = sequences_[seq];
  sequence.salt = salt;
  sequence.save = save && runtime_.saver() != nullptr;
  begin_saving(seq, sequence, {}, {});
  return seq;
}

Result<SeqId> EngineExecutor::fork(SeqId src, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(const Sequence* source, find(src));
  HCACHE_ASSIGN_OR_RETURN(const SeqId seq, runtime_.engine().fork_sequence(src, n_tokens));
  const bool save = source->save;
  Sequence& sequence = sequences_[seq];
  sequence.salt = source->salt;
  sequence.save = save;
  if (save) runtime_.saver()->fork(src, seq, n_tokens);
  return seq;
}

Status EngineExecutor::trim(SeqId seq, int64_t n_tokens) {
  HCACHE_RETURN_IF_ERROR(find(seq).status());
  // The saver hears of it with the next tokens, whose position tells.
  return runtime_.engine().trim_sequence(seq, n_tokens);
}

void EngineExecutor::release(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end()) return;
  it->second.restore.reset();
  const bool save = it->second.save;
  sequences_.erase(it);
  runtime_.engine().synchronize().ignore("what was captured before an error is still saved");
  if (save) runtime_.saver()->end(seq);
  runtime_.engine().release_sequence(seq).ignore("it exists: it was in the map");
}

Result<int64_t> EngineExecutor::saved_prefix(const Salt& salt, std::span<const int32_t> tokens) {
  store::Store* store = runtime_.store();
  if (store == nullptr || options_.restore_mode == policy::Mode::kRecompute) return 0;
  HCACHE_ASSIGN_OR_RETURN(const store::Match match,
                          store->match(runtime_.fingerprint(), salt.id, tokens));
  return static_cast<int64_t>(match.n_tokens);
}

// ---- The queue

void EngineExecutor::enqueued(const scheduler::Waiting& request) {
  store::Store* store = runtime_.store();
  if (request.restore == 0 || store == nullptr || options_.dram_bytes == 0) return;
  const auto rows = static_cast<size_t>(request.restore);
  const auto match =
      store->match(runtime_.fingerprint(), request.salt.id, request.tokens.first(rows));
  if (match.ok()) store->want(request.place, *match);
  ahead_[request.place] = {
      .salt = request.salt.id,
      .tokens = request.tokens.first(std::min(rows + 1, request.tokens.size()))};
  window_.add(request.place, static_cast<double>(runtime_.save_plan().bytes_per_token) *
                                 static_cast<double>(rows));
  fetch();
}

void EngineExecutor::dequeued(uint64_t place, bool admitted) {
  if (store::Store* store = runtime_.store(); store != nullptr) {
    admitted ? store->dispatch(place) : store->unwant(place);
  }
  ahead_.erase(place);
  window_.remove(place);
  if (read_ahead_) read_ahead_->drop(place);
}

void EngineExecutor::completed(uint64_t place) {
  if (runtime_.store() != nullptr) runtime_.store()->unwant(place);
}

void EngineExecutor::fetch() {
  while (read_ahead_ && read_ahead_->pending() < kMaxAhead) {
    const std::optional<uint64_t> place = window_.next();
    if (!place) return;
    if (const Status status = begin_fetch(*place); !status.ok()) {
      log::warn("nothing is read ahead for a request: {}", status.to_string());
    }
  }
}

Status EngineExecutor::begin_fetch(uint64_t place) {
  const Ahead& ahead = ahead_.at(place);
  state::StartOptions options;
  options.mode = options_.restore_mode;
  options.ahead = true;
  HCACHE_ASSIGN_OR_RETURN(const state::PlannedRestore planned,
                          runtime_.plan(ahead.tokens, ahead.salt, options));
  if (planned.plan.restored_tokens == 0) return {};
  return read_ahead_->add(place, runtime_.engine(), planned.match, planned.plan,
                          planned.remote_timeout_s);
}

uint64_t EngineExecutor::bytes_read_ahead() const {
  return read_ahead_ ? read_ahead_->bytes_read() : 0;
}

// ---- Restores

Status EngineExecutor::begin_restore(SeqId seq, std::span<const int32_t> tokens, int64_t upto,
                                     double compute_share) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  const auto n_tokens = static_cast<int64_t>(tokens.size());
  if (upto < 1 || upto > n_tokens) {
    return out_of_range(fmt::format("can't restore {} tokens of {}", upto, n_tokens));
  }
  sequence->restore = std::make_unique<Restore>();
  sequence->restore->tokens.assign(tokens.begin(), tokens.end());
  sequence->restore->n_upto = upto;
  sequence->restore->compute_share = compute_share;
  const Status status = open_restore(seq, *sequence);
  if (!status.ok()) sequence->restore.reset();
  return status;
}

Status EngineExecutor::open_restore(SeqId seq, Sequence& sequence) {
  Restore& restore = *sequence.restore;
  state::StartOptions options;
  options.mode = restore.attempts < kMaxAttempts ? options_.restore_mode : policy::Mode::kRecompute;
  options.save = sequence.save;
  options.compute_share = restore.compute_share;
  const std::span<const int32_t> tokens = restore.tokens;
  // The planner leaves the last token to be computed.
  const size_t n_planned = std::min(static_cast<size_t>(restore.n_upto) + 1, tokens.size());
  HCACHE_ASSIGN_OR_RETURN(restore.planned,
                          runtime_.plan(tokens.first(n_planned), sequence.salt.id, options));
  const int64_t n_tokens = restore.planned.plan.restored_tokens;
  if (n_tokens == 0) return {};
  HCACHE_RETURN_IF_ERROR(runtime_.engine().reserve_rows(seq, n_tokens));
  state::RestoreRun run;
  run.seq = seq;
  run.tokens = tokens;
  run.match = &restore.planned.match;
  run.plan = &restore.planned.plan;
  run.remote_timeout_s = restore.planned.remote_timeout_s;
  run.ring_bytes = options_.restore_ring_bytes;
  if (sequence.save) {
    run.before_step = [this, seq](int64_t first_pos, std::span<const int32_t> fresh) {
      runtime_.saver()->set_tokens(seq, first_pos, fresh);
    };
  }
  auto work = Restoration::begin(env_, runtime_.engine(), runtime_.store(), run);
  if (!work.ok()) {
    runtime_.engine().trim_sequence(seq, 0).ignore("the first error is the one to report");
    return work.status();
  }
  restore.work = std::move(*work);
  begin_saving(seq, sequence, tokens.first(static_cast<size_t>(n_tokens)), restore.planned.tail);
  return {};
}

// Rows whose projection fits the budget, by what it costs in the layer that costs most.
int64_t EngineExecutor::slice_rows(double budget_s) const {
  const int64_t most = limits_.max_step_rows;
  const double whole_s = runtime_.profile().layer.project.at(most);
  if (whole_s <= budget_s) return most;
  const auto rows = static_cast<int64_t>(static_cast<double>(most) * budget_s / whole_s);
  return std::clamp(rows, std::min(kMinSliceRows, most), most);
}

// New tokens that run through a layer within the budget, without what they see of the history.
int64_t EngineExecutor::follow_rows(double budget_s) const {
  const policy::CostCurve& dense = runtime_.profile().layer.dense;
  int64_t rows = limits_.max_step_rows;
  while (rows >= kMinSliceRows && dense.at(rows) > budget_s) rows -= kMinSliceRows;
  return std::max<int64_t>(rows, 0);
}

Result<RestoreStatus> EngineExecutor::advance_restore(SeqId seq, double budget_s) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  if (!sequence->restore) {
    return failed_precondition(fmt::format("sequence {} is not being restored", seq));
  }
  fetch();
  Restore& restore = *sequence->restore;
  if (!restore.work) return end_restore(seq, *sequence);
  const int64_t start_ns = env_.monotonic_ns();
  Result<Restoration::Phase> phase = restore.work->advance({.rows = slice_rows(budget_s),
                                                            .budget_s = budget_s,
                                                            .wait = false,
                                                            .follow_rows = follow_rows(budget_s)});
  RestoreStatus status;
  status.seconds = static_cast<double>(env_.monotonic_ns() - start_ns) * 1e-9;
  status.reserved = restore.n_upto + restore.work->report().prefilled_tokens;
  restore.busy_s += status.seconds;
  if (phase.ok() && *phase == Restoration::Phase::kFailed) {
    // The page is dropped, and what is left planned anew.
    const state::PageFailure failure = *restore.work->failure();
    restore.work.reset();
    restore.attempts = runtime_.discard(failure) ? restore.attempts + 1 : kMaxAttempts;
    const Status reopened = open_restore(seq, *sequence);
    if (reopened.ok()) {
      status.reserved = restore.n_upto;
      status.phase = RestoreStatus::Phase::kWorking;
      return status;
    }
    phase = reopened;
  }
  if (!phase.ok()) {
    sequence->restore.reset();
    begin_saving(seq, *sequence, {}, {});
    return phase.status();
  }
  if (*phase == Restoration::Phase::kDone) {
    HCACHE_ASSIGN_OR_RETURN(RestoreStatus done, end_restore(seq, *sequence));
    done.seconds = status.seconds;
    return done;
  }
  status.phase = *phase == Restoration::Phase::kWorking ? RestoreStatus::Phase::kWorking
                                                        : RestoreStatus::Phase::kWaitingForIo;
  status.fraction = restore.work->fraction();
  return status;
}

Result<RestoreStatus> EngineExecutor::end_restore(SeqId seq, Sequence& sequence) {
  const std::unique_ptr<Restore> restore = std::exchange(sequence.restore, nullptr);
  RestoreStatus status;
  status.phase = RestoreStatus::Phase::kDone;
  status.fraction = 1;
  status.tokens = runtime_.engine().length(seq);
  if (!restore->work) {
    // Nothing usable is left after damaged pages: the saver begins with the first token.
    if (restore->attempts > 0) begin_saving(seq, sequence, {}, {});
    return status;
  }
  const state::RestoreReport& report = restore->work->report();
  runtime_.observe(report);
  status.report.hidden_tokens = report.tokens_hidden;
  status.report.kv_tokens = report.tokens_kv;
  status.report.recomputed_tokens = report.tokens_recomputed;
  status.report.bytes_dram = report.bytes_dram;
  status.report.bytes_disk = report.bytes_read;
  status.report.bytes_remote = report.bytes_remote;
  const auto tiers = [](const state::TierBytes& bytes) {
    return scheduler::TierBytes{.dram = bytes.dram, .disk = bytes.disk, .remote = bytes.remote};
  };
  status.report.hidden_pages = tiers(report.hidden_pages);
  status.report.kv_pages = tiers(report.kv_pages);
  status.report.predicted_s = report.predicted_restore_s;
  status.report.schedule = report.schedule;
  status.report.timeline = timeline(report.layers);
  // What both took beyond the time that passed, they did at the same time.
  const double shorter = std::min(report.io_busy_s, restore->busy_s);
  if (shorter > 0) {
    const double both = report.io_busy_s + restore->busy_s - report.restore_s;
    status.report.overlap = std::clamp(both / shorter, 0.0, 1.0);
  }
  return status;
}

void EngineExecutor::request_flush(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end() || !it->second.save) return;
  // Rows of the last step may still be on their way to the saver.
  runtime_.engine().synchronize().ignore("what was captured before an error is still saved");
  runtime_.saver()->request_flush(seq);
}

int64_t EngineExecutor::durable_tokens(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end() || !it->second.save) return scheduler::kNotSaving;
  const int64_t n = runtime_.saver()->durable_tokens(seq);
  return n == state::Saver::kNotSaved ? scheduler::kNotSaving : n;
}

Result<scheduler::StepOutput> EngineExecutor::step(std::span<const scheduler::StepItem> items) {
  engine::Engine& engine = runtime_.engine();
  std::vector<BatchItem> batch;
  batch.reserve(items.size());
  for (const scheduler::StepItem& item : items) {
    batch.push_back(
        {.seq = item.seq,
         .tokens = item.tokens,
         .first_pos = -1,
         .output = item.wants_logits ? BatchItem::Output::kLast : BatchItem::Output::kNone});
  }
  const int64_t start_ns = env_.monotonic_ns();
  HCACHE_ASSIGN_OR_RETURN(engine::Step step, engine.prepare(batch));
  for (const scheduler::StepItem& item : items) {
    const auto it = sequences_.find(item.seq);
    if (it != sequences_.end() && it->second.save) {
      runtime_.saver()->set_tokens(item.seq, engine.length(item.seq), item.tokens);
    }
  }
  HCACHE_RETURN_IF_ERROR(engine.run_layers(step, 0, engine.n_layer()));
  HCACHE_ASSIGN_OR_RETURN(engine::Logits logits, engine.finish(step));
  scheduler::StepOutput output;
  output.logits = std::move(logits.rows);
  output.seconds = static_cast<double>(env_.monotonic_ns() - start_ns) * 1e-9;
  fetch();
  return output;
}

}  // namespace hcache::server
