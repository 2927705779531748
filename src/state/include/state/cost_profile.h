// What restoring costs on this machine: measured once per (model, device, threads, build) and kept
// in the state directory; the links' and the cores' speeds are corrected by what restores observe.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "engine/engine.h"
#include "policy/packing.h"
#include "policy/restore_plan.h"
#include "state/identity.h"

namespace hcache::state {

// Progress of a long step in [0, 1] with what is being done; returning false cancels.
using ProgressFn = std::function<bool(const std::string& what, double fraction)>;

// Where a model's layers are on several devices.
struct StageCosts {
  int n_layers = 0;
  policy::LayerCosts layer;       // of each of them, as CostProfile's
  double upload_bytes_per_s = 0;  // as CostProfile's
};

struct CostProfile {
  std::string key;                // what it was measured for; another key is another profile
  policy::LayerCosts layer;       // one for all layers; bytes per token for the native encodings
  double compute_scale = 1;       // restores project so many times slower than the curves say
  double finish_s = 0;            // final norm and output head for one row
  double read_bytes_per_s = 0;    // of the store's disks together; 0: not measured yet
  double upload_bytes_per_s = 0;  // host to device, where that runs beside compute; 0: it does not
  double gemm_flops_per_s = 0;    // of the K and V projection at 512 rows, for --link paper
  policy::KvPackings packings;    // of this model's K and V
  // In the layers' order, which all of them are in; `layer` and the rates above are then the first
  // stage's. Empty: one device has all layers.
  std::vector<StageCosts> stages{};

  // Whether a restore's calls return once their work is done, on every device.
  [[nodiscard]] bool is_synchronous() const;
  // Of a layer for so many rows, on the device where it takes longest.
  [[nodiscard]] double longest_project_s(int64_t rows) const;
  // All of the layer, behind so many rows.
  [[nodiscard]] double longest_prefill_s(int64_t rows, int64_t history) const;
};

// The key of a profile: model digest, device and its kernels, threads, KV and state type.
std::string profile_key(const engine::Engine& engine, const std::string& content_digest,
                        const StateTypes& state_types);

// Runs real steps and projections on the engine, on each of its model's devices (a few seconds; it
// needs an arena of at least
// 2,048 free tokens, less gives a coarser profile). The engine's sequences are left as they were.
Result<CostProfile> measure_cost_profile(Env& env, engine::Engine& engine, const std::string& key,
                                         const StateTypes& state_types, const ProgressFn& progress);

// JSON files named by the key's hash under `dir`. kNotFound when there is none; kDataLoss when the
// file can't be understood (measure again).
Result<CostProfile> load_cost_profile(Env& env, const std::string& dir, const std::string& key);
Status save_cost_profile(Env& env, const std::string& dir, const CostProfile& profile);

// Exponential average of an observed rate into the profile (weight 0.3; the first one counts
// whole).
void observe_read_speed(CostProfile& profile, double bytes_per_s);
// The same for the time that projecting and recomputing history rows took against what this
// profile predicted. Clocks fall under load and neighbours come and go: the curves' shape stays,
// their scale does not. Copies into the arena, which memory bounds, are not scaled.
void observe_project_time(CostProfile& profile, double seconds, double predicted_s);

// The planner's input. Reads are no faster than max_read_bytes_per_s (0: as fast as the profile
// says); see Env::nominal_read_bytes_per_s.
policy::RestoreCosts restore_costs(const CostProfile& profile, const engine::Engine& engine,
                                   double max_read_bytes_per_s);
// Bytes/s at which the projection's FLOP/s over them are 9,750: the balance of an A100 (312
// TFLOP/s) on its PCIe link (32 GB/s, HCache table 2).
double paper_link_bytes_per_s(const CostProfile& profile);

}  // namespace hcache::state
