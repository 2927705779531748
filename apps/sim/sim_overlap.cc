// Scenarios of the kind `overlap`: one batch on published hardware, whose histories are loaded
// while its new tokens are prefilled, and whose state is saved while it decodes.

#include <algorithm>

#include "policy/hardware_plan.h"
#include "policy/overlap.h"
#include "sim_settings.h"

namespace hcache::cli {
namespace {

constexpr double kMany = 1e9;
constexpr double kMsPerS = 1e3;

struct Case {
  std::string name;
  policy::HardwareSetup hardware;
  double memory_efficiency = 0;
  double step_overhead_s = 0;
  int64_t batch = 1;
  int64_t history = 0;
  int64_t new_tokens = 1;
  int64_t decode_steps = 0;
  std::vector<int32_t> buffered_layers;
};

Case read_case(const SimArgs& args, const Json& json, Status* status) {
  Settings s(json, args.scenario, status);
  Case c;
  for (const char* known : {"kind", "about", "cases"}) s.get<Json>(known, {});
  c.name = s.get<std::string>("name", "");
  c.hardware.model = s.parsed("model", s.get<std::string>("model", ""), policy::find_model);
  Settings hardware = s.object("hardware");
  read_devices(hardware, &c.hardware);
  c.memory_efficiency = hardware.number("memory_efficiency", 0.8, 0.01, 1);
  c.step_overhead_s = hardware.number("step_overhead_ms", 0, 0, kMany) / kMsPerS;
  hardware.refuse_others();
  c.batch = s.integer("batch", 1, 1, 1 << 20);
  c.history = s.integer("history", 0, 0, 1 << 30);
  c.new_tokens = s.integer("new_tokens", 1, 1, 1 << 30);
  c.decode_steps = s.integer("decode_steps", 0, 0, 1 << 30);
  c.buffered_layers = s.get("buffered_layers", std::vector<int32_t>{0});
  for (const int32_t layers : c.buffered_layers) {
    if (layers < 0) s.fail("'buffered_layers' can't be negative");
  }
  s.refuse_others();
  return c;
}

// What one layer takes for the whole batch, and everything else follows from.
struct LayerTimes {
  double load_s = 0;       // the histories
  double prefill_s = 0;    // the new tokens behind them
  double recompute_s = 0;  // histories and new tokens
  double save_s = 0;       // the new tokens' state
  double save_row_s = 0;   // one token of each
  double decode_s = 0;     // one token of each
};

LayerTimes layer_times(const Case& c, const policy::RestoreCosts& costs) {
  const policy::LayerCosts& layer = costs.layers[0];
  const auto batch = static_cast<double>(c.batch);
  const auto link_s = [&](int64_t tokens) {
    return batch * static_cast<double>(tokens * layer.kv_bytes) / costs.link.bytes_per_s;
  };
  // Every sequence sees its own keys alone.
  const auto compute_s = [&](int64_t tokens, int64_t behind) {
    return layer.dense.at(c.batch * tokens) +
           batch * layer.attn_per_key.at(tokens) *
               (static_cast<double>(behind) + static_cast<double>(tokens + 1) / 2);
  };
  LayerTimes t;
  t.load_s = link_s(c.history);
  t.prefill_s = compute_s(c.new_tokens, c.history);
  t.recompute_s = compute_s(c.history + c.new_tokens, 0);
  t.save_s = link_s(c.new_tokens);
  t.save_row_s = link_s(1);
  // A step reads all weights once and the keys and values of every sequence.
  const double memory =
      c.hardware.device.memory_bytes_per_s * c.hardware.n_gpu * c.memory_efficiency;
  const double read_s = (policy::layer_weight_bytes(c.hardware.model) / costs.n_layer +
                         batch * static_cast<double>((c.history + c.new_tokens) * layer.kv_bytes)) /
                        memory;
  t.decode_s =
      std::max(read_s, compute_s(1, c.history + c.new_tokens)) + c.step_overhead_s / costs.n_layer;
  return t;
}

Status simulate(const Case& c, SimResults* results) {
  HCACHE_ASSIGN_OR_RETURN(const policy::RestoreCosts costs, policy::hardware_costs(c.hardware));
  const LayerTimes t = layer_times(c, costs);
  const double n_layer = costs.n_layer;
  const policy::LayerwiseLoad load{costs.n_layer, t.load_s, t.prefill_s};
  const policy::LayerwiseSave save{costs.n_layer,  t.prefill_s,          t.save_s,
                                   c.decode_steps, n_layer * t.decode_s, n_layer * t.save_row_s};
  const double waits_s = prefill_behind_load_s(load, -1);
  const double run_s =
      prefill_behind_load_s(load, 0) + static_cast<double>(c.decode_steps) * save.decode_s;
  const double save_s =
      n_layer * t.save_s + static_cast<double>(c.decode_steps) * save.save_decode_s;
  const double left_s = unsaved_s(save);
  const double buffer_layers =
      t.load_s > 0 ? static_cast<double>(policy::read_buffer_bytes(
                         costs.link.bytes_per_s, n_layer * t.load_s, n_layer * t.prefill_s)) /
                         (t.load_s * costs.link.bytes_per_s)
                   : 0;
  Json row = {{"case", c.name},
              {"recompute_ms", n_layer * t.recompute_s * kMsPerS},
              {"load_ms", n_layer * t.load_s * kMsPerS},
              {"prefill_ms", n_layer * t.prefill_s * kMsPerS},
              {"no_preloading_ms", waits_s * kMsPerS},
              {"read_buffer_layers", buffer_layers},
              {"run_ms", run_s * kMsPerS},
              {"save_ms", save_s * kMsPerS},
              {"unsaved_ms", left_s * kMsPerS}};
  const auto ms = [](double seconds) { return fmt::format("{:.1f}", seconds * kMsPerS); };
  for (const int32_t layers : c.buffered_layers) {
    const double seconds = prefill_behind_load_s(load, layers);
    row["preloading_ms"][fmt::format("{}", layers)] = seconds * kMsPerS;
    results->table.push_back({c.name, ms(n_layer * t.recompute_s), ms(n_layer * t.load_s),
                              ms(n_layer * t.prefill_s), ms(waits_s), fmt::format("{}", layers),
                              ms(seconds), fmt::format("{:.1f}", buffer_layers), ms(save_s),
                              ms(left_s)});
  }
  results->rows.push_back(std::move(row));
  return {};
}

}  // namespace

Result<SimResults> simulate_overlap(const SimArgs& args, const Json& scenario) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<Json> cases, scenario_cases(args, scenario));
  SimResults results;
  results.headline =
      "One batch: milliseconds until its prefill ends, and left to save when it ends";
  results.table = {{"case", "recompute", "load", "prefill", "one after the other",
                    "buffered layers", "overlapped", "buffer for all", "save", "left to save"}};
  for (const Json& json : cases) {
    Status status;
    const Case c = read_case(args, json, &status);
    HCACHE_RETURN_IF_ERROR(status);
    HCACHE_RETURN_IF_ERROR(simulate(c, &results));
  }
  return results;
}

}  // namespace hcache::cli
