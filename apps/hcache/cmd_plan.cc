// hcache plan: the restoration plan and its predicted times, for this machine or the paper's.

#include <fmt/format.h>

#include <algorithm>

#include "base/units.h"
#include "commands.h"
#include "policy/hardware_plan.h"
#include "policy/plan_report.h"
#include "session.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

struct PlanArgs : Options {
  RuntimeArgs runtime{nullptr};  // its model.path is the shape's name with --hardware
  std::string hardware =
      text(&hardware, "--hardware", "NAME", "",
           "plan for hardware of the paper instead of this machine: a100, a100-80g, a30, rtx4090, "
           "l20, h800",
           {.excludes = "--timeline,--device,--threads,--ctx,--batch,--kv-type,--attention,--link,"
                        "--save,--state-type,--state-dir"});
  int gpus = integer(&gpus, "--gpus", "N", 1, {1, 1024}, "devices, tensor parallel",
                     {.needs = "--hardware"});
  int ssds = integer(&ssds, "--ssd", "N", 0, {0, 1024},
                     "SSDs of 6.9 GB/s over all devices; 0: host memory over the link",
                     {.needs = "--hardware"});
  std::vector<int64_t> history =
      integers(&history, "--history", "TOKENS,...", "1024", {1}, "saved tokens to restore");
  int64_t new_tokens =
      integer(&new_tokens, "--new", "TOKENS", 50, {0}, "tokens that are new behind the history");
  bool timeline = flag(&timeline, "--timeline", "print when each layer is read and computed");
  bool json = flag(&json, "--json", "print JSON instead of text");

  PlanArgs() {
    text(&runtime.model.path, "-m,--model", "FILE|NAME", "",
         "GGUF model, or with --hardware a published shape: llama2-7b, llama2-13b, opt-30b, ...");
    offer(runtime, {&runtime.model.device, &runtime.model.gpu_layers, &runtime.model.tensor_split,
                    &runtime.model.override_tensors, &runtime.model.split_mode,
                    &runtime.model.main_gpu, &runtime.model.threads, &runtime.ctx, &runtime.batch,
                    &runtime.kv_type, &runtime.attention, &runtime.link, &runtime.save,
                    &runtime.state_type, &runtime.state.state_dir});
  }
};

Json prediction_json(const policy::Prediction& p) {
  return {{"ttft_ms", p.makespan_s * 1e3},
          {"restored_ms", p.restored_s * 1e3},
          {"io_busy_ms", p.io_busy_s * 1e3},
          {"compute_busy_ms", p.compute_busy_s * 1e3},
          {"bytes_read", p.bytes_read}};
}

Status plan_hardware(const PlanArgs& args) {
  policy::HardwareSetup setup;
  HCACHE_ASSIGN_OR_RETURN(setup.device, policy::find_device(args.hardware));
  if (args.runtime.model.path.empty()) {
    return invalid_argument("--hardware needs --model, a published shape such as llama2-7b");
  }
  HCACHE_ASSIGN_OR_RETURN(setup.model, policy::find_model(args.runtime.model.path));
  setup.n_gpu = args.gpus;
  setup.n_ssd = args.ssds;
  setup.new_tokens = args.new_tokens;
  Json rows = Json::array();
  for (const int64_t history : args.history) {
    setup.history = history;
    HCACHE_ASSIGN_OR_RETURN(const policy::HardwarePlan plan, policy::plan_for_hardware(setup));
    if (!args.json) {
      fmt::print("{}{}", rows.empty() ? "" : "\n", policy::format_hardware(setup, plan));
      rows.push_back(nullptr);
      continue;
    }
    Json row = {{"hardware", setup.device.name},
                {"model", setup.model.name},
                {"gpus", setup.n_gpu},
                {"ssds", setup.n_ssd},
                {"history", history},
                {"new", setup.new_tokens},
                {"link_bytes_per_s", plan.link_bytes_per_s},
                {"flops_per_s", plan.flops},
                {"layer_ms",
                 {{"io_hidden", plan.layer.io_hidden * 1e3},
                  {"io_kv", plan.layer.io_kv * 1e3},
                  {"c_hidden", plan.layer.c_hidden * 1e3},
                  {"c_token", plan.layer.c_token * 1e3}}},
                {"paper",
                 {{"schedule", plan.paper.schedule},
                  {"makespan_ms", plan.paper.makespan_s * 1e3},
                  {"bytes_per_token", plan.paper_bytes_per_token}}},
                {"exact",
                 {{"schedule", plan.exact.schedule},
                  {"bytes_per_token", plan.exact_bytes_per_token},
                  {"predicted", prediction_json(plan.exact.predicted)}}},
                {"kv_bytes_per_token", plan.kv_bytes_per_token},
                {"modes", Json::array()}};
    for (const policy::ModePrediction& m : plan.modes) {
      row["modes"].push_back({{"method", policy::mode_name(m.mode)},
                              {"schedule", m.plan.schedule},
                              {"predicted", prediction_json(m.plan.predicted)}});
    }
    rows.push_back(std::move(row));
  }
  return args.json ? write_json(rows, "") : Status();
}

Status plan_here(const PlanArgs& args) {
  if (args.runtime.model.device == "list") return list_devices();
  RuntimeArgs runtime_args = args.runtime;
  runtime_args.no_store = true;
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto runtime, open_runtime(runtime_args, env, line));
  const policy::RestoreCosts costs = runtime->costs();
  // Without a measurement the speed of the disks is a guess, unless a slower link hides them.
  HCACHE_ASSIGN_OR_RETURN(const Link link, parse_link(runtime_args.link));
  const double slowed = link.bytes_per_s(runtime->profile());
  const bool assumed =
      runtime->profile().read_bytes_per_s <= 0 && (slowed <= 0 || slowed > costs.link.bytes_per_s);
  if (!args.json) {
    fmt::print(
        "reads at {}{}\n\n", format_rate(costs.link.bytes_per_s),
        assumed ? ", assumed: these disks have not been measured; `hcache profile` does it" : "");
  }
  policy::SaveRequest save_request;
  HCACHE_ASSIGN_OR_RETURN(save_request.mode, policy::parse_save_mode(args.runtime.save));
  save_request.history = *std::max_element(args.history.begin(), args.history.end());
  save_request.new_tokens = args.new_tokens;
  save_request.overhead_bytes_per_token = store::catalog_bytes_per_token(costs.n_layer);
  HCACHE_ASSIGN_OR_RETURN(const policy::SavePlan save,
                          policy::plan_save(costs, save_request, nullptr));
  const std::vector<policy::Mode> modes = {policy::Mode::kPlan, policy::Mode::kHidden,
                                           policy::Mode::kKv, policy::Mode::kRecompute,
                                           policy::Mode::kNaiveHybrid};
  Json rows = Json::array();
  for (const int64_t history : args.history) {
    policy::RestoreRequest request;
    request.available = policy::Availability::uniform(history, costs.n_layer, policy::kHasBoth);
    request.new_tokens = args.new_tokens;
    HCACHE_ASSIGN_OR_RETURN(const auto table, policy::compare_modes(costs, request, modes));
    if (args.json) {
      for (const policy::PlanRow& r : table) {
        rows.push_back({{"history", history},
                        {"new", args.new_tokens},
                        {"method", r.method},
                        {"schedule", r.schedule},
                        {"link_bytes_per_s", costs.link.bytes_per_s},
                        {"link_assumed", assumed},
                        {"predicted", prediction_json(r.predicted)}});
      }
      continue;
    }
    fmt::print("history {} tokens, {} new, everything saved\n{}\n", history, args.new_tokens,
               policy::format_table(table));
    if (args.timeline) {
      HCACHE_ASSIGN_OR_RETURN(const policy::Plan plan, policy::plan_restore(costs, request));
      HCACHE_ASSIGN_OR_RETURN(const policy::Timeline timeline, policy::simulate(costs, plan));
      fmt::print("{}\n", policy::format_timeline(plan, timeline));
    }
  }
  if (args.json) {
    return write_json({{"rows", rows},
                       {"save",
                        {{"mode", policy::save_mode_name(save.mode)},
                         {"schedule", save.schedule},
                         {"bytes_per_token", save.bytes_per_token},
                         {"kv_bytes_per_token", save.kv_bytes_per_token}}}},
                      "");
  }
  fmt::print("{}\n", policy::format_save_plan(save));
  return {};
}

}  // namespace

void add_plan(CLI::App& app, Verb* verb) {
  add_verb<PlanArgs>(app, verb, "plan",
                     "Print how a saved context would be restored, and how long that takes",
                     [](const PlanArgs& args) {
                       return args.hardware.empty() ? plan_here(args) : plan_hardware(args);
                     });
}

}  // namespace hcache::cli
