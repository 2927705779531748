// Scenarios of the kind `prefix-cache`: policies of eviction under a trace.

#include "base/env.h"
#include "sim/prefix_cache.h"
#include "sim/trace.h"
#include "sim_settings.h"

namespace hcache::cli {
namespace {

constexpr const char* kOptimal = "optimal";

struct Policy {
  std::string name;
  bool optimal = false;
  policy::EvictPolicy evict = policy::EvictPolicy::kLru;
};

struct Scenario {
  std::string trace;
  std::vector<double> capacities;  // shares of the trace's unique blocks
  std::vector<Policy> policies;
  std::vector<double> service_rates;  // requests per second; 0: no queue
};

Result<Scenario> read_scenario(const SimArgs& args, const Json& scenario) {
  Status status;
  Settings settings(scenario, args.scenario, &status);
  settings.get<std::string>("kind", "");
  settings.get<std::string>("about", "");
  Scenario s;
  s.trace = trace_file(args, settings.get<std::string>("trace", ""));
  s.capacities = settings.require<std::vector<double>>("capacities");
  s.service_rates = settings.get("service_rates", std::vector<double>{0});
  for (const auto& name : settings.require<std::vector<std::string>>("policies")) {
    Policy policy{.name = name, .optimal = name == kOptimal};
    if (!policy.optimal) {
      policy.evict = settings.parsed("policies", name, policy::parse_evict_policy);
    }
    s.policies.push_back(policy);
  }
  for (const double share : s.capacities) {
    if (!(share > 0 && share <= 1)) {
      settings.fail("'capacities' are shares: above 0, at most 1");
    }
  }
  for (const double rate : s.service_rates) {
    if (!(rate >= 0)) settings.fail("'service_rates' can't be negative");
  }
  if (s.trace.empty()) {
    settings.fail("no 'trace' is named; give one with --trace FILE");
  }
  settings.refuse_others();
  HCACHE_RETURN_IF_ERROR(status);
  return s;
}

}  // namespace

Result<SimResults> simulate_prefix_caches(const SimArgs& args, const Json& file) {
  HCACHE_ASSIGN_OR_RETURN(const Scenario scenario, read_scenario(args, file));
  HCACHE_ASSIGN_OR_RETURN(const std::string text, read_whole_file(Env::real(), scenario.trace));
  const auto trace = sim::read_trace(text);
  if (!trace.ok()) return trace.status().with_context(scenario.trace);
  const uint64_t unique = sim::unique_blocks(*trace);
  uint64_t accesses = 0;
  for (const sim::TraceRequest& request : *trace) accesses += request.blocks.size();

  SimResults results;
  results.headline =
      fmt::format("{} requests, {} blocks, {} of them unique", trace->size(), accesses, unique);
  results.extra["unique_blocks"] = unique;
  results.table = {{"policy", "service rate", "capacity", "blocks", "hit rate", "longest queue"}};
  ProgressLine line;
  const auto steps = static_cast<double>(scenario.policies.size() * scenario.service_rates.size() *
                                         scenario.capacities.size());
  double done = 0;
  for (const double rate : scenario.service_rates) {
    for (const Policy& policy : scenario.policies) {
      for (const double share : scenario.capacities) {
        if (!line.update("simulating", done++ / steps)) return cancelled("interrupted");
        sim::PrefixCacheOptions options;
        options.capacity_blocks = static_cast<uint64_t>(share * static_cast<double>(unique));
        options.service_rate = rate;
        options.optimal = policy.optimal;
        options.policy = policy.evict;
        HCACHE_ASSIGN_OR_RETURN(const auto report, sim::simulate_prefix_cache(*trace, options));
        results.rows.push_back({{"policy", policy.name},
                                {"service_rate", rate},
                                {"capacity", share},
                                {"capacity_blocks", options.capacity_blocks},
                                {"accesses", report.accesses},
                                {"hits", report.hits},
                                {"hit_rate", report.hit_rate()},
                                {"max_queue", report.max_queue}});
        results.table.push_back({policy.name, rate > 0 ? fmt::format("{:g}/s", rate) : "-",
                                 fmt::format("{:g} %", share * 100),
                                 fmt::format("{}", options.capacity_blocks),
                                 fmt::format("{:.2f} %", report.hit_rate() * 100),
                                 fmt::format("{}", report.max_queue)});
      }
    }
  }
  line.finish();
  return results;
}

}  // namespace hcache::cli
