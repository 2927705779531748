// A request inside the scheduler: what was asked, how far it is, and what it has cost.
//
// Threading: belongs to the owner thread once Inbox::take() has handed it out.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/tokens.h"
#include "policy/drafting.h"
#include "policy/queue.h"
#include "policy/truncation.h"
#include "scheduler/executor.h"
#include "scheduler/request.h"

namespace hcache::scheduler {

struct Task {
  RequestId id = 0;            // ids rise with arrival
  Request request;             // its tokens have moved to `chain`
  std::vector<int32_t> chain;  // the prompt, then what was generated
  int64_t max_new = 0;         // cut to what fits
  int64_t submit_ns = 0;
  Phase phase = Phase::kQueued;
  bool preempted = false;  // queued again

  policy::TruncationLimits limits;  // of what is held; its context 0: it is never cut

  SeqId seq = kNoSeq;
  int64_t computed = 0;   // tokens of the chain that the sequence has come to
  policy::HeldRows held;  // of them
  int64_t reserved = 0;   // rows that its restore in flight has taken
  int64_t stepping = 0;   // rows of its step in flight
  // Tokens guessed to come behind the chain, for the next step or of the one in flight; what that
  // one computes: the chain's last token and some of them; and rows that the sequence has beyond
  // `computed`, until it is known what comes true.
  std::vector<int32_t> draft;
  std::vector<int32_t> drafted_run;
  int64_t ahead = 0;
  // Of the draft: the length of the chain that it stands behind, and whether a model made it.
  int64_t drafted_at = -1;
  bool drafted_by_model = false;
  policy::Acceptance copied, modelled;  // drafts of either kind
  int64_t told = 0;  // tokens of the prompt whose logits were told, and those before logits_from

  SavedPrefixRef saved;          // as last looked up; null: nothing, or not looked up yet
  int64_t saved_ns = -1;         // when; -1: not yet
  uint64_t saved_evictions = 0;  // from the arena, until then
  uint64_t ticket = 0;     // in the queue, as the Executor was told; 0: it was not, or no longer
  uint64_t came_from = 0;  // of one that was admitted: its ticket before
  policy::QueueGroup group = policy::QueueGroup::kNoHistory;
  int64_t group_ns = 0;   // when it was found out
  int32_t overtaken = 0;  // by later ones, since it was queued
  int64_t restore_begin_ns = 0;
  bool restore_alone = true;    // so far; see RestoreRecord
  bool waits_for_io = false;    // when it was last worked on
  double restore_used_s = 0;    // compute of the restore in flight, as its share is counted
  uint64_t restore_number = 0;  // in the order of their beginnings
  bool compute_only = false;    // reuse or restore failed: prefill everything this time
  int step_failures = 0;        // in a row

  Outcome outcome;

  [[nodiscard]] int64_t length() const { return static_cast<int64_t>(chain.size()); }
  [[nodiscard]] double computed_share() const {
    return static_cast<double>(computed) / static_cast<double>(std::max<int64_t>(length(), 1));
  }
  [[nodiscard]] int64_t cells() const { return held.rows(computed) + reserved + stepping; }
  // Once all of its chain, as it is now, is computed; at most, on the way there.
  [[nodiscard]] int64_t wanted_cells() const {
    const int64_t rows = held.rows(length());
    return limits.context > 0 ? std::min(rows, limits.context) : rows;
  }
  // How far it can be computed before it is cut.
  [[nodiscard]] int64_t end_of_run() const {
    return std::min(length(), policy::next_cut(held, limits));
  }
  // How many rows a step takes that may take so many: media may want to be computed whole.
  [[nodiscard]] int32_t rows_at_once(int32_t rows) const {
    if (!request.media) return rows;
    return static_cast<int32_t>(request.media->step_end(computed, computed + rows) - computed);
  }
  // Whether logits of the prompt are still to be told, which takes computing from `told` on.
  [[nodiscard]] bool tells_logits() const {
    return request.on_prompt_logits && told < outcome.prompt_tokens;
  }
  // How many tokens' rows may come from elsewhere.
  [[nodiscard]] int64_t reusable() const { return tells_logits() ? told : length(); }
  // Of its chain as it is now.
  [[nodiscard]] std::vector<policy::HeldRows> cuts() const {
    return policy::cuts_of(chain, limits, request.next_message);
  }
  [[nodiscard]] int64_t remaining_new() const { return max_new - outcome.generated_tokens; }
  [[nodiscard]] bool in_restore() const {
    return phase == Phase::kFetching || phase == Phase::kRestoring;
  }
  // In steps, or in one in flight.
  [[nodiscard]] bool steps() const { return phase == Phase::kPrefill || phase == Phase::kDecoding; }
  [[nodiscard]] bool ended() const {
    return phase == Phase::kDone || phase == Phase::kCancelled || phase == Phase::kFailed;
  }
};

inline double seconds_between(int64_t from_ns, int64_t to_ns) {
  return static_cast<double>(to_ns - from_ns) * 1e-9;
}

}  // namespace hcache::scheduler
