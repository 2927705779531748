// Scenarios of the kind `serving`: a server on published hardware under a load.

#include <algorithm>

#include "base/env.h"
#include "bench_serve_report.h"
#include "sim/serving.h"
#include "sim/workload.h"
#include "sim_settings.h"

namespace hcache::cli {
namespace {

constexpr double kMany = 1e9;
constexpr double kGiB = 1024.0 * 1024 * 1024;
constexpr double kMsPerS = 1e3;

// One curve or more: a setup, under loads of several rates, by several methods.
struct Case {
  std::string name;
  sim::ServingSetup setup;  // apart from the method
  sim::LoadOptions load;    // apart from the rate
  std::string trace;
  std::vector<sim::ServingMethod> methods;
  std::vector<double> rates;    // sessions per second; of a trace: times its own
  int64_t warmup_requests = 0;  // the first to be answered, which are not counted
};

policy::CostCurve read_curve(Settings& s, const std::string& name) {
  if (s.get<Json>(name, {}).is_object()) {
    Settings affine = s.object(name);
    return policy::CostCurve::affine(affine.number("base_s", 0, 0, kMany),
                                     affine.number("per_row_s", 0, 0, kMany));
  }
  std::vector<policy::CostCurve::Point> points;
  for (const auto& [rows, seconds] : s.require<std::vector<std::pair<int64_t, double>>>(name)) {
    points.push_back({rows, seconds});
  }
  auto curve = policy::CostCurve::table(std::move(points));
  if (curve.ok()) return *std::move(curve);
  s.fail(fmt::format("'{}': {}", name, curve.status().message()));
  return {};
}

// The "costs" of `hcache profile --json`.
void read_measured(Settings s, sim::ServingSetup* setup) {
  sim::MeasuredCosts measured;
  policy::RestoreCosts& costs = measured.restore;
  costs.n_layer = static_cast<int32_t>(s.integer("layers", 0, 1, 1 << 16));
  policy::LayerCosts layer;
  layer.project = read_curve(s, "project");
  layer.load_kv = read_curve(s, "load_kv");
  layer.dense = read_curve(s, "dense");
  layer.attn_per_key = read_curve(s, "attn_per_key");
  layer.hidden_bytes = s.integer("hidden_bytes", 0, 1, 1 << 30);
  layer.kv_bytes = s.integer("kv_bytes", 0, 1, 1 << 30);
  costs.layers.assign(static_cast<size_t>(std::max(costs.n_layer, 1)), layer);
  costs.layers.back().dense = read_curve(s, "dense_of_last_layer");
  costs.link.bytes_per_s = s.number("link_bytes_per_s", 0, 1, 1e15);
  costs.link.start_s = s.number("link_start_s", 0, 0, kMany);
  costs.slice_rows = s.integer("slice_rows", costs.slice_rows, 1, 1 << 20);
  costs.batch_rows = s.integer("batch_rows", costs.batch_rows, 1, 1 << 20);
  costs.finish_s = s.number("finish_s", 0, 0, kMany);
  costs.re_tail_projects = true;
  measured.step_finish_s = s.number("step_finish_s", 0, 0, kMany);
  s.refuse_others();
  setup->measured = std::move(measured);
}

// What `hcache profile --json` wrote.
void read_profile(Settings& s, const std::string& file, sim::ServingSetup* setup) {
  const auto text = read_whole_file(Env::real(), file);
  if (!text.ok()) return s.fail(text.status().message());
  const Json json = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object() || !json.contains("costs")) {
    return s.fail(
        fmt::format("{} has no 'costs': it must come from `hcache profile --json`", file));
  }
  read_measured(Settings(json.at("costs"), file + ": costs", s.status()), setup);
}

void read_hardware(const SimArgs& args, Settings s, sim::ServingSetup* setup) {
  if (const auto file = s.get<std::string>("profile", ""); !file.empty()) {
    read_profile(s, beside_scenario(args, file), setup);
  }
  read_devices(s, &setup->hardware);
  setup->memory_share = s.number("memory_share", setup->memory_share, 0.01, 1);
  setup->memory_efficiency = s.number("memory_efficiency", setup->memory_efficiency, 0.01, 1);
  setup->step_overhead_s = s.number("step_overhead_ms", 0, 0, kMany) / kMsPerS;
  setup->request_overhead_s = s.number("request_overhead_ms", 0, 0, kMany) / kMsPerS;
  s.refuse_others();
}

void read_scheduler(Settings s, scheduler::SchedulerOptions* options) {
  auto& batch = options->batch;
  batch.max_step_tokens =
      static_cast<int32_t>(s.integer("step_tokens", batch.max_step_tokens, 1, 1 << 20));
  batch.max_sequences =
      static_cast<int32_t>(s.integer("sequences", batch.max_sequences, 1, 1 << 20));
  options->max_restores =
      static_cast<int32_t>(s.integer("restores", options->max_restores, 1, 1024));
  options->restore.share = s.number("restore_share", options->restore.share, 1e-6, kMany);
  options->restore.exclusive = s.get("restore_exclusive", false);
  options->evict =
      s.parsed("evict", s.get<std::string>("evict", "scheduler-aware"), policy::parse_evict_policy);
  options->offload_above = s.number("offload_above", options->offload_above, 0, 1);
  options->queue.policy = s.parsed("queue_policy", s.get<std::string>("queue_policy", "fcfs"),
                                   policy::parse_queue_policy);
  options->queue.window =
      static_cast<int32_t>(s.integer("queue_window", options->queue.window, 1, 1 << 20));
  s.refuse_others();
}

void read_state(Settings s, sim::ServingSetup* setup) {
  setup->keep_resident = s.get("keep_resident", true);
  setup->scheduler.fetch =
      s.parsed("fetch", s.get<std::string>("fetch", "on-demand"), policy::parse_fetch_policy);
  setup->hardware.history = s.integer("planned_history", setup->hardware.history, 1, 1 << 30);
  const Json tiers = s.get<Json>("tiers", Json::array());
  if (!tiers.is_array()) s.fail("'tiers' must be an array");
  for (const Json& json : tiers) {
    Settings row(json, fmt::format("{}: tiers", s.place()), s.status());
    sim::TierSetup tier;
    tier.name = row.require<std::string>("name");
    tier.capacity_bytes = row.number("gib", 0, 0, kMany) * kGiB;
    tier.read_bytes_per_s = row.number("gb_per_s", 0, 1e-6, kMany) * 1e9;
    tier.policy.evict =
        row.parsed("evict", row.get<std::string>("evict", "lru"), policy::parse_evict_policy);
    tier.policy.whole_chains = row.get("evict_whole", false);
    tier.policy.reserve = row.number("reserve", 0, 0, 0.5);
    tier.chain_tokens = row.integer("conversation_tokens", 0, 0, 1 << 30);
    if (tier.chain_tokens > 0 && !tier.policy.whole_chains) {
      row.fail(
          "'conversation_tokens' needs 'evict_whole': only whole conversations leave such room");
    }
    row.refuse_others();
    setup->tiers.push_back(std::move(tier));
  }
  s.refuse_others();
}

void read_workload(const SimArgs& args, Settings s, Case* c) {
  sim::LoadOptions& load = c->load;
  c->trace = trace_file(args, s.get<std::string>("trace", ""));
  load.sessions = s.integer("sessions", c->trace.empty() ? 1000 : 0, 0, 1 << 30);
  load.warmup = s.integer("warmup", 0, 0, 1 << 30);
  load.seed = static_cast<uint32_t>(s.integer("seed", 1, 0, 0xffffffff));
  load.rounds = s.integer("rounds", 6, 1, 1 << 20);
  load.mean_rounds = s.number("mean_rounds", 0, 0, 1 << 20);
  load.rounds_sigma = s.number("rounds_sigma", 0, 0, 10);
  load.most_rounds = s.integer("most_rounds", 0, 0, 1 << 20);
  // Drawing again has to end.
  if (load.most_rounds > 0 && load.mean_rounds > static_cast<double>(load.most_rounds)) {
    s.fail("'mean_rounds' is above 'most_rounds'");
  }
  load.think_s = s.number("think_s", 30, 0, kMany);
  load.think_exponential = s.get("think_exponential", false);
  load.context = s.integer("context", 0, 0, 1 << 30);
  load.mean_input = s.number("mean_input", load.mean_input, 1, kMany);
  load.mean_output = s.number("mean_output", load.mean_output, 1, kMany);
  load.input_sigma = s.number("input_sigma", load.input_sigma, 0, 10);
  load.output_sigma = s.number("output_sigma", load.output_sigma, 0, 10);
  load.conversation_sigma = s.number("conversation_sigma", 0, 0, 10);
  load.document = s.integer("document", 0, 0, 1 << 30);
  load.documents = s.integer("documents", 0, 0, 1 << 24);
  load.document_skew = s.number("document_skew", 0, 0, 100);
  load.system_tokens = s.integer("system_tokens", 0, 0, 1 << 24);
  load.message_tokens = s.integer("message_tokens", 0, 0, 1 << 24);
  load.length_scale = s.number("length_scale", 1, 1e-6, kMany);
  if (c->trace.empty() && load.sessions == 0) s.fail("'sessions' is 0");
  s.refuse_others();
}

Case read_case(const SimArgs& args, const Json& json, Status* status) {
  Settings s(json, args.scenario, status);
  Case c;
  c.name = s.get<std::string>("name", "");
  for (const char* known : {"kind", "about", "cases"}) s.get<Json>(known, {});
  read_hardware(args, s.object("hardware"), &c.setup);
  const auto model = s.get<std::string>("model", "");
  if (!c.setup.measured) c.setup.hardware.model = s.parsed("model", model, policy::find_model);
  read_scheduler(s.object("scheduler"), &c.setup.scheduler);
  read_state(s.object("state"), &c.setup);
  read_workload(args, s.object("workload"), &c);
  c.setup.context = s.integer("context", c.setup.context, 1, 1 << 30);
  c.setup.arena_tokens = s.integer("arena_tokens", 0, 0, 1 << 30);
  c.setup.overflow =
      s.parsed("overflow", s.get<std::string>("overflow", "end"), sim::parse_overflow);
  c.setup.overflow_share = s.number("overflow_share", c.setup.overflow_share, 0.01, 1);
  c.warmup_requests = s.integer("warmup_requests", 0, 0, 1 << 30);
  for (const auto& name : s.get("methods", std::vector<std::string>{"plan"})) {
    c.methods.push_back(s.parsed("methods", name, sim::parse_serving_method));
  }
  c.rates = s.get("rates", std::vector<double>{1});
  for (const double rate : c.rates) {
    if (!(rate > 0 && rate <= kMany)) s.fail("'rates' must be above 0");
  }
  s.refuse_others();
  return c;
}

Result<std::vector<Case>> read_cases(const SimArgs& args, const Json& scenario) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<Json> settings, scenario_cases(args, scenario));
  Status status;
  std::vector<Case> cases;
  for (const Json& json : settings) {
    cases.push_back(read_case(args, json, &status));
    HCACHE_RETURN_IF_ERROR(status);
  }
  return cases;
}

Result<sim::Schedule> make_load(const Case& c, double rate) {
  sim::LoadOptions options = c.load;
  if (c.trace.empty()) {
    options.rate = rate;
    return sim::draw_conversations(options);
  }
  options.time_scale = 1 / rate;
  return sim::replay_trace_file(Env::real(), options, c.trace);
}

// How requests found the state of the rounds before. A request hits if at least half of its history
// was there, and where most of that was counts.
struct Hits {
  int64_t requests = 0;
  int64_t resident = 0;
  int64_t memory = 0;
  int64_t disk = 0;

  void add(const sim::ServedRequest& r) {
    ++requests;
    const int64_t found = r.resident_tokens + r.restored_tokens;
    if (r.history_tokens == 0 || 2 * found < r.history_tokens) return;
    ++(r.resident_tokens >= r.restored_tokens ? resident : r.memory_share >= 0.5 ? memory : disk);
  }
  [[nodiscard]] Json json() const {
    const auto all = static_cast<double>(std::max<int64_t>(requests, 1));
    return {{"all", static_cast<double>(resident + memory + disk) / all},
            {"resident", static_cast<double>(resident) / all},
            {"dram", static_cast<double>(memory) / all},
            {"disk", static_cast<double>(disk) / all}};
  }
};

Json summarise(const sim::ServingReport& report, int64_t warmup_requests) {
  std::vector<double> first;
  std::vector<double> returning;
  std::vector<double> admitted;
  std::vector<double> tpot;
  std::vector<double> restore;
  int64_t prompts = 0;
  int64_t prompt = 0;
  int64_t resident = 0;
  int64_t restored = 0;
  int64_t output = 0;
  Hits hits;
  for (const sim::ServedRequest& r : report.requests) {
    if (r.warmup || warmup_requests-- > 0) continue;
    hits.add(r);
    (r.returning ? returning : first).push_back(r.ttft_s);
    admitted.push_back(r.ttft_s - r.queue_s);
    prompts += r.prompt_tokens;
    if (r.tpot_s > 0) tpot.push_back(r.tpot_s);
    if (r.restored_tokens > 0) restore.push_back(r.restore_s);
    output += r.output_tokens;
    if (!r.returning) continue;
    prompt += r.prompt_tokens;
    resident += r.resident_tokens;
    restored += r.restored_tokens;
  }
  const auto share = [](int64_t part, int64_t all) {
    return all > 0 ? static_cast<double>(part) / static_cast<double>(all) : 0;
  };
  Json tiers = Json::array();
  for (const auto& tier : report.tiers) {
    tiers.push_back({{"name", tier.name},
                     {"busy", tier.link_busy_s / report.duration_s},
                     {"evictions", tier.evictions}});
  }
  const auto n = static_cast<double>(report.requests.size());
  return {{"requests", first.size() + returning.size()},
          {"too_long", report.too_long},
          {"cut", report.cut},
          {"failed", report.failed},
          {"duration_s", report.duration_s},
          {"requests_per_s", n / report.duration_s},
          {"prompt_tokens", prompts},
          {"output_tokens", output},
          {"ttft_ms",
           {{"first", load::distribution(std::move(first))},
            {"returning", load::distribution(std::move(returning))},
            {"since_admitted", load::distribution(std::move(admitted))}}},
          {"tpot_ms", load::distribution(std::move(tpot))},
          {"restore_ms", load::distribution(std::move(restore))},
          {"hit_rate", hits.json()},
          {"resident_share", share(resident, prompt)},
          {"restored_share", share(restored, prompt)},
          {"device_s", report.step_s + report.restore_s},
          {"device_busy", (report.step_s + report.restore_s) / report.duration_s},
          {"preemptions", report.preemptions},
          {"arena_tokens", report.arena_tokens},
          {"saved", report.save_schedule},
          {"saved_bytes_per_token", report.saved_bytes_per_token},
          {"tiers", std::move(tiers)}};
}

std::string ms_of(const Json& distribution, const char* what) {
  return distribution.contains(what) ? fmt::format("{:.1f}", distribution.at(what).get<double>())
                                     : "-";
}

std::vector<std::string> table_row(const Json& row) {
  const Json& returning = row.at("ttft_ms").at("returning");
  return {row.at("case"),
          row.at("method"),
          fmt::format("{:g}", row.at("rate").get<double>()),
          fmt::format("{:.2f}", row.at("requests_per_s").get<double>()),
          ms_of(returning, "mean"),
          ms_of(returning, "p50"),
          ms_of(returning, "p90"),
          ms_of(returning, "p99"),
          ms_of(row.at("tpot_ms"), "mean"),
          fmt::format("{:.1f} %", 100 * row.at("resident_share").get<double>()),
          fmt::format("{:.1f} %", 100 * row.at("restored_share").get<double>()),
          fmt::format("{:.0f} %", 100 * row.at("device_busy").get<double>())};
}

}  // namespace

Result<SimResults> simulate_servers(const SimArgs& args, const Json& file) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<Case> cases, read_cases(args, file));
  SimResults results;
  results.table = {{"case", "method", "sessions/s", "requests/s", "TTFT mean", "p50", "p90",
                    "p99 ms", "TPOT ms", "resident", "restored", "device"}};
  double steps = 0;
  for (const Case& c : cases) steps += static_cast<double>(c.rates.size() * c.methods.size());
  double done = 0;
  ProgressLine line;
  for (const Case& c : cases) {
    for (const double rate : c.rates) {
      HCACHE_ASSIGN_OR_RETURN(const sim::Schedule load, make_load(c, rate));
      for (const sim::ServingMethod method : c.methods) {
        sim::ServingSetup setup = c.setup;
        setup.method = method;
        HCACHE_ASSIGN_OR_RETURN(const sim::ServingReport report,
                                sim::simulate_serving(setup, load, [&](double part) {
                                  return line.update("simulating", (done + part) / steps);
                                }));
        ++done;
        Json row = {{"case", c.name}, {"method", sim::serving_method_name(method)}, {"rate", rate}};
        row.update(summarise(report, c.warmup_requests));
        results.table.push_back(table_row(row));
        results.rows.push_back(std::move(row));
      }
    }
  }
  line.finish();
  results.headline = "Times to first token are those of returning requests.";
  return results;
}

}  // namespace hcache::cli
