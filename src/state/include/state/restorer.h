// Runs a restoration plan: pages stream from the store through a ring of host buffers to the
// device while hidden states are projected and a layer prefix is recomputed; the prefill of the
// new tokens follows layer by layer (hcache.txt section 4.1, design.md "One request's path").
#pragma once

#include <cstdint>
#include <functional>
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
  double link_bytes_per_s = 0;  // 0: unthrottled
  uint64_t ring_bytes = 64U << 20;
  int64_t slice_rows = 512;                       // rows of one projection
  std::function<bool(double fraction)> progress;  // false cancels (kCancelled)
  // Tokens about to be computed anew, and their first position.
  std::function<void(int64_t first_pos, std::span<const int32_t>)> before_step;
};

struct RestoreReport {
  std::string schedule;       // "RE:4 H:26 KV:2"
  int64_t tokens_hidden = 0;  // restored rows, by what most of their layers used
  int64_t tokens_kv = 0;
  int64_t tokens_recomputed = 0;
  int64_t restored_tokens = 0;
  int64_t prefilled_tokens = 0;
  uint64_t bytes_read = 0;  // from disk
  uint64_t page_bytes = 0;
  double restore_s = 0;    // until the last layer's history was in the arena
  double ttft_s = 0;       // until the logits of the last token
  double predicted_s = 0;  // the plan's makespan
  double io_busy_s = 0;
  double compute_busy_s = 0;
  uint64_t damaged_pages = 0;  // found, dropped and recomputed on the way
};

// A page that could not be used: the caller drops it from the store and plans anew.
struct PageFailure {
  ChunkId chunk;
  uint16_t layer = 0;
  store::Encoding encoding = store::Encoding::kKv;
  Status status;
};

struct RestoreOutcome {
  RestoreReport report;
  std::optional<PageFailure> failure;  // set: the sequence was emptied again
  std::vector<float> logits;           // of the last token; empty after a failure
};

// What the store offers of a match to this engine, as the planner wants it: runs of chunks with
// equal encodings, layers x {hidden, kv}; encodings that this engine can't use are left out.
// `max_rows` cuts it (the last token is always computed).
policy::Availability availability(engine::Engine& engine, const store::Match& match,
                                  int64_t max_rows);

// Restores the plan's rows and prefills the rest. The sequence must be empty; after any error it
// is empty again. Threading: the engine's thread.
Result<RestoreOutcome> run_restore(Env& env, engine::Engine& engine, store::Store* store,
                                   const RestoreRun& run);

}  // namespace hcache::state
