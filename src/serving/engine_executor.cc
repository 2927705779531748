#include "engine_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "base/log.h"
#include "base/stall.h"
#include "engine_restore.h"
#include "policy/batching.h"
#include "policy/miss_cost.h"
#include "state/held_match.h"
#include "state/identity.h"

namespace hcache::serving {
namespace {

using engine::BatchItem;
using scheduler::RestoreStatus;
using scheduler::SeqId;
using state::Restoration;

// A slice of fewer rows pays more for reading the weights than for its rows.
constexpr int64_t kMinSliceRows = 32;
// New tokens behind restored layers begin with as many rows as take this part of a turn, and go on
// as long as they take that one: steps, which turns are a share of, differ a little. A layer alone
// between others' steps takes up to 1.6 times of what it does in a prefill.
constexpr double kFollowShare = 0.5;
constexpr double kKeepShare = 0.9;
// Each attempt beyond the first drops a damaged page.
constexpr int kMaxAttempts = 16;
// Requests whose state is read ahead at a time: one, and one to go on with while a step computes.
constexpr size_t kMaxAhead = 2;

// What the layers of each stage take for so many rows; none where stages can't compute at once.
std::vector<policy::CostCurve> overlapping_stages(state::Runtime& runtime) {
  std::vector<policy::CostCurve> costs;
  if (!runtime.engine().stages_overlap()) return costs;
  const state::CostProfile& profile = runtime.profile();
  const auto ranges = runtime.engine().stage_ranges();
  const bool by_stage = profile.stages.size() == ranges.size();
  for (size_t i = 0; i < ranges.size(); ++i) {
    const policy::LayerCosts& layer = by_stage ? profile.stages[i].layer : profile.layer;
    costs.push_back(layer.dense.scaled(ranges[i].second - ranges[i].first));
  }
  return costs;
}

BatchItem::Output output_of(scheduler::LogitsOf logits) {
  switch (logits) {
    case scheduler::LogitsOf::kNone: return BatchItem::Output::kNone;
    case scheduler::LogitsOf::kLast: return BatchItem::Output::kLast;
    case scheduler::LogitsOf::kAll: break;
  }
  return BatchItem::Output::kAll;
}

}  // namespace

EngineExecutor::EngineExecutor(Env& env, state::Runtime& runtime,
                               const EngineExecutorOptions& options)
    : env_(env),
      runtime_(runtime),
      options_(options),
      pipeline_(runtime.engine()),
      window_(options.fetch, static_cast<double>(options.dram_bytes)) {
  const engine::EngineOptions& engine = runtime.engine().options();
  limits_.arena_cells = engine.arena_tokens;
  limits_.context = std::min<int64_t>(runtime.model().hparams().n_ctx_train, limits_.arena_cells);
  if (options.max_context > 0) limits_.context = std::min(limits_.context, options.max_context);
  limits_.max_step_rows = engine.max_batch_rows;
  limits_.max_sequences = options.max_sequences;
  if (runtime.model().spec().learned_positions) {
    limits_.why_no_cuts = "the model has learned positions, which nothing can move";
  }
  if (engine.separate_layers) limits_.why_no_cuts = "layers do without rows (--kv-budget)";
  if (const int window = runtime.model().hparams().n_window; limits_.context < 2 * window) {
    limits_.why_no_cuts = fmt::format(
        "layers of the model see a window of {} rows, and half of a context of {} is "
        "less than that",
        window, limits_.context);
  }
  limits_.why_no_choice = runtime.engine().can_observe().message();
  stage_costs_ = overlapping_stages(runtime);
  store::Store* store = runtime.store();
  if (options.fetch == policy::FetchPolicy::kSchedulerAware && options.dram_bytes > 0 &&
      store != nullptr) {
    read_ahead_ = state::ReadAhead::begin(*store, {});
  }
}

EngineExecutor::~EngineExecutor() {
  pipeline_.clear();
  while (!sequences_.empty()) release(sequences_.begin()->first);
}

Result<EngineExecutor::Sequence*> EngineExecutor::find(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end()) return not_found(fmt::format("there is no sequence {}", seq));
  return &it->second;
}

state::SavedCut EngineExecutor::last_cut(const Sequence& sequence) {
  if (sequence.cuts.empty()) return {};
  const policy::HeldRows& held = sequence.cuts.back();
  return {.at = held.cut_at, .dropped = held.dropped(), .chosen = sequence.chosen};
}

void EngineExecutor::begin_saving(SeqId seq, const Sequence& sequence,
                                  std::span<const int32_t> tokens, store::ChunkRef tail) {
  if (!sequence.save) return;
  runtime_.saver()->begin(seq, state::chain_fingerprints(runtime_.fingerprint(), sequence.cuts),
                          sequence.salt, tokens, std::move(tail), last_cut(sequence));
}

Result<SeqId> EngineExecutor::create(const Salt& salt, bool save) {
  HCACHE_ASSIGN_OR_RETURN(const SeqId seq, runtime_.engine().create_sequence());
  if (!salt.adapters.empty()) {
    if (const Status status = runtime_.engine().set_adapters(seq, salt.adapters); !status.ok()) {
      runtime_.engine().release_sequence(seq).ignore("the first error is the one to report");
      return status;
    }
  }
  Sequence& sequence = sequences_[seq];
  sequence.salt = salt;
  sequence.save = save && runtime_.saver() != nullptr;
  begin_saving(seq, sequence, {}, {});
  return seq;
}

Result<SeqId> EngineExecutor::fork(SeqId src, int64_t n_tokens, bool save) {
  HCACHE_ASSIGN_OR_RETURN(const Sequence* source, find(src));
  HCACHE_ASSIGN_OR_RETURN(const SeqId seq, runtime_.engine().fork_sequence(src, n_tokens));
  save = save && source->save;
  Sequence copy;
  copy.salt = source->salt;
  copy.save = save;
  copy.cuts = source->cuts;
  copy.chosen = source->chosen;
  if (source->budgeted()) {
    copy.tokens.assign(source->tokens.begin(), source->tokens.begin() + n_tokens);
    copy.reading = source->reading;
    copy.reading.forget_from(n_tokens);
    copy.lacks_rows = source->lacks_rows;
  }
  sequences_[seq] = std::move(copy);
  if (save) runtime_.saver()->fork(src, seq, n_tokens);
  return seq;
}

Status EngineExecutor::trim(SeqId seq, int64_t n_tokens) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  // The saver hears of it with the next tokens, whose position tells.
  HCACHE_RETURN_IF_ERROR(runtime_.engine().trim_sequence(seq, n_tokens));
  if (sequence->budgeted()) {
    sequence->tokens.resize(static_cast<size_t>(n_tokens));
    sequence->kept_at = sequence->kept_at <= n_tokens ? sequence->kept_at : 0;
    if (rest_ && rest_->lacking == seq) leave_chores();
    sequence->reading.forget_from(n_tokens);
    drop_choice(*sequence);
  }
  return {};
}

int64_t EngineExecutor::shortest(SeqId seq) const { return runtime_.engine().shortest(seq); }

int64_t EngineExecutor::cells(SeqId seq, int64_t rows) const {
  const engine::Engine& engine = runtime_.engine();
  if (!engine.options().separate_layers) return rows;
  // The layer that has the most finds room last.
  int64_t most = 0;
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    most = std::max(most, engine.held_rows(seq, layer));
  }
  return std::min(rows, most);
}

Result<std::vector<int64_t>> EngineExecutor::choose(SeqId seq, std::span<const int32_t> chain,
                                                    const Sequence& sequence,
                                                    const policy::HeldRows& held) {
  if (held.chosen == 0) return std::vector<int64_t>();
  engine::Engine& engine = runtime_.engine();
  const auto asking = std::min<int64_t>(policy::kChoosingRows, engine.options().max_batch_rows);
  HCACHE_ASSIGN_OR_RETURN(const policy::RowScores scores,
                          state::score_by_last_rows(engine, seq, engine.length(seq),
                                                    chain.last(static_cast<size_t>(asking))));
  return policy::most_attended(scores, state::blocks_to_choose_from(sequence.cuts, held),
                               held.chosen / policy::kChosenBlock);
}

Status EngineExecutor::cut(SeqId seq, std::span<const int32_t> chain,
                           const policy::HeldRows& held) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int64_t> chosen, choose(seq, chain, *sequence, held));
  state::ChosenCut cut = state::cut_rows(sequence->cuts, sequence->chosen, held, chosen);
  sequence->cuts.push_back(held);
  sequence->chosen = std::move(cut.blocks);
  if (sequence->save) {
    // Rows of the last step may still be on their way to the saver.
    HCACHE_RETURN_IF_ERROR(runtime_.engine().synchronize());
    const auto fingerprints = state::chain_fingerprints(runtime_.fingerprint(), sequence->cuts);
    runtime_.saver()->cut(seq, fingerprints.last(), last_cut(*sequence));
  }
  return runtime_.engine().erase_ranges(seq, cut.leaving);
}

void EngineExecutor::release(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end()) return;
  if (rest_ && rest_->lacking == seq) leave_chores();
  it->second.restore.reset();
  const bool save = it->second.save;
  sequences_.erase(it);
  runtime_.engine().synchronize().ignore("what was captured before an error is still saved");
  if (save) runtime_.saver()->end(seq);
  runtime_.engine().release_sequence(seq).ignore("it exists: it was in the map");
}

Result<scheduler::SavedPrefixRef> EngineExecutor::saved_prefix(
    const Salt& salt, std::span<const int32_t> tokens, std::span<const policy::HeldRows> cuts,
    const scheduler::SavedPrefixRef& known) {
  scheduler::SavedPrefixRef prefix = known;
  auto found = std::make_shared<Prefix>(runtime_.match(tokens, salt.id, cuts));
  if (found->tokens() > (known ? known->tokens() : 0)) prefix = std::move(found);
  return prefix;
}

double EngineExecutor::restore_s(int64_t tokens) const {
  const policy::SavePlan& saved = runtime_.save_plan();
  const policy::TierCosts arena{.costs = runtime_.costs(),
                                .below_bytes_per_s = runtime_.profile().read_bytes_per_s};
  return arena.without_s(policy::saved_rows(saved, 0, tokens));
}

// ---- The queue

void EngineExecutor::enqueued(const scheduler::Waiting& request) {
  store::Store* store = runtime_.store();
  if (request.restore == 0 || store == nullptr) return;
  const auto rows = static_cast<size_t>(request.restore);
  auto prefix = std::static_pointer_cast<const Prefix>(request.prefix);
  store->want(request.ticket, prefix->match);
  // What was cut is read in parts, which nothing reads ahead.
  if (options_.dram_bytes == 0 || request.cut) return;
  ahead_[request.ticket] = {
      .prefix = std::move(prefix),
      .tokens = request.tokens.first(std::min(rows + 1, request.tokens.size())),
      .method = request.method};
  window_.add(request.ticket, static_cast<double>(runtime_.save_plan().bytes_per_token) *
                                  static_cast<double>(rows));
  fetch();
}

void EngineExecutor::dequeued(uint64_t ticket, bool admitted) {
  if (store::Store* store = runtime_.store(); store != nullptr) {
    admitted ? store->dispatch(ticket) : store->unwant(ticket);
  }
  ahead_.erase(ticket);
  window_.remove(ticket);
  if (read_ahead_) read_ahead_->drop(ticket);
}

void EngineExecutor::completed(uint64_t ticket) {
  if (runtime_.store() != nullptr) runtime_.store()->unwant(ticket);
}

void EngineExecutor::fetch() {
  while (read_ahead_ && read_ahead_->pending() < kMaxAhead) {
    const std::optional<uint64_t> ticket = window_.next();
    if (!ticket) return;
    if (const Status status = begin_fetch(*ticket); !status.ok()) {
      log::warn("nothing is read ahead for a request: {}", status.to_string());
    }
  }
}

Status EngineExecutor::begin_fetch(uint64_t ticket) {
  const Ahead& ahead = ahead_.at(ticket);
  state::PlanOptions options;
  options.mode = ahead.method.mode;
  options.token_rounding = ahead.method.token_rounding;
  options.ahead = true;
  HCACHE_ASSIGN_OR_RETURN(const state::PlannedRestore planned,
                          runtime_.plan(ahead.tokens, ahead.prefix->match, options));
  if (planned.plan.restored_tokens == 0) return {};
  return read_ahead_->add(ticket, runtime_.engine(), ahead.prefix->match, planned.plan,
                          planned.remote_timeout_s);
}

uint64_t EngineExecutor::bytes_read_ahead() const {
  return read_ahead_ ? read_ahead_->bytes_read() : 0;
}

// ---- Restores

Status EngineExecutor::begin_restore(SeqId seq, const scheduler::RestoreJob& job) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  const auto n_tokens = static_cast<int64_t>(job.tokens.size());
  if (job.upto < 1 || job.upto > n_tokens || !job.prefix) {
    return out_of_range(fmt::format("can't restore {} tokens of {}", job.upto, n_tokens));
  }
  sequence->restore = std::make_unique<Restore>();
  Restore& restore = *sequence->restore;
  restore.tokens.assign(job.tokens.begin(), job.tokens.end());
  restore.prefix = std::static_pointer_cast<const Prefix>(job.prefix);
  restore.cuts.assign(job.cuts.begin(), job.cuts.end());
  restore.job = job;
  restore.job.tokens = restore.tokens;
  restore.job.cuts = restore.cuts;
  restore.job.prefix = nullptr;
  const Status status = open_restore(seq, *sequence);
  if (!status.ok()) {
    sequence->restore.reset();
    forget_cuts(*sequence);
  }
  return status;
}

Status EngineExecutor::plan_restore(Sequence& sequence, int64_t upto) {
  Restore& restore = *sequence.restore;
  const auto next = std::find_if(restore.cuts.begin(), restore.cuts.end(),
                                 [&](const policy::HeldRows& cut) { return cut.cut_at >= upto; });
  auto end = restore.tokens.end();
  if (next != restore.cuts.end()) end = restore.tokens.begin() + next->cut_at;
  sequence.cuts.assign(restore.cuts.begin(), next);
  restore.upto = upto;
  restore.held = policy::held_at(restore.cuts, upto);
  restore.planned = {};
  sequence.chosen.clear();
  if (restore.held.chosen > 0) {
    auto chosen = state::read_chosen(*runtime_.store(), restore.prefix->match, restore.held);
    if (!chosen.ok()) {
      log::warn("what is held of {} tokens is computed again: {}", upto, chosen.status().message());
      return {};
    }
    sequence.chosen = std::move(*chosen);
  }
  restore.match = state::held_match(restore.prefix->match, restore.cuts, upto, sequence.chosen);
  const auto tokens = restore.tokens.begin();
  restore.rows.assign(tokens, tokens + restore.held.kept);
  for (const state::ChosenBlock& block : sequence.chosen) {
    const auto first = tokens + block.first;
    restore.rows.insert(restore.rows.end(), first, first + policy::kChosenBlock);
  }
  restore.rows.insert(restore.rows.end(), tokens + restore.held.resumed, end);
  state::PlanOptions options;
  const bool trusted = !restore.undroppable && restore.attempts < kMaxAttempts;
  options.mode = trusted ? restore.job.method.mode : policy::Mode::kRecompute;
  options.token_rounding = restore.job.method.token_rounding;
  options.most_rows = restore.held.rows(upto);
  options.with_prefill = restore.job.alone;
  options.save = sequence.save;
  options.compute_share = restore.job.compute_share;
  options.dropped = restore.held.dropped();
  HCACHE_ASSIGN_OR_RETURN(restore.planned, runtime_.plan(restore.rows, restore.match, options));
  return {};
}

Status EngineExecutor::open_restore(SeqId seq, Sequence& sequence) {
  Restore& restore = *sequence.restore;
  const int64_t upto = std::min(restore.job.upto, restore.prefix->tokens());
  HCACHE_RETURN_IF_ERROR(plan_restore(sequence, upto));
  if (restore.planned.plan.restored_tokens == 0 && restore.held.cut_at > 0) {
    // What was saved before the first cut is exact, and may be there in part.
    HCACHE_RETURN_IF_ERROR(plan_restore(sequence, restore.cuts.front().cut_at));
  }
  if (sequence.budgeted()) {
    HCACHE_ASSIGN_OR_RETURN(const KeptChoice kept, choose_kept(sequence));
    if (kept.n_tokens > 0) return open_kept(seq, sequence, kept);
  }
  const int64_t n_rows = restore.planned.plan.restored_tokens;
  if (n_rows == 0) {
    forget_cuts(sequence);
    return {};
  }
  HCACHE_RETURN_IF_ERROR(runtime_.engine().reserve_rows(seq, n_rows));
  auto work =
      Restoration::begin(env_, runtime_.engine(), runtime_.store(), restore_run(seq, sequence));
  if (!work.ok()) {
    runtime_.engine().trim_sequence(seq, 0).ignore("the first error is the one to report");
    return work.status();
  }
  restore.work = std::move(*work);
  const std::span<const int32_t> tokens = restore.tokens;
  begin_saving(seq, sequence, tokens.first(static_cast<size_t>(n_rows + restore.held.dropped())),
               restore.planned.tail);
  return {};
}

state::RestoreRun EngineExecutor::restore_run(SeqId seq, Sequence& sequence) {
  Restore& restore = *sequence.restore;
  state::RestoreRun run;
  run.seq = seq;
  run.tokens = restore.rows;
  run.dropped = restore.held.dropped();
  run.match = &restore.match;
  run.plan = &restore.planned.plan;
  run.remote_timeout_s = restore.planned.remote_timeout_s;
  run.ring_bytes = restore.job.alone ? options_.restore_ring_bytes : options_.beside_ring_bytes;
  run.alone = restore.job.alone;
  run.on_damage = [this, &restore](const state::PageFailure& failure) {
    if (!runtime_.discard(failure)) restore.undroppable = true;
  };
  if (!sequence.save) return run;
  run.before_step = [this, seq](int64_t first_pos, std::span<const int32_t> fresh) {
    runtime_.saver()->set_tokens(seq, first_pos, fresh);
  };
  run.on_shorter = [this, seq, &sequence, &restore](int64_t rows) {
    const auto tokens = static_cast<size_t>(rows + restore.held.dropped());
    begin_saving(seq, sequence, std::span(restore.tokens).first(tokens), {});
  };
  run.on_computed = [this, salt = sequence.salt](const state::ComputedPage& page) {
    runtime_.saver()->keep_page(page.chunk, salt, page.layer, page.kv);
  };
  return run;
}

Status EngineExecutor::restart(SeqId seq, Sequence& sequence) {
  Restore& restore = *sequence.restore;
  const policy::RestoreRecord& failed = restore.work->record();
  restore.damage.damaged_pages += failed.damaged_pages;
  restore.damage.replaced_pages += failed.replaced_pages;
  restore.damage.repaired_layer_rows += failed.repaired_layer_rows;
  restore.work.reset();
  ++restore.attempts;
  restore.prefix = std::make_shared<Prefix>(
      runtime_.match(std::span(restore.tokens).first(static_cast<size_t>(restore.job.upto)),
                     sequence.salt.id, restore.cuts));
  return open_restore(seq, sequence);
}

// Rows whose projection fits the budget, by what it costs in the layer that costs most.
int64_t EngineExecutor::slice_rows(double budget_s) const {
  const int64_t most = limits_.max_step_rows;
  const double whole_s = runtime_.profile().longest_project_s(most);
  if (whole_s <= budget_s) return most;
  const auto rows = static_cast<int64_t>(static_cast<double>(most) * budget_s / whole_s);
  return std::clamp(rows, std::min(kMinSliceRows, most), most);
}

// New tokens behind so many rows that run through a layer within the budget.
int64_t EngineExecutor::follow_rows(double budget_s, int64_t history) const {
  const state::CostProfile& profile = runtime_.profile();
  int64_t rows = limits_.max_step_rows;
  while (rows >= kMinSliceRows && profile.longest_prefill_s(rows, history) > budget_s) {
    rows -= kMinSliceRows;
  }
  return std::max<int64_t>(rows, 0);
}

Result<RestoreStatus> EngineExecutor::advance_restore(SeqId seq,
                                                      const scheduler::RestoreTurn& turn) {
  HCACHE_ASSIGN_OR_RETURN(Sequence * sequence, find(seq));
  if (!sequence->restore) {
    return failed_precondition(fmt::format("sequence {} is not being restored", seq));
  }
  fetch();
  Restore& restore = *sequence->restore;
  if (!restore.work) return end_restore(seq, *sequence);
  const int64_t history = restore.planned.plan.restored_tokens;
  const StallTimer stall;
  const int64_t start_ns = env_.monotonic_ns();
  Result<Restoration::Phase> phase = restore.work->advance(
      {.rows = slice_rows(turn.budget_s),
       .budget_s = turn.budget_s,
       .follow_rows = follow_rows(kFollowShare * turn.whole_budget_s, history),
       .keep_rows = follow_rows(kKeepShare * turn.whole_budget_s, history),
       .keep_s = turn.whole_budget_s,
       .proceed = turn.proceed});
  RestoreStatus status;
  status.seconds = static_cast<double>(env_.monotonic_ns() - start_ns) * 1e-9;
  status.stalled_s = stall.stalled_s(status.seconds);
  if (phase.ok() && *phase == Restoration::Phase::kFailed) {
    const Status reopened = restart(seq, *sequence);
    if (reopened.ok()) {
      status.reserved = restore.held.rows(restore.upto);
      status.phase = RestoreStatus::Phase::kWorking;
      return status;
    }
    phase = reopened;
  }
  if (!phase.ok()) {
    sequence->restore.reset();
    forget_cuts(*sequence);
    begin_saving(seq, *sequence, {}, {});
    return phase.status();
  }
  if (*phase == Restoration::Phase::kDone) {
    HCACHE_ASSIGN_OR_RETURN(RestoreStatus done, end_restore(seq, *sequence));
    done.seconds = status.seconds;
    done.stalled_s = status.stalled_s;
    return done;
  }
  status.reserved = restore.held.rows(restore.upto) + restore.work->record().prefilled_tokens;
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
  if (status.tokens > 0) {
    status.tokens += restore->held.dropped();
    status.held = restore->held;
  }
  if (sequence.budgeted()) note_restored(*restore, status.tokens, sequence);
  if (restore->work) {
    status.record = restore->work->record();
    if (status.record.kept_rows == 0) runtime_.observe(status.record);
    const std::span<const float> logits = restore->work->logits();
    logits_.assign(logits.begin(), logits.end());
    status.logits = logits_;
  } else if (restore->attempts > 0) {
    // Nothing usable is left after damaged pages: the saver begins with the first token.
    begin_saving(seq, sequence, {}, {});
  }
  status.record.damaged_pages += restore->damage.damaged_pages;
  status.record.replaced_pages += restore->damage.replaced_pages;
  status.record.repaired_layer_rows += restore->damage.repaired_layer_rows;
  return status;
}

void EngineExecutor::request_flush(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end() || !it->second.save) return;
  // Rows of the last step may still be on their way to the saver.
  runtime_.engine().synchronize().ignore("what was captured before an error is still saved");
  save_kept(seq, it->second);
  runtime_.saver()->request_flush(seq);
}

int64_t EngineExecutor::durable_tokens(SeqId seq) {
  const auto it = sequences_.find(seq);
  if (it == sequences_.end() || !it->second.save) return scheduler::kNotSaving;
  const int64_t n = runtime_.saver()->durable_tokens(seq);
  return n == state::Saver::kNotSaved ? scheduler::kNotSaving : n;
}

Result<scheduler::StepOutput> EngineExecutor::step(std::span<const scheduler::StepItem> items) {
  HCACHE_RETURN_IF_ERROR(begin_step(items));
  return finish_step();
}

int32_t EngineExecutor::steps_in_flight(int64_t sequences) const {
  return policy::steps_in_flight(stage_costs_, sequences);
}

Status EngineExecutor::begin_step(std::span<const scheduler::StepItem> items) {
  std::vector<BatchItem> batch;
  batch.reserve(items.size());
  for (const scheduler::StepItem& item : items) {
    batch.push_back({.seq = item.seq,
                     .tokens = item.tokens,
                     .first_pos = -1,
                     .output = output_of(item.logits),
                     .hidden = item.hidden});
  }
  const int64_t start_ns = env_.monotonic_ns();
  HCACHE_RETURN_IF_ERROR(pipeline_.begin(batch));
  int64_t rows = 0;
  for (const BatchItem& item : batch) rows += static_cast<int64_t>(item.tokens.size());
  begun_.push_back({start_ns, rows});
  for (const scheduler::StepItem& item : items) {
    const auto it = sequences_.find(item.seq);
    if (it == sequences_.end()) continue;
    if (std::vector<int32_t>& tokens = it->second.tokens; it->second.budgeted()) {
      // Behind what stands: a step that failed has left its tokens.
      tokens.resize(static_cast<size_t>(runtime_.engine().length(item.seq)));
      tokens.insert(tokens.end(), item.tokens.begin(), item.tokens.end());
      drop_choice(it->second);
    }
    if (it->second.save) {
      runtime_.saver()->set_tokens(item.seq, runtime_.engine().length(item.seq), item.tokens);
    }
  }
  return {};
}

Result<scheduler::StepOutput> EngineExecutor::finish_step() {
  Result<engine::Logits> logits = pipeline_.finish();
  const Begun begun = begun_.front();
  const int64_t start_ns = std::max(begun.ns, last_step_ns_);
  begun_.pop_front();
  last_step_ns_ = env_.monotonic_ns();
  HCACHE_RETURN_IF_ERROR(logits.status());
  scheduler::StepOutput output;
  output.logits = std::move(logits->rows);
  output.seconds = static_cast<double>(last_step_ns_ - start_ns) * 1e-9;
  step_pace_.note(begun.rows, output.seconds);
  fetch();
  return output;
}

}  // namespace hcache::serving
