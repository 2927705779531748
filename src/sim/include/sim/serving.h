// A server that is not here, under a load: production's scheduler on a simulated executor, with
// costs from the planner's model of published hardware. docs/simulator.md has the model.
//
// Pure: the same setup and load give the same report. Units: seconds, bytes, tokens.
// Threading: plain values, no shared state.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "policy/chain_order.h"
#include "policy/hardware_plan.h"
#include "scheduler/scheduler.h"
#include "sim/workload.h"

namespace hcache::sim {

// Where saved state lies.
struct TierSetup {
  std::string name;
  double capacity_bytes = 0;    // 0: no limit
  double read_bytes_per_s = 0;  // > 0
  policy::TierPolicy policy = {};
  int64_t chain_tokens = 0;  // whose room each conversation takes; 0: that of its own
};

enum class ServingMethod : uint8_t {
  kPlan,       // what production plans: hidden states, KV, recomputation
  kHidden,     // hidden states in every layer
  kKv,         // K and V in every layer
  kRecompute,  // nothing is saved; a returning conversation is prefilled
  kIdeal,      // restoring takes no time and reads nothing
};
[[nodiscard]] std::string_view serving_method_name(ServingMethod method);  // "plan", ...
// kInvalidArgument names the methods there are.
[[nodiscard]] Result<ServingMethod> parse_serving_method(std::string_view name);

// What a machine was measured to take, in place of the formulas for published hardware.
struct MeasuredCosts {
  policy::RestoreCosts restore;  // its link: of the tier that is there when none is given
  double step_finish_s = 0;      // of a step, behind its layers
};

// What becomes of a conversation that would exceed the context (AttentionStore §3.4).
enum class Overflow : uint8_t {
  kEnd,         // it ends
  kInvalidate,  // its earliest tokens are cut off; what was saved is of no use any more
  kKeep,        // they are cut off, and what was saved of the rest stays valid
};
// kInvalidArgument names what there is.
[[nodiscard]] Result<Overflow> parse_overflow(std::string_view name);

struct ServingSetup {
  policy::HardwareSetup hardware;  // its history: of the plan that decides what is saved
  // With it nothing else of `hardware` counts, nor what is said of memory below: arena_tokens must
  // be set.
  std::optional<MeasuredCosts> measured;
  ServingMethod method = ServingMethod::kPlan;
  std::vector<TierSetup> tiers;  // fastest first; without any: the hardware's SSDs, without limit
  scheduler::SchedulerOptions scheduler;
  int64_t context = 16384;         // longest sequence
  int64_t arena_tokens = 0;        // 0: memory_share of the devices' memory, less the weights
  double memory_share = 0.9;       // of device memory, for weights and KV cells
  double memory_efficiency = 0.8;  // of the memory's speed, that steps reach
  double step_overhead_s = 0;      // of every step, whatever it computes
  double request_overhead_s = 0;   // of every request, before the scheduler has it
  // Whether a conversation stays in the arena when its answer is complete.
  bool keep_resident = true;
  // What becomes of a conversation that outgrows the context.
  Overflow overflow = Overflow::kEnd;
  double overflow_share = 0.5;  // of the history, that is cut off, until the rest fits
};

// Of one request that was answered.
struct ServedRequest {
  size_t session = 0;
  size_t round = 0;
  bool warmup = false;
  bool returning = false;
  double restore_s = 0;
  double ttft_s = 0;   // since it was sent
  double queue_s = 0;  // of it, until it was admitted
  double tpot_s = 0;   // mean time per token behind the first; 0: there was one token
  int64_t prompt_tokens = 0;
  int64_t history_tokens = 0;  // of the prompt: from the rounds before
  int64_t resident_tokens = 0;
  int64_t restored_tokens = 0;
  double memory_share = 0;  // of the bytes that were read: from the tier "dram"
  int64_t output_tokens = 0;
};

struct ServingReport {
  std::vector<ServedRequest> requests;  // in the order of their ends
  // Rounds that did not fit the context or the arena, and those that failed: their session ended.
  int64_t too_long = 0;
  int64_t cut = 0;  // times that a conversation's beginning was cut off
  int64_t failed = 0;
  double duration_s = 0;
  int64_t arena_tokens = 0;
  double step_s = 0;  // the device computed steps so long, and restores
  double restore_s = 0;
  uint64_t preemptions = 0;
  std::string save_schedule;  // what is saved of the layers: "H:31 KV:1"
  double saved_bytes_per_token = 0;
  struct Tier {
    std::string name;
    double link_busy_s = 0;
    uint64_t evictions = 0;
  };
  std::vector<Tier> tiers;
};

// `proceed` (may be empty) is called now and then with the share of sessions that have begun; false
// stops with kCancelled.
// Errors: kInvalidArgument names the setting: counts and rates, weights that do not fit.
[[nodiscard]] Result<ServingReport> simulate_serving(
    const ServingSetup& setup, const Schedule& load,
    const std::function<bool(double)>& proceed = nullptr);

}  // namespace hcache::sim
