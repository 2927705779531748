// The save plan: which encoding of each layer is worth writing: no page is written that
// no restore plan would read. docs/planner.md, "What is saved". HCache §4.2.
//
// Pure functions; units and threading as in restore_plan.h.
#pragma once

#include <limits>

#include "policy/restore_plan.h"

namespace hcache::policy {

enum class SaveMode : uint8_t {
  kPlan,    // one encoding per layer, as restores will read it; unread layers are not saved
  kHidden,  // hidden states in every layer
  kKv,      // K and V in every layer
  kAll,     // both in every layer (experiments)
};
[[nodiscard]] std::string_view save_mode_name(SaveMode mode);  // "plan", "hidden", "kv", "all"
[[nodiscard]] Result<SaveMode> parse_save_mode(std::string_view name);

struct SaveRequest {
  SaveMode mode = SaveMode::kPlan;
  int64_t history = 4096;   // typical tokens to restore; > 0
  int64_t new_tokens = 64;  // typical tokens prefilled behind them; >= 0

  // Hysteresis: the previous plan stays until another one brings the first token earlier by more
  // than this fraction, or needs that much fewer bytes and is slower by no more than `tolerance`.
  double min_gain = 0.10;
  // Among plans within this fraction of the fastest, the one with the fewest bytes is taken.
  double tolerance = 0.02;
  // A layer stays unsaved (RE) only if it would be recomputed even with a link this many times
  // faster, and even with a history this many times longer. 1 and 1: the paper's choice.
  double link_headroom = 2.0;
  double history_headroom = 4.0;
  // So many leading layers stay unsaved at most.
  int32_t max_unsaved_layers = std::numeric_limits<int32_t>::max();
  // Storage budget per token over all layers; 0: none. Unreachable budgets are met as far as
  // possible.
  int64_t max_bytes_per_token = 0;
  // What the store keeps of a token beside its pages. With it a plan takes no more than the KV
  // cache's bytes.
  int64_t overhead_bytes_per_token = 0;
};

struct SavePlan {
  SaveMode mode = SaveMode::kPlan;
  std::vector<Encoding> layers;    // n_layer entries; kNoEncoding: only tokens are kept
  int64_t bytes_per_token = 0;     // over all layers
  int64_t kv_bytes_per_token = 0;  // what saving KV everywhere would take
  Prediction predicted;            // of the best restore from what this plan saves
  std::string schedule;            // "H:26 KV:6", "RE:4 H:28"; kAll: "H+KV:32"
  bool packed = false;             // K and V are (policy/packing.h), which the bytes know of
};

// previous may be null. In kPlan mode no layer is saved as hidden when that takes more bytes than
// its KV, so a plan never stores more than the KV cache itself. Where
// RestoreCosts::re_tail_projects holds, layer 0 need not be saved at all: its hidden states are the
// tokens' embeddings, so it costs what projecting saved ones does, without the read. That is how a
// plan stays below the KV cache's bytes with the store's own on top. The previous plan stays only
// if it has the same mode and layer count and meets the same limits; its prediction is made anew.
// Errors: kInvalidArgument (costs, history, fractions).
[[nodiscard]] Result<SavePlan> plan_save(const RestoreCosts& costs, const SaveRequest& request,
                                         const SavePlan* previous);

// The best restore of `history` tokens whose layers are saved so (n_layer entries).
// Errors: as plan_restore().
[[nodiscard]] Result<Plan> plan_restore_of(const RestoreCosts& costs, const SaveRequest& request,
                                           int64_t history, const std::vector<Encoding>& layers);

}  // namespace hcache::policy
