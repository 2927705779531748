// Conversations with a budget of rows: what their layers keep is chosen between turns and saved,
// and restored where that is faster than what the planner makes of all rows (state/kept_state.h).
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "engine_executor.h"
#include "engine_restore.h"
#include "state/kept_state.h"
#include "state/snapshot_pages.h"

namespace hcache::serving {
namespace {

using scheduler::SeqId;
using state::SecondReading;

// Of a chore, beside what a step takes: how long a restore works at a time.
constexpr double kChoreS = 5e-3;

struct MatchedState {
  store::ChunkRef chunk;  // null: there is none
  int64_t n_tokens = 0;   // up to its end
};

// The last chunk with a snapshot, behind `most` tokens at most.
MatchedState last_snapshot(const store::Match& match, int64_t most) {
  MatchedState found;
  int64_t end = 0;
  for (const store::MatchedChunk& matched : match.chunks) {
    const store::ChunkInfo& chunk = matched.chunk.info();
    end += matched.usable_rows;
    if (matched.usable_rows < chunk.tokens.size() || end > most) break;
    if (state::snapshot_parts(chunk) > 0) found = {matched.chunk, end};
  }
  return found;
}

void not_chosen(const Status& why) {
  log::warn("which rows a conversation could do without is not known: {}", why.to_string());
}

}  // namespace

Result<EngineExecutor::KeptChoice> EngineExecutor::choose_kept(const Sequence& sequence) const {
  const Restore& restore = *sequence.restore;
  if (sequence.follows || restore.kept_damaged || !restore.cuts.empty()) return KeptChoice();
  if (restore.job.method.mode != policy::Mode::kPlan) return KeptChoice();
  const int64_t most = std::min(restore.upto, static_cast<int64_t>(restore.tokens.size()) - 1);
  const MatchedState found = last_snapshot(restore.match, most);
  if (!found.chunk) return KeptChoice();
  const state::PlannedRestore& planned = restore.planned;
  const int64_t planned_tokens = planned.plan.restored_tokens + planned.plan.prefill_tokens;
  policy::RestoreCosts costs = runtime_.costs();
  costs.compute_share = restore.job.compute_share;
  HCACHE_ASSIGN_OR_RETURN(
      const policy::Plan kept,
      state::plan_kept(runtime_.engine(), *runtime_.store(), std::move(costs), found.chunk,
                       found.n_tokens, planned_tokens - found.n_tokens));
  if (kept.predicted.makespan_s >= planned.plan.predicted.makespan_s) return KeptChoice();
  return KeptChoice{found.n_tokens, found.chunk, kept.predicted};
}

Status EngineExecutor::open_kept(SeqId seq, Sequence& sequence, const KeptChoice& choice) {
  Restore& restore = *sequence.restore;
  HCACHE_RETURN_IF_ERROR(runtime_.engine().reserve_rows(seq, choice.n_tokens));
  state::RestoreRun run = restore_run(seq, sequence);
  run.on_damage = [this, &restore](const state::PageFailure& failure) {
    runtime_.discard(failure);
    restore.kept_damaged = true;  // whether it could be dropped or not, all rows are there
  };
  run.on_scores = [&sequence](policy::RowScores scores) {
    sequence.reading = SecondReading(std::move(scores));
  };
  auto work = state::begin_kept_restore(env_, runtime_.engine(), *runtime_.store(), run,
                                        choice.chunk, choice.n_tokens, choice.predicted);
  HCACHE_RETURN_IF_ERROR(work.status());  // the sequence is empty again
  restore.work = std::move(*work);
  restore.upto = choice.n_tokens;
  const std::span<const int32_t> tokens = restore.tokens;
  begin_saving(seq, sequence, tokens.first(static_cast<size_t>(choice.n_tokens)), {});
  return {};
}

void EngineExecutor::note_restored(const Restore& restore, int64_t n_tokens, Sequence& sequence) {
  sequence.tokens.assign(restore.tokens.begin(), restore.tokens.begin() + n_tokens);
  sequence.kept_at = last_snapshot(restore.match, n_tokens).n_tokens;
  sequence.lacks_rows = restore.work && restore.work->record().kept_rows > 0;
}

void EngineExecutor::save_kept(SeqId seq, Sequence& sequence) {
  drop_choice(sequence);
  if (!sequence.budgeted() || sequence.restore || !begun_.empty()) return;
  engine::Engine& engine = runtime_.engine();
  const int64_t length = engine.length(seq);
  const int64_t n_tokens = length / store::kChunkTokens * store::kChunkTokens;
  if (n_tokens <= sequence.kept_at || n_tokens < state::kLeastKeptTokens) return;
  if (static_cast<int64_t>(sequence.tokens.size()) != length) return;
  if (state::lacks_rows(engine, seq)) {
    const policy::RowScores& scores = sequence.reading.scores();
    const bool read = sequence.reading.unread(scores.n_rows) == 0;
    auto held = state::held_state(engine, seq, n_tokens, read ? scores : policy::RowScores(),
                                  sequence.salt.kv_budget);
    if (!held.ok()) return not_chosen(held.status());
    if (held->has_value()) keep(seq, sequence, n_tokens, std::move(**held));
  } else if (runtime_.kv_policy() == policy::Compression::kSelf) {
    const bool room = length + SecondReading::kRows <= runtime_.model().hparams().n_ctx_train;
    sequence.to_choose = room ? n_tokens : 0;
  } else {
    const auto tokens = std::span(sequence.tokens).first(static_cast<size_t>(n_tokens));
    auto scores = state::score_by_last_rows(engine, seq, tokens);
    if (!scores.ok()) return not_chosen(scores.status());
    sequence.snapshot.emplace(engine, runtime_.kv_policy(), std::move(*scores),
                              sequence.salt.kv_budget);
    Status status;
    while (status.ok() && sequence.snapshot) status = choose_layer(seq, sequence);
    if (!status.ok()) return not_chosen(status);
  }
}

Status EngineExecutor::choose_layer(SeqId seq, Sequence& sequence) {
  const Result<bool> last = sequence.snapshot->add_layer(runtime_.engine(), seq);
  if (!last.ok()) drop_choice(sequence);
  HCACHE_RETURN_IF_ERROR(last.status());
  if (!*last) return {};
  state::KeptSnapshot snapshot = *std::exchange(sequence.snapshot, std::nullopt);
  drop_choice(sequence);
  keep(seq, sequence, snapshot.n_tokens(), snapshot.take());
  return {};
}

void EngineExecutor::keep(SeqId seq, Sequence& sequence, int64_t n_tokens,
                          std::vector<std::byte> snapshot) {
  if (runtime_.saver()->keep_snapshot(seq, n_tokens, std::move(snapshot), sequence.kept_at)) {
    sequence.kept_at = n_tokens;
  }
}

scheduler::Chore EngineExecutor::chore() const {
  scheduler::Chore choice = {.cells = SecondReading::kRows};
  for (const auto& [seq, sequence] : sequences_) {
    if (sequence.to_choose == 0) continue;
    choice.seq = seq;
    choice.left += std::max<int64_t>(1, sequence.reading.unread(sequence.to_choose));
  }
  if (choice.left > 0) return choice;
  if (rest_) return {.seq = rest_->lacking};
  for (const auto& [seq, sequence] : sequences_) {
    if (may_fetch_rest(seq, sequence)) return {.seq = seq, .cells = runtime_.engine().length(seq)};
  }
  return {};
}

bool EngineExecutor::work_on(const scheduler::Chore& chore) {
  Sequence& sequence = sequences_.at(chore.seq);
  if (sequence.to_choose > 0) {
    read_once_more(chore.seq, sequence);
    return true;
  }
  const Result<bool> fetched = fetch_rest(chore.seq);
  if (fetched.ok()) return *fetched;
  log::warn("a conversation goes on without the rows that its budget left out: {}",
            fetched.status().to_string());
  sequence.lacks_rows = false;
  leave_chores();
  return true;
}

void EngineExecutor::leave_chores() {
  if (rest_) release(std::exchange(rest_, std::nullopt)->whole);
}

void EngineExecutor::read_once_more(SeqId seq, Sequence& sequence) {
  const int64_t n_tokens = sequence.to_choose;
  SecondReading& reading = sequence.reading;
  if (reading.scores().n_rows == 0 && sequence.kept_at > 0) {
    const MatchedState saved =
        last_snapshot(runtime_.match(sequence.tokens, sequence.salt.id), sequence.kept_at);
    if (saved.n_tokens == sequence.kept_at) {
      auto scores =
          state::saved_scores(runtime_.engine(), *runtime_.store(), saved.chunk, saved.n_tokens);
      if (scores) reading = SecondReading(std::move(*scores));
    }
  }
  reading.forget_from(n_tokens);  // of a longer text, part of which was taken back
  Status status;
  if (reading.unread(n_tokens) > 0) {
    const auto text = std::span(sequence.tokens).first(static_cast<size_t>(n_tokens));
    status = reading.read_part(runtime_.engine(), seq, text);
  } else if (!sequence.snapshot) {
    sequence.snapshot.emplace(runtime_.engine(), runtime_.kv_policy(), reading.scores(),
                              sequence.salt.kv_budget);
  } else {
    status = choose_layer(seq, sequence);
    if (sequence.to_choose == 0) runtime_.saver()->request_flush(seq);
  }
  if (status.ok()) return;
  drop_choice(sequence);
  not_chosen(status);
}

// Nobody's rows go for it, and all of its own must have come to the store.
bool EngineExecutor::may_fetch_rest(SeqId seq, const Sequence& sequence) const {
  if (!sequence.lacks_rows || !sequence.save) return false;
  const int64_t length = runtime_.engine().length(seq);
  return free_cells() >= length && runtime_.saver()->durable_tokens(seq) >= length &&
         sequences_.size() < static_cast<size_t>(limits_.max_sequences);
}

Status EngineExecutor::begin_rest(SeqId seq) {
  // One more than is restored.
  std::vector<int32_t> tokens = sequences_.at(seq).tokens;
  const auto n_tokens = static_cast<int64_t>(tokens.size());
  tokens.push_back(0);
  const Salt salt = sequences_.at(seq).salt;
  HCACHE_ASSIGN_OR_RETURN(const scheduler::SavedPrefixRef prefix,
                          saved_prefix(salt, tokens, {}, nullptr));
  if (!prefix || prefix->tokens() < n_tokens) return not_found("not all of it is saved");
  HCACHE_ASSIGN_OR_RETURN(const SeqId whole, create(salt, false));
  rest_ = {.lacking = seq, .whole = whole};
  sequences_.at(whole).follows = true;
  return begin_restore(whole, {.prefix = prefix, .tokens = tokens, .upto = n_tokens});
}

Result<bool> EngineExecutor::fetch_rest(SeqId seq) {
  if (!rest_) {
    HCACHE_RETURN_IF_ERROR(begin_rest(seq));
    return true;
  }
  engine::Engine& engine = runtime_.engine();
  const SeqId whole = rest_->whole;
  const Sequence& sequence = sequences_.at(seq);
  if (sequences_.at(whole).restore) {
    HCACHE_ASSIGN_OR_RETURN(const scheduler::RestoreStatus status,
                            advance_restore(whole, {.budget_s = kChoreS}));
    return status.phase != scheduler::RestoreStatus::Phase::kWaitingForIo;
  }
  // Computing was faster for some, or they are damaged.
  const int64_t length = engine.length(whole);
  if (length < engine.length(seq)) {
    const std::span<const int32_t> tokens = sequence.tokens;
    const auto from = static_cast<size_t>(length);
    const size_t n = std::min<size_t>(SecondReading::kPart, tokens.size() - from);
    const engine::BatchItem item{
        .seq = whole, .tokens = tokens.subspan(from, n), .captured = false};
    HCACHE_RETURN_IF_ERROR(engine.decode({&item, 1}).status());
    return true;
  }
  if (length > engine.length(seq)) {
    HCACHE_RETURN_IF_ERROR(engine.trim_sequence(whole, engine.length(seq)));
  }
  HCACHE_RETURN_IF_ERROR(engine.swap_sequences(seq, whole));
  sequences_.at(seq).lacks_rows = false;
  leave_chores();
  return true;
}

}  // namespace hcache::serving
