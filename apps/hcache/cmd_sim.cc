// hcache sim: policies of production under recorded load, without a machine that could serve it.

#include <fmt/format.h>

#include <filesystem>
#include <memory>
#include <set>

#include "base/env.h"
#include "commands.h"
#include "session.h"
#include "sim/prefix_cache.h"
#include "sim/trace.h"

namespace hcache::cli {
namespace {

struct SimArgs {
  std::string scenario;
  std::string trace;
  std::string json_file;
};

// docs/simulator.md describes the file.
struct Scenario {
  std::string trace;
  std::vector<double> capacities;     // shares of the trace's unique blocks
  std::vector<std::string> policies;  // names, and "optimal"
  std::vector<double> service_rates;  // requests per second; 0: no queue
};

Result<Scenario> read_scenario(const std::string& path) {
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(Env::real(), path));
  const auto wrong = [&](const std::string& what) {
    return invalid_argument(fmt::format("{}: {}", path, what));
  };
  try {
    const Json j = Json::parse(text);
    static const std::set<std::string> kKnown = {"kind",     "trace",         "capacities",
                                                 "policies", "service_rates", "about"};
    for (const auto& [name, value] : j.items()) {
      if (!kKnown.contains(name)) return wrong(fmt::format("no setting '{}'", name));
    }
    if (j.at("kind") != "prefix-cache") {
      return wrong("'kind' must be prefix-cache, the one kind of scenario that there is");
    }
    Scenario s;
    if (j.contains("trace")) {
      s.trace = std::filesystem::path(path).parent_path() / j.at("trace").get<std::string>();
    }
    s.capacities = j.at("capacities").get<std::vector<double>>();
    s.policies = j.at("policies").get<std::vector<std::string>>();
    s.service_rates = j.value("service_rates", std::vector<double>{0});
    for (const double share : s.capacities) {
      if (!(share > 0 && share <= 1)) return wrong("'capacities' are shares: above 0, at most 1");
    }
    for (const double rate : s.service_rates) {
      if (!(rate >= 0)) return wrong("'service_rates' can't be negative");
    }
    for (const std::string& name : s.policies) {
      if (name != "optimal") HCACHE_RETURN_IF_ERROR(policy::parse_evict_policy(name).status());
    }
    return s;
  } catch (const Json::exception& e) {
    return wrong(e.what());
  }
}

Status simulate(const SimArgs& args) {
  if (args.scenario.empty()) return invalid_argument("--scenario names the file to simulate");
  HCACHE_ASSIGN_OR_RETURN(const Scenario scenario, read_scenario(args.scenario));
  const std::string& trace_file = args.trace.empty() ? scenario.trace : args.trace;
  if (trace_file.empty()) {
    return invalid_argument(
        fmt::format("{} names no 'trace'; give one with --trace FILE", args.scenario));
  }
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(Env::real(), trace_file));
  const auto trace = sim::read_trace(text);
  if (!trace.ok()) return trace.status().with_context(trace_file);
  const uint64_t unique = sim::unique_blocks(*trace);
  uint64_t accesses = 0;
  for (const sim::TraceRequest& request : *trace) accesses += request.blocks.size();
  Json rows = Json::array();
  std::vector<std::vector<std::string>> table = {
      {"policy", "service rate", "capacity", "blocks", "hit rate", "longest queue"}};
  ProgressLine line;
  const double steps = static_cast<double>(
      scenario.policies.size() * scenario.service_rates.size() * scenario.capacities.size());
  double done = 0;
  for (const double rate : scenario.service_rates) {
    for (const std::string& name : scenario.policies) {
      for (const double share : scenario.capacities) {
        if (!line.update("simulating", done++ / steps)) return cancelled("interrupted");
        sim::PrefixCacheOptions options;
        options.capacity_blocks = static_cast<uint64_t>(share * static_cast<double>(unique));
        options.service_rate = rate;
        options.optimal = name == "optimal";
        if (!options.optimal) options.policy = policy::parse_evict_policy(name).value();
        HCACHE_ASSIGN_OR_RETURN(const auto report, sim::simulate_prefix_cache(*trace, options));
        rows.push_back({{"policy", name},
                        {"service_rate", rate},
                        {"capacity", share},
                        {"capacity_blocks", options.capacity_blocks},
                        {"accesses", report.accesses},
                        {"hits", report.hits},
                        {"hit_rate", report.hit_rate()},
                        {"max_queue", report.max_queue}});
        table.push_back({name, rate > 0 ? fmt::format("{:g}/s", rate) : "-",
                         fmt::format("{:g} %", share * 100),
                         fmt::format("{}", options.capacity_blocks),
                         fmt::format("{:.2f} %", report.hit_rate() * 100),
                         fmt::format("{}", report.max_queue)});
      }
    }
  }
  line.finish();
  if (args.json_file != "-") {
    fmt::print("{} requests, {} blocks, {} of them unique\n\n{}", trace->size(), accesses, unique,
               format_columns(table));
  }
  if (args.json_file.empty()) return {};
  return write_json({{"scenario", args.scenario}, {"unique_blocks", unique}, {"rows", rows}},
                    args.json_file == "-" ? "" : args.json_file);
}

}  // namespace

void add_sim(CLI::App& app, Verb* verb) {
  CLI::App* sub = app.add_subcommand(
      "sim", "Run the policies of eviction on a recorded trace and print their hit rates");
  const auto args = std::make_shared<SimArgs>();
  add_option(*sub, "scenario", &args->scenario);
  add_option(*sub, "sim-trace", &args->trace);
  add_option(*sub, "json-file", &args->json_file);
  sub->callback([args, verb] { *verb = [args] { return simulate(*args); }; });
}

}  // namespace hcache::cli
