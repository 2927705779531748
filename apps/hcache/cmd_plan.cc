// hcache plan: the restoration plan and its predicted times, for this machine or the paper's.

#include <fmt/format.h>

#include <algorithm>
#include <memory>

#include "commands.h"
#include "options.h"
#include "policy/hardware_plan.h"
#include "policy/plan_report.h"
#include "session.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

struct PlanArgs {
  RuntimeArgs runtime;  // its model.path is the shape's name with --hardware
  std::string hardware;
  int gpus = 0;
  int ssds = 0;
  std::vector<int64_t> history;
  int64_t new_tokens = 0;
  bool timeline = false;
  bool json = false;
};

Json to_json(const policy::Prediction& p) {
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
                  {"predicted", to_json(plan.exact.predicted)}}},
                {"kv_bytes_per_token", plan.kv_bytes_per_token},
                {"modes", Json::array()}};
    for (const policy::ModePrediction& m : plan.modes) {
      row["modes"].push_back({{"method", policy::mode_name(m.mode)},
                              {"schedule", m.plan.schedule},
                              {"predicted", to_json(m.plan.predicted)}});
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
                        {"predicted", to_json(r.predicted)}});
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
  CLI::App* sub = app.add_subcommand(
      "plan", "Print how a saved context would be restored, and how long that takes");
  const auto args = std::make_shared<PlanArgs>();
  add_option(*sub, "shape", &args->runtime.model.path);
  add_option(*sub, "hardware", &args->hardware);
  add_option(*sub, "gpus", &args->gpus);
  add_option(*sub, "ssd", &args->ssds);
  add_option(*sub, "history", &args->history);
  add_option(*sub, "new", &args->new_tokens);
  add_option(*sub, "timeline", &args->timeline);
  add_option(*sub, "device", &args->runtime.model.device);
  add_option(*sub, "threads", &args->runtime.model.threads);
  add_engine_options(*sub, &args->runtime);
  add_option(*sub, "link", &args->runtime.link);
  add_option(*sub, "save", &args->runtime.save);
  add_option(*sub, "state-type", &args->runtime.state_type);
  add_state_options(*sub, &args->runtime.state);
  add_option(*sub, "json", &args->json);
  sub->callback([args, verb] {
    *verb = [args] { return args->hardware.empty() ? plan_here(*args) : plan_hardware(*args); };
  });
}

}  // namespace hcache::cli
