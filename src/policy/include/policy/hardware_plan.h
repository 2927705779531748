// Plans for hardware that is not here: the paper's tables, its cost formulas (HCache §3.2) and
// its closed forms (§4.1.2), with the exact search beside them. docs/planner.md, "Closed forms".
//
// Pure functions; units and threading as in restore_plan.h.
#pragma once

#include <span>

#include "policy/restore_plan.h"

namespace hcache::policy {

// One row of the paper's Table 2, and the memory's speed from the maker's data sheet.
struct DeviceSpec {
  std::string_view name;  // as the command line takes it
  std::string_view title;
  double flops;             // FP16, per device
  double link_bytes_per_s;  // host to device, per device
  int64_t memory_bytes;
  double memory_bytes_per_s;  // per device
};

// The shape of a decoder and how much of the peak its large products reach.
struct ModelShape {
  std::string_view name;
  std::string_view title;
  int32_t n_layer;
  int32_t n_embd;
  int32_t n_head;
  int32_t n_head_kv;
  int32_t head_dim;
  int32_t n_ff;
  bool gated_ffn;          // three products instead of two
  double gemm_efficiency;  // fraction of DeviceSpec::flops
  bool calibrated;         // against Table 3; otherwise a guess
};

[[nodiscard]] std::span<const DeviceSpec> device_table();
[[nodiscard]] std::span<const ModelShape> model_table();
// kNotFound, listing what there is.
[[nodiscard]] Result<DeviceSpec> find_device(std::string_view name);
[[nodiscard]] Result<ModelShape> find_model(std::string_view name);

inline constexpr double kSsdBytesPerS = 6.9e9;  // one PM9A3 (§6.2.2)

struct HardwareSetup {
  DeviceSpec device;
  ModelShape model;
  int32_t n_gpu = 1;  // tensor parallel: FLOP/s and links add up
  int32_t n_ssd = 0;  // over all devices; 0: host DRAM, the links are the limit
  int64_t history = 1024;
  int64_t new_tokens = 0;
  double hidden_bytes_per_value = 2;  // F16
  double kv_bytes_per_value = 2;
};

// §3.2 for one layer and the whole history, in seconds. For multi-head models with n_ff = 4 n_embd
// and no gate these are the paper's formulas exactly; else the same counts of the actual shape.
struct PaperCosts {
  double io_hidden = 0;
  double io_kv = 0;
  double c_hidden = 0;
  double c_token = 0;
};

// §4.1.2. At most one of kv and recompute is not 0.
struct ClosedForm {
  int32_t hidden = 0;
  int32_t kv = 0;
  int32_t recompute = 0;
  double makespan_s = 0;  // max(compute, I/O): no fill, no drain
  std::string schedule;   // "31H+1KV"
};
// Where hidden states are no smaller than KV (grouped-query models, outside the paper) H is left
// out: RE and KV are balanced by the same reasoning.
[[nodiscard]] ClosedForm closed_form(const PaperCosts& costs, int32_t n_layer);

struct ModePrediction {
  Mode mode = Mode::kPlan;
  Plan plan;
};

struct HardwarePlan {
  PaperCosts layer;
  double link_bytes_per_s = 0;      // min(n_ssd * kSsdBytesPerS, links)
  double flops = 0;                 // effective, over all devices
  double balanced_bytes_per_s = 0;  // link at which C_H = IO_H; 0 if hidden is never worth it
  ClosedForm paper;
  Plan exact;                         // plan_restore on the same costs, everything saved
  std::vector<ModePrediction> modes;  // hidden, kv, recompute, naive-hybrid
  int64_t exact_bytes_per_token = 0;
  int64_t paper_bytes_per_token = 0;
  int64_t kv_bytes_per_token = 0;
};

// The costs as the planner takes them (slices of 512 rows, no launch overhead).
[[nodiscard]] Result<RestoreCosts> hardware_costs(const HardwareSetup& setup);
// Of all layers, in F16: what a step reads at least. Embeddings and output head are left out.
[[nodiscard]] double layer_weight_bytes(const ModelShape& model);
// Errors: kInvalidArgument (counts < 1, history < 1).
[[nodiscard]] Result<HardwarePlan> plan_for_hardware(const HardwareSetup& setup);

}  // namespace hcache::policy
