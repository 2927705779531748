// Conversations with a budget of rows: what their layers keep is saved when a turn ends, and
// restored where that is faster than what the planner makes of all rows (state/kept_state.h).
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
  state::RestoreRun run = restore_run(seq, sequence);
  run.on_damage = [this, &restore](const state::PageFailure& failure) {
    runtime_.discard(failure);
    restore.kept_damaged = true;  // whether it could be dropped or not, all rows are there
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
