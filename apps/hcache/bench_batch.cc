// hcache bench batch: what a step of the batch engine takes at a chosen balance of compute and
// link, for each way to keep the sequences' state (HybridServe §5).
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <random>

#include "base/throttled_env.h"
#include "base/units.h"
#include "bench.h"
#include "commands.h"
#include "engine/hybrid_engine.h"
#include "model/logits.h"
#include "model/tools.h"
#include "session.h"
#include "state/batch_policy.h"

namespace hcache::cli {
namespace {

constexpr double kScaledPrompts = 0.25;  // of the run that compares tokens before anything is timed
constexpr int64_t kScaledTokens = 6;
constexpr int64_t kReplanSteps = 8;
constexpr size_t kCacheBytes = size_t{64} << 30;  // more than any batch here takes

// One batch from its prompts to its last tokens.
struct BatchRun {
  policy::HybridPlan plan;
  std::vector<std::vector<int32_t>> replies;
  double prefill_s = 0;
  double decode_s = 0;
  std::vector<state::StepComparison> steps;
  double read_bytes = 0;                              // a step, mean
  std::vector<double> generate_s, forward_s, wait_s;  // a step
};

// A way to keep the state, and what its runs took.
struct BatchRow {
  std::string name;
  policy::HybridMode mode = policy::HybridMode::kSearch;
  std::vector<BatchRun> runs;
  std::vector<double> tokens_per_s;  // decoding
};

// The paper's balance of width 1,024 on this machine: multi-head, F16.
model::ModelShape balance_shape() {
  return {.name = "batch-1024",
          .arch = "llama",
          .n_layer = 8,
          .n_embd = 1024,
          .n_head = 16,
          .n_head_kv = 16,
          .head_dim = 64,
          .n_ff = 2816,
          .n_vocab = 4096,
          .n_ctx = 8192};
}

class BatchBench {
 public:
  BatchBench(const BatchBenchArgs& args, const model::Model& model, ThrottledEnv& env,
             std::string dir)
      : args_(args), model_(model), env_(env), dir_(std::move(dir)) {
    for (int64_t i = 0; i < args.requests; ++i) {
      const int64_t spread = args.longest - args.shortest;
      lengths_.push_back(args.shortest + spread * i / std::max<int64_t>(args.requests - 1, 1));
    }
    // Mini-batches of an arrival order hold short and long ones alike.
    std::shuffle(lengths_.begin(), lengths_.end(), std::mt19937(1));
  }

  Status run(ProgressLine& line) {
    line_ = &line;
    HCACHE_RETURN_IF_ERROR(make_rows());
    for (int64_t rep = 0; rep < args_.reps; ++rep) {
      wait_for_turn(args_);
      // A machine's speed drifts: the link follows it from one repetition to the next.
      HCACHE_RETURN_IF_ERROR(choose_link());
      if (rep == 0) HCACHE_RETURN_IF_ERROR(verify());
      for (size_t i = 0; i < rows_.size(); ++i) {
        // Every other time in the reverse order.
        BatchRow& row = rows_[rep % 2 == 0 ? i : rows_.size() - 1 - i];
        HCACHE_RETURN_IF_ERROR(
            tell(fmt::format("{}: run {} of {}", row.name, rep + 1, args_.reps)));
        HCACHE_ASSIGN_OR_RETURN(BatchRun run, run_batch(row, 1, args_.new_tokens, link_));
        row.tokens_per_s.push_back(static_cast<double>(args_.requests * (args_.new_tokens - 1)) /
                                   run.decode_s);
        row.runs.push_back(std::move(run));
      }
      for (const BatchRow& row : rows_) {
        if (row.runs.back().replies != rows_.front().runs.back().replies) {
          return internal_error(
              fmt::format("{} gave other tokens than {}", row.name, rows_.front().name));
        }
      }
    }
    return {};
  }

  [[nodiscard]] Json results() const;
  [[nodiscard]] std::vector<std::vector<std::string>> table() const;

 private:
  Status tell(const std::string& what) {
    return line_->update(what, 0) ? Status() : cancelled("interrupted");
  }

  [[nodiscard]] engine::HybridOptions engine_options() const {
    engine::HybridOptions options;
    options.buffer_tokens = args_.buffer_tokens;
    options.n_buffers = args_.buffers;
    options.max_batch_rows = args_.runtime.batch;
    options.max_step_rows = int64_t{1} << 20;  // all prompts in one step
    options.attention = args_.attention();
    options.host_bytes = 0;
    options.disk_bytes = disk_bytes_;
    options.disk_dir = dir_;
    options.env = &env_;
    return options;
  }

  // Measures what generating K and V takes, sets the link to that, and measures all of it, with
  // the same contexts both times: what a token takes grows with them.
  Status choose_link() {
    const model::HParams& hp = model_.hparams();
    const double kv_bytes = 2.0 * 2.0 * hp.n_embd_kv();
    int64_t n_tokens = 0;
    for (const int64_t n : lengths_) n_tokens += n + args_.new_tokens + engine::kBlockTokens;
    disk_bytes_ = static_cast<size_t>(kv_bytes * hp.n_layer * static_cast<double>(n_tokens)) +
                  (size_t{64} << 20);
    std::vector<int64_t> sizes = {128, 256, 512, 768, 1024, 1536};
    std::erase_if(sizes, [&](int64_t n) { return n + engine::kBlockTokens > args_.buffer_tokens; });
    if (args_.link == "balance") {
      HCACHE_RETURN_IF_ERROR(tell("measuring what K and V take"));
      env_.set_read_bytes_per_s(0);
      HCACHE_ASSIGN_OR_RETURN(measured_,
                              state::measure_batch_costs(model_, engine_options(), sizes));
      link_ = kv_bytes * args_.balance / measured_.costs.kv_gen.slope;
    } else {
      HCACHE_ASSIGN_OR_RETURN(const Link link, parse_link(args_.link));
      link_ = link.rate;
    }
    links_.push_back(link_);
    env_.set_read_bytes_per_s(link_);
    HCACHE_RETURN_IF_ERROR(tell("measuring what the link takes"));
    HCACHE_ASSIGN_OR_RETURN(measured_, state::measure_batch_costs(model_, engine_options(), sizes));
    const double load_s = measured_.costs.load_kv.slope;
    if (load_s > 0) generate_over_load_.push_back(measured_.costs.kv_gen.slope / load_s);
    return {};
  }

  [[nodiscard]] state::BatchPolicyOptions policy_options(policy::HybridMode mode) const {
    return {.costs = measured_.costs,
            .sizes = measured_.sizes,
            .cache_bytes = static_cast<int64_t>(disk_bytes_),
            .buffer_tokens = args_.buffer_tokens,
            .mode = mode,
            .share = args_.share};
  }

  // The batch half-way through its replies.
  [[nodiscard]] std::vector<int64_t> contexts(double scale, int64_t n_new) const {
    std::vector<int64_t> tokens;
    for (const int64_t n : lengths_) tokens.push_back(scaled(n, scale) + n_new / 2);
    return tokens;
  }
  [[nodiscard]] static int64_t scaled(int64_t n, double scale) {
    return std::max<int64_t>(1, std::llround(static_cast<double>(n) * scale));
  }

  Status make_rows() {
    for (const std::string& name : args_.modes) {
      BatchRow row{.name = name, .runs = {}, .tokens_per_s = {}};
      HCACHE_ASSIGN_OR_RETURN(row.mode, policy::parse_hybrid_mode(name));
      rows_.push_back(std::move(row));
    }
    return {};
  }

  // Every mode's tokens on a small batch against those of a run that reads nothing.
  Status verify() {
    BatchRow resident;
    resident.name = "resident";
    resident.mode = policy::HybridMode::kKv;
    HCACHE_ASSIGN_OR_RETURN(const BatchRun expected,
                            run_batch(resident, kScaledPrompts, kScaledTokens, 0));
    for (const BatchRow& row : rows_) {
      HCACHE_RETURN_IF_ERROR(tell("comparing the tokens of " + row.name));
      HCACHE_ASSIGN_OR_RETURN(const BatchRun run, run_batch(row, kScaledPrompts, kScaledTokens, 0));
      if (run.replies != expected.replies) {
        return internal_error(row.name + " gives other tokens than a resident run");
      }
    }
    return {};
  }

  Result<BatchRun> run_batch(const BatchRow& row, double scale, int64_t n_new, double link) {
    state::BatchPolicy policy(policy_options(row.mode));
    HCACHE_RETURN_IF_ERROR(policy.plan(contexts(scale, n_new)));
    engine::HybridOptions options = engine_options();
    options.recomputed_layers = policy.recomputed_layers();
    options.decisions = policy.decisions();
    if (row.name == "resident") {
      options.host_bytes = kCacheBytes;
      options.disk_bytes = 0;
    }
    env_.set_read_bytes_per_s(0);
    HCACHE_ASSIGN_OR_RETURN(const auto engine, engine::HybridEngine::create(model_, options));
    std::mt19937 random(7);
    std::map<engine::RequestId, size_t> index;
    BatchRun run;
    run.plan = policy.plan();
    for (const int64_t length : lengths_) {
      std::vector<int32_t> prompt(static_cast<size_t>(scaled(length, scale)));
      for (int32_t& t : prompt) {
        t = static_cast<int32_t>(random() % static_cast<uint64_t>(model_.hparams().n_vocab));
      }
      HCACHE_ASSIGN_OR_RETURN(const engine::RequestId id,
                              engine->add(prompt, static_cast<int64_t>(prompt.size()) + n_new));
      index[id] = run.replies.size();
      run.replies.emplace_back();
    }
    double begin_s = now_s();
    for (int64_t step = 0; step < n_new; ++step) {
      if (interrupted()) return cancelled("interrupted");
      HCACHE_ASSIGN_OR_RETURN(const engine::HybridStep done, engine->step());
      for (const engine::RequestLogits& r : done.rows) {
        const int32_t token = model::argmax(r.logits);
        run.replies[index.at(r.id)].push_back(token);
        if (step + 1 < n_new) HCACHE_RETURN_IF_ERROR(engine->append(r.id, token));
      }
      if (step > 0) {
        add_step(run, policy.observe(done.times), done.times);
        if (row.mode == policy::HybridMode::kSearch && step % kReplanSteps == 0) {
          HCACHE_RETURN_IF_ERROR(policy.replan(contexts(scale, n_new)));
          engine->set_decisions(policy.decisions());
        }
        continue;
      }
      // The prompts' blocks are all in their places before the first token is decoded.
      HCACHE_RETURN_IF_ERROR(engine->flush());
      run.prefill_s = now_s() - begin_s;
      env_.set_read_bytes_per_s(link);
      begin_s = now_s();
    }
    run.decode_s = now_s() - begin_s;
    run.read_bytes /= std::max<double>(1, static_cast<double>(run.steps.size()));
    return run;
  }

  static void add_step(BatchRun& run, const state::StepComparison& comparison,
                       const engine::StepTimes& times) {
    run.steps.push_back(comparison);
    run.read_bytes += static_cast<double>(times.read_bytes);
    double generate_s = 0;
    double forward_s = 0;
    for (const engine::BatchSample& s : times.samples) {
      generate_s += s.generate_s;
      forward_s += s.forward_s;
    }
    run.generate_s.push_back(generate_s);
    run.forward_s.push_back(forward_s);
    run.wait_s.push_back(times.wait_s);
  }

  [[nodiscard]] Json row_json(const BatchRow& row) const;
  [[nodiscard]] Json bars() const;
  // Tokens/s of one mode over another's, run by run; empty where one was not run.
  [[nodiscard]] std::vector<double> gains(const std::string& of, const std::string& over) const;
  template <typename Value>
  static std::vector<double> each_step(const BatchRow& row, const Value& value) {
    std::vector<double> values;
    for (const BatchRun& run : row.runs) {
      for (const state::StepComparison& step : run.steps) values.push_back(value(step));
    }
    return values;
  }

  const BatchBenchArgs& args_;
  const model::Model& model_;
  ThrottledEnv& env_;
  const std::string dir_;
  ProgressLine* line_ = nullptr;
  std::vector<int64_t> lengths_;
  size_t disk_bytes_ = 0;
  double link_ = 0;
  std::vector<double> links_;               // of each repetition
  std::vector<double> generate_over_load_;  // as measured
  state::MeasuredBatchCosts measured_;
  std::vector<BatchRow> rows_;
};

double step_error(const state::StepComparison& step) {
  return std::abs(step.predicted_s / step.measured_s - 1);
}

Json fit_json(const policy::LinearFit& fit, const std::vector<policy::SizedTime>& points) {
  Json json = {{"us_per_token", fit.slope * 1e6}, {"us", fit.intercept * 1e6}, {"r2", fit.r2}};
  for (const policy::SizedTime& p : points) json["points"].push_back({p.size, p.seconds * 1e6});
  return json;
}

std::vector<double> BatchBench::gains(const std::string& of, const std::string& over) const {
  const auto find = [&](const std::string& name) {
    return std::find_if(rows_.begin(), rows_.end(), [&](const auto& r) { return r.name == name; });
  };
  std::vector<double> gains;
  const auto a = find(of);
  const auto b = find(over);
  if (a == rows_.end() || b == rows_.end()) return gains;
  for (size_t i = 0; i < a->tokens_per_s.size(); ++i) {
    gains.push_back(a->tokens_per_s[i] / b->tokens_per_s[i]);
  }
  return gains;
}

Json BatchBench::bars() const {
  Json bars = Json::object();
  for (const auto& [over, bar] :
       {std::pair("kv", 1.35), std::pair("act", 1.2), std::pair("unmanaged", 1.05)}) {
    const std::vector<double> gain = gains("search", over);
    if (gain.empty()) continue;
    bars[fmt::format("search_over_{}", over)] = {
        {"gain", spread(gain, 1)}, {"bar", bar}, {"met", median(gain) >= bar}};
  }
  for (const BatchRow& row : rows_) {
    if (row.name != "search") continue;
    const double error = median(each_step(row, step_error));
    const double link = median(each_step(row, [](const auto& s) { return s.link_idle; }));
    const double compute = median(each_step(row, [](const auto& s) { return s.compute_idle; }));
    bars["step_error"] = {{"median", error}, {"bar", 0.1}, {"met", error <= 0.1}};
    bars["link_idle"] = {{"median", link}, {"bar", 0.1}, {"met", link <= 0.1}};
    bars["compute_idle"] = {{"median", compute}, {"bar", 0.1}, {"met", compute <= 0.1}};
  }
  return bars;
}

Json BatchBench::row_json(const BatchRow& row) const {
  std::vector<double> act_share;
  std::vector<double> planned;
  std::vector<double> prefill;
  std::vector<double> generate;
  std::vector<double> forward;
  std::vector<double> wait;
  for (const BatchRun& run : row.runs) {
    act_share.push_back(run.plan.ratio.act_share());
    planned.push_back(run.plan.step.step_s);
    prefill.push_back(run.prefill_s);
    generate.push_back(median(run.generate_s));
    forward.push_back(median(run.forward_s));
    wait.push_back(median(run.wait_s));
  }
  const auto step_ms = [&](double state::StepComparison::*field) {
    return spread(each_step(row, [&](const auto& s) { return s.*field; }), 1e3);
  };
  const auto share = [&](double state::StepComparison::*field) {
    return spread(each_step(row, [&](const auto& s) { return s.*field; }), 1);
  };
  return {{"mode", row.name},
          {"act_share", spread(act_share, 1)},
          {"recomputed_layers", row.runs.back().plan.recompute.layers},
          {"mini_batches", row.runs.back().plan.mini_batches.size()},
          {"decode_tps", spread(row.tokens_per_s, 1)},
          {"decode_tps_samples", row.tokens_per_s},
          {"prefill_s", spread(prefill, 1)},
          {"planned_step_ms", spread(planned, 1e3)},
          {"predicted_step_ms", step_ms(&state::StepComparison::predicted_s)},
          {"step_ms", step_ms(&state::StepComparison::measured_s)},
          {"step_error", spread(each_step(row, step_error), 1)},
          {"link_idle", share(&state::StepComparison::link_idle)},
          {"compute_idle", share(&state::StepComparison::compute_idle)},
          {"generate_ms", spread(generate, 1e3)},
          {"forward_ms", spread(forward, 1e3)},
          {"wait_ms", spread(wait, 1e3)},
          {"read_bytes_per_step", row.runs.front().read_bytes}};
}

Json BatchBench::results() const {
  Json rows = Json::array();
  for (const BatchRow& row : rows_) rows.push_back(row_json(row));
  const policy::HybridCosts& costs = measured_.costs;
  return {{"model", std::filesystem::path(model_.path()).filename().string()},
          {"type", model_.type_name()},
          {"requests", args_.requests},
          {"prompts", {args_.shortest, args_.longest}},
          {"new", args_.new_tokens},
          {"buffer_tokens", args_.buffer_tokens},
          {"buffers", args_.buffers},
          {"link_bytes_per_s", link_ > 0 ? spread(links_, 1) : Json(nullptr)},
          {"generate_over_load",
           generate_over_load_.empty() ? Json(nullptr) : spread(generate_over_load_, 1)},
          {"fits",
           {{"generate_kv", fit_json(costs.kv_gen, measured_.kv_gen)},
            {"load_kv", fit_json(costs.load_kv, measured_.load_kv)},
            {"load_act", fit_json(costs.load_act, measured_.load_act)},
            {"forward", fit_json(costs.forward, {})},
            {"attend", fit_json(costs.attend, {})}}},
          {"bars", bars()},
          {"rows", std::move(rows)}};
}

std::vector<std::vector<std::string>> BatchBench::table() const {
  std::vector<std::vector<std::string>> table = {{"mode", "ACT", "recomputed", "tokens/s",
                                                  "step ms", "model", "error", "link idle",
                                                  "compute idle", "read/step", "prefill s"}};
  const auto percent = [](double x) { return fmt::format("{:.0f} %", 100 * x); };
  for (const BatchRow& row : rows_) {
    const auto middle = [&](double state::StepComparison::*field) {
      return median(each_step(row, [&](const auto& s) { return s.*field; }));
    };
    std::vector<double> prefill;
    std::vector<double> act_share;
    for (const BatchRun& run : row.runs) {
      prefill.push_back(run.prefill_s);
      act_share.push_back(run.plan.ratio.act_share());
    }
    table.push_back({row.name, percent(median(act_share)),
                     fmt::format("{} layers", row.runs.back().plan.recompute.layers),
                     fmt::format("{:.2f}", median(row.tokens_per_s)),
                     fmt::format("{:.0f}", middle(&state::StepComparison::measured_s) * 1e3),
                     fmt::format("{:.0f}", middle(&state::StepComparison::predicted_s) * 1e3),
                     percent(median(each_step(row, step_error))),
                     percent(middle(&state::StepComparison::link_idle)),
                     percent(middle(&state::StepComparison::compute_idle)),
                     format_bytes(static_cast<uint64_t>(row.runs.front().read_bytes)),
                     fmt::format("{:.1f}", median(prefill))});
  }
  return table;
}

Result<std::string> model_path(const BatchBenchArgs& args, const std::string& dir,
                               ProgressLine& line) {
  if (!args.model_file.empty()) return args.model_file;
  model::SynthOptions synth;
  synth.shape = balance_shape();
  synth.n_threads = args.runtime.model.threads;
  synth.progress = [&line](float done) {
    return line.update("writing a model of width 1,024", static_cast<double>(done));
  };
  const std::string path = join_path(dir, "batch-1024.gguf");
  HCACHE_RETURN_IF_ERROR(model::synthesise_model(synth, path));
  return path;
}

}  // namespace

engine::AttentionKind BatchBenchArgs::attention() const {
  if (runtime.attention == "ours") return engine::AttentionKind::kOurs;
  return runtime.attention == "ggml" ? engine::AttentionKind::kGgml : engine::AttentionKind::kAuto;
}

Status bench_batch(BatchBenchArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  warn_of_debug_build();
  if (args.shortest > args.longest) {
    return invalid_argument("--shortest is longer than --longest");
  }
  const std::string dir = join_path(args.runtime.state.state_dir,
                                    fmt::format("bench-{:016x}", Env::real().random_u64()));
  HCACHE_RETURN_IF_ERROR(Env::real().make_dirs(dir));
  Json results;
  std::vector<std::vector<std::string>> table;
  const auto run = [&]() -> Status {
    ProgressLine line;
    HCACHE_ASSIGN_OR_RETURN(
        const model::OpenDevices devices,
        model::open_devices(args.runtime.model.device, args.runtime.model.threads,
                            offload_options(args.runtime.model)));
    model::LoadOptions load;
    load.placement = devices.placement;
    HCACHE_ASSIGN_OR_RETURN(load.weights, model::parse_weight_place(args.runtime.weights));
    load.device_memory = args.runtime.device_memory;
    HCACHE_ASSIGN_OR_RETURN(const std::string path, model_path(args, dir, line));
    HCACHE_ASSIGN_OR_RETURN(const auto model,
                            model::Model::load(path, *devices.devices.front(), load));
    ThrottledEnv env(Env::real());
    BatchBench bench(args, *model, env, dir);
    HCACHE_RETURN_IF_ERROR(bench.run(line));
    line.finish();
    results = {{"machine", machine_json(*model)}};
    results.update(bench.results());
    table = bench.table();
    return {};
  };
  const Status status = run();
  Env::real().remove_path(join_path(dir, "batch-1024.gguf")).ignore("there may be none");
  Env::real().remove_path(dir).ignore("it may have been there");
  HCACHE_RETURN_IF_ERROR(status);
  return report(args, results, table);
}

}  // namespace hcache::cli
