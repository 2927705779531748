// Runs a restoration plan: pages stream from the store through a ring of host buffers to the
// device while hidden states are projected and a layer prefix is recomputed; the prefill of the
// new tokens follows layer by layer (HCache §4.1, docs/architecture.md).
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/restore_plan.h"
#include "store/store.h"

namespace hcache::state {

struct RestoreRun {
  engine::SeqId seq = -1;               // empty when it begins
  std::span<const int32_t> tokens;      // history and new tokens
  const store::Match* match = nullptr;  // pinned chunks; covers at least plan->restored_tokens
  const policy::Plan* plan = nullptr;
  double remote_timeout_s = 10;  // for the pages of the remote tier; see store::ReaderOptions
  uint64_t ring_bytes = 64U << 20;
  int64_t slice_rows = 512;                       // rows of one projection
  std::function<bool(double fraction)> progress;  // false cancels (kCancelled)
  // Tokens about to be computed anew, and their first position.
  std::function<void(int64_t first_pos, std::span<const int32_t>)> before_step;
};

// When a layer was read and computed, in seconds from the restore's begin.
struct LayerTimes {
  policy::Method method = policy::Method::kRecompute;  // of its first rows
  double io_begin_s = 0;                               // both 0: nothing was read from disk
  double io_end_s = 0;
  double compute_begin_s = 0;
  double compute_end_s = 0;
};

// Pages that were used, by where they came from.
struct TierBytes {
  uint64_t dram = 0;
  uint64_t disk = 0;
  uint64_t remote = 0;
};

struct RestoreReport {
  std::string schedule;       // "RE:4 H:26 KV:2"
  int64_t tokens_hidden = 0;  // restored rows, by what most of their layers used
  int64_t tokens_kv = 0;
  int64_t tokens_recomputed = 0;
  int64_t restored_tokens = 0;
  int64_t prefilled_tokens = 0;
  uint64_t bytes_read = 0;    // from disk
  uint64_t bytes_dram = 0;    // found in host memory
  uint64_t bytes_remote = 0;  // read from the remote tier
  uint64_t page_bytes = 0;
  TierBytes hidden_pages;  // by method; bytes_read has alignment and gaps as well
  TierBytes kv_pages;
  double restore_s = 0;            // until the last layer's history was in the arena
  double ttft_s = 0;               // until the logits of the last token
  double predicted_s = 0;          // the plan's makespan
  double predicted_restore_s = 0;  // the plan's for restore_s
  double io_busy_s = 0;
  double compute_busy_s = 0;
  double project_busy_s = 0;       // of it, as policy::Prediction::project_busy_s
  double predicted_project_s = 0;  // the plan's for project_busy_s
  std::vector<LayerTimes> layers;
  uint64_t damaged_pages = 0;  // found, dropped and recomputed on the way
};

// A page that could not be used: the caller drops it from the store and plans anew.
struct PageFailure {
  ChunkId chunk;
  uint16_t layer = 0;
  store::Encoding encoding = store::Encoding::kKv;
  Status status;
  bool remote = false;  // the remote tier's: the store has dropped it already
};

struct RestoreOutcome {
  RestoreReport report;
  std::optional<PageFailure> failure;  // set: the sequence was emptied again
  std::vector<float> logits;           // of the last token; empty after a failure
};

// A restore in slices, so that other sequences' steps can run between them ("a phase of the
// request's life", HCache §4). It restores the plan's rows; the prefill is the caller's,
// but for what is done of it while pages are waited for: then some of the new tokens run through
// the layers that are there already (layer-wise pre-loading, AttentionStore §3.2.1).
// Reads run ahead in the background from begin() on, as far as the ring has room, which is the read
// buffer of that section.
//
// Several restorations of one engine may be under way, each of another sequence.
// Threading: the engine's thread. The engine and what `run` points to must outlive it.
class Restoration {
 public:
  enum class Phase {
    kWorking,       // the budget is used up
    kWaitingForIo,  // the next page has not been read yet
    kDone,
    kFailed,  // see failure(); the sequence is empty again
  };
  struct Slice {
    int64_t rows = 512;  // of one projection or recomputation: the unit of work
    // Seconds of compute. The first unit is done in any case, further ones as long as they would
    // fit if they took as long as those before them.
    double budget_s = std::numeric_limits<double>::infinity();
    bool wait = true;  // false: kWaitingForIo instead of waiting for a page
    // How many of the new tokens may run through a layer at once; what counts is what stands here
    // when the first of them do. 0: none. Not with `wait`.
    int64_t follow_rows = 0;
  };

  // Opens the reader; no row of the arena is taken before the first advance().
  static Result<std::unique_ptr<Restoration>> begin(Env& env, engine::Engine& engine,
                                                    store::Store* store, const RestoreRun& run);
  // An unfinished one is cancelled: reading stops, and the sequence is emptied.
  virtual ~Restoration() = default;
  // An error other than a page's (kResourceExhausted: the arena is full) ends it as well.
  virtual Result<Phase> advance(const Slice& slice) = 0;
  // Of its layers, how many are done.
  [[nodiscard]] virtual double fraction() const = 0;
  // Complete when done; ttft_s is the caller's.
  [[nodiscard]] virtual const RestoreReport& report() const = 0;
  [[nodiscard]] virtual const std::optional<PageFailure>& failure() const = 0;
};

// Restores the plan's rows and prefills the rest. The sequence must be empty; after any error it
// is empty again. Threading: the engine's thread.
Result<RestoreOutcome> run_restore(Env& env, engine::Engine& engine, store::Store* store,
                                   const RestoreRun& run);

}  // namespace hcache::state
