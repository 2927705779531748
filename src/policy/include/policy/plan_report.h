// Plans as text: what `hcache plan` and `hcache bench restore` print. No parsing, no streams.
#pragma once

#include "policy/hardware_plan.h"
#include "policy/restore_plan.h"
#include "policy/save_plan.h"

namespace hcache::policy {

// One line of a comparison of modes.
struct PlanRow {
  std::string method;  // mode_name
  std::string schedule;
  Prediction predicted;
  int64_t restored_tokens = 0;
  int64_t prefill_tokens = 0;
};

// The request under each mode, in the order given. Errors: as plan_restore.
[[nodiscard]] Result<std::vector<PlanRow>> compare_modes(const RestoreCosts& costs,
                                                         const RestoreRequest& request,
                                                         const std::vector<Mode>& modes);

// Aligned columns: method, schedule, first token, restored, I/O and compute busy, bytes.
[[nodiscard]] std::string format_table(const std::vector<PlanRow>& rows);
// One line per group of layers with the same method: when its I/O and compute start and end.
[[nodiscard]] std::string format_timeline(const Plan& plan, const Timeline& timeline);
[[nodiscard]] std::string format_save_plan(const SavePlan& plan);
// The paper's schedule and the exact search's, side by side, and the baselines under them.
[[nodiscard]] std::string format_hardware(const HardwareSetup& setup, const HardwarePlan& plan);

}  // namespace hcache::policy
