// The rows that layers keep of a conversation by a KV budget (CaR §III-D), as state of their own:
// chosen while the conversation is in the arena, saved beside its pages, and restored in their
// place where that brings the first token earlier.
//
// What is computed behind such a restore is not what all rows would give. Chains with a budget are
// therefore kept apart by their salt: nothing of theirs meets an exact chain, nor the other way
// round; and a budget is its own chain's alone.
//
// A snapshot (snapshot_pages.h), little-endian: u32 kMagic, u32 n_layer, u64 n_tokens, u64 bytes of
// a row of K; u64 rows for each layer; then each layer's rows of K, and of V, as the arena holds
// them.
//
// Threading: the engine's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/restore_plan.h"
#include "policy/restore_record.h"
#include "state/restorer.h"
#include "store/store.h"

namespace hcache::state {

// Shorter conversations are restored in a moment anyway.
inline constexpr int64_t kLeastKeptTokens = 4 * int64_t{store::kChunkTokens};

// `base`'s own state with this budget, in (0, 1], to four digits; 1: exact.
[[nodiscard]] Salt budgeted(const Salt& base, double kv_budget);
// The same for fingerprints, of files that leave the store.
[[nodiscard]] Fingerprint budgeted(const Fingerprint& base, double kv_budget);
// The reason where this engine can't do without rows: kUnimplemented, or by its options
// kFailedPrecondition or kInvalidArgument.
[[nodiscard]] Status check_keeps_rows(engine::Engine& engine);

// The share `budget` of the rows of a sequence's first tokens.size() tokens, which are whole
// chunks: those that the attention of the last ones falls on, head by head (Compression::kSnap). To
// see that, the last ones are computed once more, in their place. Of a sequence that does without
// rows already it is those that it holds; nullopt where these are much more than the budget, so
// that choosing anew, from all rows, is better.
[[nodiscard]] Result<std::optional<std::vector<std::byte>>> kept_state(
    engine::Engine& engine, engine::SeqId seq, std::span<const int32_t> tokens, double budget);

// What restoring such a snapshot, the chunk's, and computing n_new tokens behind it is expected to
// take. `costs` are those of all rows.
[[nodiscard]] Result<policy::Plan> plan_kept(const engine::Engine& engine,
                                             const store::Store& store, policy::RestoreCosts costs,
                                             const store::ChunkRef& chunk, int64_t n_tokens,
                                             int64_t n_new);

class NewTokens;

// Reads such a snapshot into a sequence.
class KeptRestore {
 public:
  enum class Phase : uint8_t {
    kWaitingForIo,
    kWorking,  // the budget is spent
    kDone,
    kFailed,  // failure() says which page; the sequence is as it was reserved
  };

  // The sequence of `run` has n_tokens rows reserved; `chunk`, the one that they end with, has the
  // snapshot. Of the run tokens, limits of reading and before_step count. Engine, store and what
  // the run refers to outlive it.
  static Result<std::unique_ptr<KeptRestore>> begin(Env& env, engine::Engine& engine,
                                                    store::Store& store, RestoreRun run,
                                                    int64_t n_tokens, const store::ChunkRef& chunk);
  ~KeptRestore();

  // For about so long. `alone`: as long as it takes, waiting for what is not there yet, but for one
  // page at most; and the tokens behind follow through each layer that is loaded.
  Result<Phase> advance(double budget_s, bool alone);
  // Of the last token of the run, if it was computed.
  [[nodiscard]] std::span<const float> logits() const { return logits_; }
  [[nodiscard]] const PageFailure& failure() const { return failure_; }
  [[nodiscard]] double fraction() const;
  // What it has done; whole when advance() says so.
  [[nodiscard]] const policy::RestoreRecord& record() const { return record_; }

 private:
  KeptRestore(Env& env, engine::Engine& engine, RestoreRun run, int64_t n_tokens,
              const store::ChunkRef& chunk);
  // Takes the next page, if it is there. False: it is not.
  Result<bool> take_page(bool wait);
  // Loads the layers whose rows have come. kDataLoss where they are not this model's.
  Status load_layers();
  Status load_layer();
  Status read_header();
  Status begin_to_follow();
  Status finish();
  [[nodiscard]] Phase fail(size_t part, Status status, bool remote);

  Env& env_;
  engine::Engine& engine_;
  const RestoreRun run_;
  const int64_t n_tokens_;
  const store::ChunkRef chunk_;
  size_t n_parts_ = 0;
  size_t n_bytes_ = 0;  // of all parts
  std::unique_ptr<store::PageReader> reader_;
  size_t part_ = 0;               // that comes next
  std::vector<std::byte> bytes_;  // that have come
  size_t used_ = 0;               // of them, that are in a layer
  std::vector<int64_t> rows_;     // of each layer; empty before the header has come
  int layer_ = 0;                 // that is loaded next
  std::unique_ptr<NewTokens> following_;
  std::vector<float> logits_;
  PageFailure failure_;
  int64_t begin_ns_ = 0;
  policy::RestoreRecord record_;
};

}  // namespace hcache::state
