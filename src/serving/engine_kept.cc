// Conversations with a budget of rows: what their layers keep is saved when a turn ends, and
// restored where that is faster than what the planner makes of all rows (state/kept_state.h).
#include <algorithm>
#include <utility>

#include "base/log.h"
#include "base/stall.h"
#include "engine_executor.h"
#include "engine_restore.h"
#include "state/snapshot_pages.h"

namespace hcache::serving {
namespace {

using scheduler::RestoreStatus;
using scheduler::SeqId;

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

}  // namespace

Result<EngineExecutor::KeptChoice> EngineExecutor::choose_kept(const Sequence& sequence) const {
  const Restore& restore = *sequence.restore;
  if (restore.kept_damaged || !restore.cuts.empty()) return KeptChoice();
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
  auto kept = state::KeptRestore::begin(env_, runtime_.engine(), *runtime_.store(),
                                        restore_run(seq, sequence), choice.n_tokens, choice.chunk);
  if (!kept.ok()) {
    runtime_.engine().trim_sequence(seq, 0).ignore("the first error is the one to report");
    return kept.status();
  }
  restore.kept = std::move(*kept);
  restore.kept_predicted = choice.predicted;
  restore.upto = choice.n_tokens;
  const std::span<const int32_t> tokens = restore.tokens;
  begin_saving(seq, sequence, tokens.first(static_cast<size_t>(choice.n_tokens)), {});
  return {};
}

Result<RestoreStatus> EngineExecutor::advance_kept(SeqId seq, Sequence& sequence,
                                                   const scheduler::RestoreTurn& turn) {
  using Phase = state::KeptRestore::Phase;
  Restore& restore = *sequence.restore;
  const StallTimer stall;
  const int64_t start_ns = env_.monotonic_ns();
  RestoreStatus status;
  const auto time = [&](RestoreStatus* of) {
    of->seconds = static_cast<double>(env_.monotonic_ns() - start_ns) * 1e-9;
    of->stalled_s = stall.stalled_s(of->seconds);
  };
  const bool alone = turn.proceed != nullptr;
  Result<Phase> phase = restore.kept->advance(turn.budget_s, alone);
  while (alone && phase.ok() && *phase == Phase::kWorking &&
         turn.proceed(restore.kept->fraction())) {
    phase = restore.kept->advance(0, alone);
  }
  if (phase.ok() && *phase == Phase::kFailed) {
    ++restore.damage.damaged_pages;
    runtime_.discard(restore.kept->failure());
    restore.kept.reset();
    restore.kept_damaged = true;
    Status reopened = runtime_.engine().trim_sequence(seq, 0);
    if (reopened.ok()) {
      restore.prefix = std::make_shared<Prefix>(
          runtime_.match(std::span(restore.tokens).first(static_cast<size_t>(restore.job.upto)),
                         sequence.salt.id, restore.cuts));
      reopened = open_restore(seq, sequence);
    }
    if (!reopened.ok()) phase = reopened;
  }
  if (!phase.ok()) {
    sequence.restore.reset();
    begin_saving(seq, sequence, {}, {});
    return phase.status();
  }
  if (*phase == Phase::kDone) {
    HCACHE_ASSIGN_OR_RETURN(status, end_restore(seq, sequence));
    time(&status);
    return status;
  }
  time(&status);
  status.reserved = restore.kept ? restore.upto + restore.kept->record().prefilled_tokens
                                 : restore.held.rows(restore.upto);
  status.phase = *phase == Phase::kWaitingForIo ? RestoreStatus::Phase::kWaitingForIo
                                                : RestoreStatus::Phase::kWorking;
  status.fraction = restore.kept ? restore.kept->fraction() : 0;
  return status;
}

void EngineExecutor::note_restored(const Restore& restore, int64_t n_tokens, Sequence& sequence) {
  sequence.tokens.assign(restore.tokens.begin(), restore.tokens.begin() + n_tokens);
  sequence.kept_at = last_snapshot(restore.match, n_tokens).n_tokens;
}

void EngineExecutor::save_kept(SeqId seq, Sequence& sequence) {
  if (!sequence.budgeted() || sequence.restore || !begun_.empty()) return;
  engine::Engine& engine = runtime_.engine();
  const int64_t n_tokens = engine.length(seq) / store::kChunkTokens * store::kChunkTokens;
  if (n_tokens <= sequence.kept_at || n_tokens < state::kLeastKeptTokens) return;
  if (static_cast<int64_t>(sequence.tokens.size()) != engine.length(seq)) return;
  const auto tokens = std::span(sequence.tokens).first(static_cast<size_t>(n_tokens));
  auto kept = state::kept_state(engine, seq, tokens, sequence.salt.kv_budget);
  if (!kept.ok()) {
    log::warn("which rows a conversation could do without is not known: {}",
              kept.status().to_string());
    return;
  }
  if (!kept->has_value()) return;
  if (runtime_.saver()->keep_snapshot(seq, n_tokens, std::move(**kept), sequence.kept_at)) {
    sequence.kept_at = n_tokens;
  }
}

}  // namespace hcache::serving
