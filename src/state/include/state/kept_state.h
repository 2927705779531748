// The rows that layers keep of a conversation by a KV budget (CaR §III-D), as state of their own:
// chosen while the conversation is in the arena, saved beside its pages, and restored in their
// place where that brings the first token earlier.
//
// What is computed behind such a restore is not what all rows would give. Chains with a budget are
// therefore kept apart by their salt: nothing of theirs meets an exact chain, nor the other way
// round; and a budget is its own chain's alone.
//
// A snapshot (snapshot_pages.h), little-endian: u32 kMagic, u32 n_layer, u64 n_tokens, u64 bytes of
// a row of K, u64 tokens with scores; u64 rows for each layer; the scores in F16, by layer, KV head
// and token; then each layer's rows of K, and of V, as the arena holds them.
//
// Threading: the engine's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/compression.h"
#include "policy/restore_plan.h"
#include "state/restorer.h"
#include "store/store.h"

namespace hcache::state {

// Shorter conversations are restored in a moment anyway.
inline constexpr int64_t kLeastKeptTokens = 4 * int64_t{store::kChunkTokens};

// `base`'s own state with this budget, in (0, 1], to four digits; 1: exact.
[[nodiscard]] Salt budgeted(const Salt& base, double kv_budget);
// Whether what was computed for a salt is other state than the model alone would have, which its id
// keeps apart and its fingerprint does not: by adapters, or a budget.
[[nodiscard]] inline bool differs(const Salt& salt) {
  return !salt.adapters.empty() || salt.kv_budget < 1;
}
// The same for fingerprints, of files that leave the store.
[[nodiscard]] Fingerprint budgeted(const Fingerprint& base, double kv_budget);
// The reason where this engine can't do without rows: kUnimplemented, or by its options
// kFailedPrecondition or kInvalidArgument.
[[nodiscard]] Status check_keeps_rows(engine::Engine& engine);

// Whether a layer does without some rows of the sequence.
[[nodiscard]] bool lacks_rows(const engine::Engine& engine, engine::SeqId seq);

// What attention fell on, of a sequence's first n_rows, while the last of them, whose tokens these
// are, were computed once more in their place. Nothing of it is captured.
[[nodiscard]] Result<policy::RowScores> score_by_last_rows(engine::Engine& engine,
                                                           engine::SeqId seq, int64_t n_rows,
                                                           std::span<const int32_t> last);
// The same of as many rows as there are tokens, by the window that stays (Compression::kSnap).
[[nodiscard]] Result<policy::RowScores> score_by_last_rows(engine::Engine& engine,
                                                           engine::SeqId seq,
                                                           std::span<const int32_t> tokens);

// The snapshot of the share `budget` of a sequence's first scores.n_rows rows, which are whole
// chunks and all there: those that score highest by `how`, of each layer as many as
// served_budgets() says. It is made layer by layer, so that nobody waits for all of it.
class KeptSnapshot {
 public:
  KeptSnapshot(const engine::Engine& engine, policy::Compression how, policy::RowScores scores,
               double budget);
  // Chooses the next layer's rows, and copies them. True: that was the last one.
  Result<bool> add_layer(engine::Engine& engine, engine::SeqId seq);

  [[nodiscard]] int64_t n_tokens() const { return scores_.n_rows; }
  [[nodiscard]] std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  policy::Compression how_;
  policy::RowScores scores_;
  std::vector<double> shares_;  // of each layer
  std::vector<std::byte> bytes_;
  int layer_ = 0;
};

// The snapshot of a sequence that does without rows already: those that it holds. nullopt where
// these are much more than the budget, so that choosing anew, from all rows, is better. `scores`:
// of its first rows, to be saved with it.
[[nodiscard]] Result<std::optional<std::vector<std::byte>>> held_state(
    engine::Engine& engine, engine::SeqId seq, int64_t n_tokens, const policy::RowScores& scores,
    double budget);

// The scores that were saved with the snapshot of n_tokens tokens behind this chunk; nullopt where
// there are none, or they can't be read from the disks.
[[nodiscard]] std::optional<policy::RowScores> saved_scores(const engine::Engine& engine,
                                                            store::Store& store,
                                                            const store::ChunkRef& chunk,
                                                            int64_t n_tokens);

// What restoring such a snapshot, the chunk's, and computing n_new tokens behind it is expected to
// take. `costs` are those of all rows.
[[nodiscard]] Result<policy::Plan> plan_kept(const engine::Engine& engine,
                                             const store::Store& store, policy::RestoreCosts costs,
                                             const store::ChunkRef& chunk, int64_t n_tokens,
                                             int64_t n_new);

// Restores such a snapshot, of `chunk`, into the sequence of `run`, which has n_tokens rows
// reserved up to the chunk's end. New tokens follow where nothing else wants the device. Of the run
// match, plan and what is computed do not count; any page that is damaged ends it. `predicted` is
// the plan's, for the record.
[[nodiscard]] Result<std::unique_ptr<Restoration>> begin_kept_restore(
    Env& env, engine::Engine& engine, store::Store& store, const RestoreRun& run,
    const store::ChunkRef& chunk, int64_t n_tokens, const policy::Prediction& predicted);

}  // namespace hcache::state
