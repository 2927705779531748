#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <tuple>

#include "bench.h"
#include "commands.h"
#include "state/identity.h"

namespace hcache::cli {
namespace {

// Tokens/s of one kind of run.
struct Speeds {
  std::vector<double> tps;          // until the last token was computed
  std::vector<double> durable_tps;  // until its state was on disk, too; with capture only
};

class ThroughputBench {
 public:
  ThroughputBench(const BenchArgs& args, state::Runtime& runtime, TokenSource source)
      : args_(args), runtime_(runtime), source_(std::move(source)) {}

  Status run(ProgressLine& line) {
    for (const int64_t depth : args_.depths) HCACHE_RETURN_IF_ERROR(save_depth(depth, line));
    const int64_t cells = static_cast<int64_t>(args_.depths.size() * args_.captures.size() *
                                               (args_.prompts.size() + 1));
    int64_t done = 0;
    for (int64_t rep = -1; rep < args_.reps; rep++) {
      wait_for_turn(args_);
      for (const int64_t depth : args_.depths) {
        // Kinds of runs outside, capture inside: what is compared runs back to back, and takes
        // turns in being first.
        for (size_t kind = 0; kind <= args_.prompts.size(); kind++) {
          const int64_t prompt = kind == 0 ? 0 : args_.prompts[kind - 1];
          for (size_t c = 0; c < args_.captures.size(); c++) {
            const std::string& capture =
                args_.captures[(c + static_cast<size_t>(rep + 1)) % args_.captures.size()];
            const std::string what = prompt == 0 ? "decode" : fmt::format("prompt {}", prompt);
            if (!line.update(
                    fmt::format("{} at depth {}, capture {}", what, depth, capture),
                    static_cast<double>(done++) / static_cast<double>(cells * (args_.reps + 1)))) {
              return cancelled("interrupted");
            }
            Speeds unused;
            Speeds* out = rep < 0 ? &unused : &speeds_[{depth, capture, prompt}];
            HCACHE_RETURN_IF_ERROR(time_run(depth, prompt, capture == "on", out));
          }
        }
      }
    }
    return {};
  }

  void results(Json* json, std::vector<std::vector<std::string>>* table) const {
    table->push_back({"prompt", "gen", "depth", "capture", "prefill tokens/s", "min", "max",
                      "decode tokens/s", "min", "max"});
    const auto cells = [](const std::vector<double>& v) {
      return std::vector<std::string>{fmt::format("{:.1f}", median(v)),
                                      fmt::format("{:.1f}", *std::min_element(v.begin(), v.end())),
                                      fmt::format("{:.1f}", *std::max_element(v.begin(), v.end()))};
    };
    for (const auto& [key, prefill] : speeds_) {
      const auto& [depth, capture, prompt] = key;
      if (prompt == 0) continue;
      const Speeds& decode = speeds_.at({depth, capture, 0});
      Json one = {{"model", std::filesystem::path(runtime_.model().path()).filename().string()},
                  {"type", runtime_.model().type_name()},
                  {"prompt", prompt},
                  {"gen", args_.gen},
                  {"depth", depth},
                  {"capture", capture},
                  {"prefill_tps", spread(prefill.tps, 1)},
                  {"decode_tps", spread(decode.tps, 1)},
                  {"prefill_samples", prefill.tps},
                  {"decode_samples", decode.tps}};
      if (capture == "on") {
        one["prefill_durable_tps"] = spread(prefill.durable_tps, 1);
        one["decode_durable_tps"] = spread(decode.durable_tps, 1);
        one["prefill_durable_samples"] = prefill.durable_tps;
        one["decode_durable_samples"] = decode.durable_tps;
      }
      json->push_back(std::move(one));
      std::vector<std::string> row = {fmt::format("{}", prompt), fmt::format("{}", args_.gen),
                                      fmt::format("{}", depth), capture};
      for (const std::string& cell : cells(prefill.tps)) row.push_back(cell);
      for (const std::string& cell : cells(decode.tps)) row.push_back(cell);
      table->push_back(std::move(row));
    }
  }

 private:
  // Depth comes out of the store: restoring it is much faster than computing it for every run.
  Status save_depth(int64_t depth, ProgressLine& line) {
    HCACHE_ASSIGN_OR_RETURN(depth_tokens_[depth], source_.take(depth, kDepthSeed));
    if (depth == 0) return {};
    state::StartOptions start;
    start.progress = [&](double f) { return line.update(fmt::format("depth {}", depth), f); };
    HCACHE_ASSIGN_OR_RETURN(const state::Started started,
                            runtime_.start(depth_tokens_[depth], start));
    HCACHE_RETURN_IF_ERROR(runtime_.finish(started.seq));
    return runtime_.flush();
  }

  // Off means that the engine's graphs have no tap at all.
  Status set_capture(bool on) {
    engine::Engine& engine = runtime_.engine();
    if (!on) return engine.set_capture(nullptr, {});
    engine::CaptureOptions options;
    for (const policy::Encoding encoding : runtime_.save_plan().layers) {
      uint8_t mask = 0;
      if ((encoding & policy::kHasHidden) != 0) mask |= engine::kTapHidden;
      if ((encoding & policy::kHasKv) != 0) mask |= engine::kTapKv;
      options.layers.push_back(mask);
    }
    HCACHE_ASSIGN_OR_RETURN(options.hidden_type,
                            state::parse_state_type(args_.runtime.state_type, engine));
    return engine.set_capture(runtime_.saver(), options);
  }

  // A prompt of `prompt` tokens in batches, or with 0 --gen tokens one at a time.
  Status time_run(int64_t depth, int64_t prompt, bool capture, Speeds* out) {
    const int64_t n = prompt == 0 ? args_.gen : prompt;
    HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, source_.take(n + 1, next_seed_++));
    std::vector<int32_t> chain = depth_tokens_.at(depth);
    chain.push_back(tokens[0]);  // a start needs one token to compute
    HCACHE_RETURN_IF_ERROR(set_capture(capture));
    state::StartOptions start;
    start.save = capture;
    start.progress = [](double) { return !interrupted(); };
    HCACHE_ASSIGN_OR_RETURN(const state::Started started, runtime_.start(chain, start));

    const double begin = now_s();
    if (prompt > 0) {
      HCACHE_RETURN_IF_ERROR(runtime_.append(started.seq, part(tokens, 1, n + 1)).status());
    } else {
      for (int64_t i = 1; i <= n; i++) {
        if (interrupted()) return cancelled("interrupted");
        HCACHE_RETURN_IF_ERROR(runtime_.append(started.seq, part(tokens, i, i + 1)).status());
      }
    }
    out->tps.push_back(static_cast<double>(n) / (now_s() - begin));
    HCACHE_RETURN_IF_ERROR(runtime_.flush());
    if (capture) out->durable_tps.push_back(static_cast<double>(n) / (now_s() - begin));
    return runtime_.finish(started.seq);
  }

  static constexpr uint32_t kDepthSeed = 1;
  const BenchArgs& args_;
  state::Runtime& runtime_;
  TokenSource source_;
  uint32_t next_seed_ = 1000;
  std::map<int64_t, std::vector<int32_t>> depth_tokens_;
  // By depth, capture and prompt; prompt 0: decoding.
  std::map<std::tuple<int64_t, std::string, int64_t>, Speeds> speeds_;
};

}  // namespace

Status bench_throughput(BenchArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  warn_of_debug_build();
  const int64_t deepest = *std::max_element(args.depths.begin(), args.depths.end());
  const int64_t longest = *std::max_element(args.prompts.begin(), args.prompts.end());
  args.runtime.ctx = deepest + std::max(longest, args.gen) + 256;
  const Scratch scratch(args.runtime);
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto runtime, open_runtime(args.runtime, env, line));
  HCACHE_ASSIGN_OR_RETURN(TokenSource source, TokenSource::open(*runtime, args.text));
  ThroughputBench bench(args, *runtime, std::move(source));
  HCACHE_RETURN_IF_ERROR(bench.run(line));
  line.finish();
  const Json machine = machine_json(*runtime);
  Json rows = Json::array();
  std::vector<std::vector<std::string>> table;
  bench.results(&rows, &table);
  HCACHE_RETURN_IF_ERROR(runtime->close());
  return report(args, {{"machine", machine}, {"rows", rows}}, table);
}

}  // namespace hcache::cli
