// Runs a restoration plan: pages stream from the store through a ring of host buffers to the
// device while hidden states are projected and a layer prefix is recomputed; the prefill of the
// new tokens follows layer by layer (HCache §4.1, docs/architecture.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>

#include "base/env.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/compression.h"
#include "policy/restore_plan.h"
#include "policy/restore_record.h"
#include "store/store.h"

namespace hcache::state {

// A page that could not be used.
struct PageFailure {
  ChunkId chunk;
  uint16_t layer = 0;
  store::Encoding encoding = store::Encoding::kKv;
  Status status;
  bool remote = false;  // the remote tier's: the store has dropped it already
};

// The bytes of a page that was read, by the tier that it came from.
[[nodiscard]] inline policy::TierBytes tier_bytes(const store::PageView& view) {
  const uint64_t n = view.bytes.size();
  switch (view.origin) {
    case store::PageOrigin::kMemory: return {.dram = n};
    case store::PageOrigin::kDisk: return {.disk = n};
    case store::PageOrigin::kRemote: break;
  }
  return {.remote = n};
}

// K and V of one layer of a whole chunk, as the arena holds them.
struct ComputedPage {
  const store::ChunkInfo& chunk;
  uint16_t layer = 0;
  std::span<const std::byte> kv;  // K rows, then V rows
};

struct RestoreRun {
  engine::SeqId seq = -1;           // empty when it begins
  std::span<const int32_t> tokens;  // history and new tokens, those of rows that are held
  // Of the chain, that are not held (policy/truncation.h). Then nothing of the history can be
  // computed again: rows that have left are missing to that.
  int64_t dropped = 0;
  const store::Match* match = nullptr;  // pinned chunks; covers at least plan->restored_tokens
  const policy::Plan* plan = nullptr;
  double remote_timeout_s = 10;  // for the pages of the remote tier; see store::ReaderOptions
  uint64_t ring_bytes = 64U << 20;
  // Nothing else runs: pages are read as far ahead as the ring has room, and checked by the threads
  // that compute where these have every core.
  bool alone = true;
  // The layers of several devices are restored at once where these can (Engine::stages_overlap());
  // false: one after the other, for comparison.
  bool devices_at_once = true;
  // The scores that were saved with kept rows (state/kept_state.h), where there are some.
  std::function<void(policy::RowScores)> on_scores = {};
  // Tokens about to be computed anew, and their first position.
  std::function<void(int64_t first_pos, std::span<const int32_t>)> before_step;
  // A page could not be used, and won't be: drop it from the store.
  std::function<void(const PageFailure&)> on_damage;
  // What was computed in place of a damaged page that the store had in no other encoding.
  std::function<void(const ComputedPage&)> on_computed;
  // Set: the caller reads the pages of a partial last chunk, too. If one is damaged the chunk is
  // not restored, its rows count as new tokens, and this is called with how many rows are left.
  std::function<void(int64_t rows)> on_shorter;
};

// A restore in slices, so that other sequences' steps can run between them ("a phase of the
// request's life", HCache §4). It restores the plan's rows; the prefill is the caller's,
// but for what is done of it behind the restored layers (layer-wise pre-loading, AttentionStore
// §3.2.1). Reads run ahead in the background from begin() on, as far as the ring has room,
// which is the read buffer of that section.
//
// Where the engine's devices can compute at once, each has its layers restored beside the others':
// pages are read in turns (policy/read_order.h), and each device's are uploaded and projected on
// its own queues.
//
// A damaged page costs its own rows of its own layer: they are read in another encoding, or
// computed again through the layers up to it, as soon as those before it are restored. Where that
// would be too much, the restore fails.
//
// Several restorations of one engine may be under way, each of another sequence.
// Threading: the engine's thread. The engine and what `run` points to must outlive it.
class Restoration {
 public:
  enum class Phase {
    kWorking,       // the budget is used up
    kWaitingForIo,  // the next page has not been read yet
    kDone,
    kFailed,  // too much is damaged: plan anew without it. The sequence is empty again
  };
  struct Slice {
    int64_t rows = 512;  // of one projection or recomputation: the unit of work
    // Seconds of compute. The first unit is done in any case, further ones as long as they would
    // fit if they took as long as those before them.
    double budget_s = std::numeric_limits<double>::infinity();
    // How many of the new tokens may begin to run through the layers, one after the other, while
    // pages are waited for. 0: none.
    int64_t follow_rows = 0;
    // How many of them may go on. More, which began when nothing else wanted the device, wait until
    // nothing does again, and are given up once all rows are restored: then they are the caller's.
    int64_t keep_rows = 0;
    // … nor do they where a layer took longer than this.
    double keep_s = std::numeric_limits<double>::infinity();
    // Set: nothing else wants the device. There is no budget then, pages are waited for, and all
    // new tokens, as far as a step holds them, follow each layer at once, the last one included.
    // Asked between units, with the fraction that is done; false ends the call.
    std::function<bool(double fraction)> proceed = {};
  };

  // Opens the reader; no row of the arena is taken before the first advance().
  static Result<std::unique_ptr<Restoration>> begin(Env& env, engine::Engine& engine,
                                                    store::Store* store, const RestoreRun& run);
  // An unfinished one is cancelled: reading stops, and the sequence is emptied.
  virtual ~Restoration() = default;
  // An error (kResourceExhausted: the arena is full) ends it as well.
  virtual Result<Phase> advance(const Slice& slice) = 0;
  // Of its layers, how many are done.
  [[nodiscard]] virtual double fraction() const = 0;
  // Complete when done, but for `alone`.
  [[nodiscard]] virtual const policy::RestoreRecord& record() const = 0;
  // When done, and all tokens were computed behind it: the last one's. Otherwise empty.
  [[nodiscard]] virtual std::span<const float> logits() const = 0;
};

}  // namespace hcache::state
