// Scenarios of the kind `batch`: throughput batches with weights and context in host memory, on
// published hardware, by the batch cache's policies and its baselines.

#include <algorithm>

#include "sim/batch.h"
#include "sim_settings.h"

namespace hcache::cli {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr double kGB = 1e9;
constexpr int64_t kMost = 1 << 20;

struct System {
  std::string name;
  policy::HybridMode mode = policy::HybridMode::kSearch;
  double share = 0;
  bool weights_on_device = false;
};

struct Case {
  std::string name;
  sim::BatchSetup setup;
  std::vector<int64_t> batches;
  std::vector<int64_t> prompts;
  std::vector<System> systems;
};

bool takes_share(policy::HybridMode mode) {
  return mode == policy::HybridMode::kFixedShare || mode == policy::HybridMode::kTokens;
}

System read_system(Settings s) {
  System system;
  const auto mode = s.require<std::string>("mode");
  system.mode = s.parsed("mode", mode, policy::parse_hybrid_mode);
  system.name = s.get<std::string>("name", mode);
  system.share = s.number("share", 0, 0, 1);
  if (s.has("share") && !takes_share(system.mode)) {
    s.fail(fmt::format("'share' does nothing with mode '{}'", mode));
  }
  system.weights_on_device = s.get("weights_on_device", false);
  s.refuse_others();
  return system;
}

// Numbers of at least one, and not too many.
std::vector<int64_t> counts(Settings& s, const std::string& name) {
  auto values = s.require<std::vector<int64_t>>(name);
  if (values.empty()) s.fail(fmt::format("'{}' is empty", name));
  for (const int64_t value : values) {
    if (value < 1 || value > kMost) {
      s.fail(fmt::format("'{}' holds {}; it takes 1 to {}", name, value, kMost));
    }
  }
  return values;
}

void read_hardware(Settings s, sim::BatchSetup* setup) {
  policy::HardwareSetup& hardware = setup->hardware;
  hardware.device =
      s.parsed("device", s.get<std::string>("device", "rtx4090"), policy::find_device);
  hardware.model.gemm_efficiency =
      s.number("gemm_efficiency", hardware.model.gemm_efficiency, 0.01, 1);
  setup->link_efficiency = s.number("link_efficiency", setup->link_efficiency, 0.01, 1);
  setup->memory_efficiency = s.number("memory_efficiency", setup->memory_efficiency, 0.01, 1);
  setup->host_bytes = s.number("host_gib", 256, 0, 1e6) * kGiB;
  setup->workspace_bytes = s.number("workspace_gib", 2, 0, 1e4) * kGiB;
  setup->buffer_bytes = s.number("buffer_gib", 4, 0, 1e4) * kGiB;
  s.refuse_others();
}

Case read_case(const SimArgs& args, const Json& json, Status* status) {
  Settings s(json, args.scenario, status);
  Case c;
  for (const char* known : {"kind", "about", "cases"}) s.get<Json>(known, {});
  c.name = s.get<std::string>("name", "");
  c.setup.hardware.model = s.parsed("model", s.get<std::string>("model", ""), policy::find_model);
  read_hardware(s.object("hardware"), &c.setup);
  c.setup.block_tokens = s.integer("block_tokens", 64, 1, kMost);
  c.setup.output_tokens = s.integer("output", 128, 1, kMost);
  c.batches = counts(s, "batches");
  c.prompts = counts(s, "prompts");
  for (const Json& system : s.require<std::vector<Json>>("systems")) {
    c.systems.push_back(
        read_system(Settings(system, fmt::format("{}: systems", s.place()), status)));
  }
  s.refuse_others();
  return c;
}

Json row_of(const Case& c, const System& system, const sim::BatchSetup& setup,
            const sim::BatchReport& r) {
  return {{"case", c.name},
          {"system", system.name},
          {"mode", std::string(policy::hybrid_mode_name(system.mode))},
          {"batch", setup.batch},
          {"prompt", setup.prompt_tokens},
          {"output", setup.output_tokens},
          {"tokens_per_s", r.tokens_per_s},
          {"prefill_s", r.prefill_s},
          {"generate_s", r.generate_s},
          {"act_share", r.plan.ratio.act_share()},
          {"recompute_layers", r.plan.recompute.layers},
          {"mini_batches", r.plan.mini_batches.size()},
          {"resident_weights", r.resident_weights},
          {"act_blocks_on_device", r.act_on_device},
          {"host_blocks_gb", static_cast<double>(r.plan.host_bytes) / kGB},
          {"weights_gb", r.weights_bytes / kGB},
          {"kv_gb", r.kv_bytes / kGB},
          {"act_gb", r.act_bytes / kGB},
          {"link_busy", r.link_busy},
          {"compute_busy", r.compute_busy}};
}

std::vector<std::string> table_row(const Json& row) {
  const auto number = [&](const char* name) { return row.at(name).get<double>(); };
  const auto percent = [&](const char* name) {
    return fmt::format("{:.1f} %", 100 * number(name));
  };
  return {row.at("case"),
          row.at("system"),
          fmt::format("{}", row.at("batch").get<int64_t>()),
          fmt::format("{}", row.at("prompt").get<int64_t>()),
          fmt::format("{:.2f}", number("tokens_per_s")),
          fmt::format("{:.1f}", number("prefill_s")),
          fmt::format("{:.1f}", number("generate_s")),
          percent("act_share"),
          fmt::format("{}", row.at("recompute_layers").get<int32_t>()),
          fmt::format("{:.0f}", number("weights_gb")),
          fmt::format("{:.0f}", number("kv_gb")),
          fmt::format("{:.0f}", number("act_gb")),
          percent("link_busy"),
          percent("compute_busy")};
}

Status simulate(const Case& c, SimResults* results) {
  for (const int64_t batch : c.batches) {
    for (const int64_t prompt : c.prompts) {
      for (const System& system : c.systems) {
        sim::BatchSetup setup = c.setup;
        setup.batch = batch;
        setup.prompt_tokens = prompt;
        setup.mode = system.mode;
        setup.share = system.share;
        setup.weights_on_device = system.weights_on_device;
        const auto report = sim::simulate_batch(setup);
        if (!report.ok()) {
          return report.status().with_context(
              fmt::format("{} {}, batch {}, prompt {}", c.name, system.name, batch, prompt));
        }
        Json row = row_of(c, system, setup, *report);
        results->table.push_back(table_row(row));
        results->rows.push_back(std::move(row));
      }
    }
  }
  return {};
}

}  // namespace

Result<SimResults> simulate_batches(const SimArgs& args, const Json& scenario) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<Json> cases, scenario_cases(args, scenario));
  SimResults results;
  results.headline =
      "Throughput batches; gigabytes are what goes to the device while tokens are generated";
  results.table = {{"case", "system", "batch", "prompt", "tokens/s", "prefill s", "generate s",
                    "ACT", "RE layers", "weights GB", "KV GB", "ACT GB", "link", "compute"}};
  for (const Json& json : cases) {
    Status status;
    const Case c = read_case(args, json, &status);
    HCACHE_RETURN_IF_ERROR(status);
    HCACHE_RETURN_IF_ERROR(simulate(c, &results));
  }
  return results;
}

}  // namespace hcache::cli
