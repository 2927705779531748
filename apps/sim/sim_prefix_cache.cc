// Scenarios of the kind `prefix-cache`: policies of eviction under a trace.

#include <algorithm>
#include <optional>

#include "base/env.h"
#include "policy/hardware_plan.h"
#include "policy/miss_cost.h"
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
  // What blocks cost to prefill; none: all the same.
  std::optional<policy::HardwareSetup> hardware;
  bool costs_known = true;  // by the policies
};

// Seconds that a hit saves, by the block's place in its chain: prefilling it less reading its KV
// over the device's link, or from the SSDs.
Result<std::vector<double>> block_seconds(const Scenario& s, size_t longest) {
  std::vector<double> seconds;
  if (!s.hardware) return seconds;
  HCACHE_ASSIGN_OR_RETURN(policy::RestoreCosts costs, policy::hardware_costs(*s.hardware));
  policy::SavedRows block;
  block.rows = sim::kTraceBlockTokens;
  block.copied = costs.n_layer;
  block.bytes =
      static_cast<double>(costs.layers[0].kv_bytes * costs.n_layer * sim::kTraceBlockTokens);
  const double link = costs.link.bytes_per_s;
  const policy::TierCosts tier{.costs = std::move(costs), .bytes_per_s = link};
  for (size_t b = 0; b < longest; ++b) {
    block.first = static_cast<int64_t>(b) * sim::kTraceBlockTokens;
    seconds.push_back(tier.miss_s(block));
  }
  return seconds;
}

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
  if (const auto model = settings.get<std::string>("model", ""); !model.empty()) {
    s.hardware.emplace();
    s.hardware->model = settings.parsed("model", model, policy::find_model);
    read_devices(settings, &*s.hardware);
    s.costs_known = settings.get("costs_known", true);
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
  size_t longest = 0;
  for (const sim::TraceRequest& request : *trace) {
    accesses += request.blocks.size();
    longest = std::max(longest, request.blocks.size());
  }
  HCACHE_ASSIGN_OR_RETURN(const std::vector<double> block_s, block_seconds(scenario, longest));

  SimResults results;
  results.headline =
      fmt::format("{} requests, {} blocks, {} of them unique", trace->size(), accesses, unique);
  results.extra["unique_blocks"] = unique;
  results.table = {{"policy", "service rate", "capacity", "blocks", "hit rate", "prefill saved",
                    "longest queue"}};
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
        options.block_s = block_s;
        options.costs_known = scenario.costs_known;
        HCACHE_ASSIGN_OR_RETURN(const auto report, sim::simulate_prefix_cache(*trace, options));
        results.rows.push_back({{"policy", policy.name},
                                {"service_rate", rate},
                                {"capacity", share},
                                {"capacity_blocks", options.capacity_blocks},
                                {"accesses", report.accesses},
                                {"hits", report.hits},
                                {"hit_rate", report.hit_rate()},
                                {"max_queue", report.max_queue}});
        if (!block_s.empty()) {
          results.rows.back()["prefill_s"] = report.prefill_s;
          results.rows.back()["saved_s"] = report.saved_s;
        }
        results.table.push_back({policy.name, rate > 0 ? fmt::format("{:g}/s", rate) : "-",
                                 fmt::format("{:g} %", share * 100),
                                 fmt::format("{}", options.capacity_blocks),
                                 fmt::format("{:.2f} %", report.hit_rate() * 100),
                                 block_s.empty() ? "-" : fmt::format("{:.0f} s", report.saved_s),
                                 fmt::format("{}", report.max_queue)});
      }
    }
  }
  line.finish();
  return results;
}

}  // namespace hcache::cli
