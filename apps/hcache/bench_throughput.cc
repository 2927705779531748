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
  ThroughputBench(const ThroughputArgs& args, serving::Serving& serving, TokenSource source)
      : args_(args),
        serving_(serving),
        model_(serving.runtime().model()),
        source_(std::move(source)) {}

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
      Json one = {{"model", std::filesystem::path(model_.path()).filename().string()},
                  {"type", model_.type_name()},
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
  // Runs a request that computes its prompt, and then so many of the `forced` tokens one at a time.
  Result<scheduler::SeqId> compute(std::vector<int32_t> tokens, bool save,
                                   scheduler::CacheUse cache,
                                   std::span<const int32_t> forced = {}) {
    scheduler::Request request;
    request.tokens = std::move(tokens);
    request.salt = own_salt(args_.runtime.salt);
    request.save = save;
    request.cache = cache;
    // The last token that is chosen is not computed.
    request.max_new_tokens = static_cast<int64_t>(forced.size()) + 1;
    request.next = [forced,
                    n = size_t{0}](std::span<const float>) mutable -> Result<scheduler::NextToken> {
      const bool last = n == forced.size();
      return scheduler::NextToken{
          .token = last ? 0 : forced[n++], .stop = last, .finish_reason = {}};
    };
    HCACHE_ASSIGN_OR_RETURN(const scheduler::Outcome outcome,
                            serving_.run(std::move(request), [] { return !interrupted(); }));
    HCACHE_RETURN_IF_ERROR(outcome.status);
    return outcome.seq;
  }

  // Depth comes out of the store: restoring it is much faster than computing it for every run.
  Status save_depth(int64_t depth, ProgressLine& line) {
    HCACHE_ASSIGN_OR_RETURN(depth_tokens_[depth], source_.take(depth, kDepthSeed));
    if (depth == 0) return {};
    if (!line.update(fmt::format("depth {}", depth), 0)) return cancelled("interrupted");
    HCACHE_ASSIGN_OR_RETURN(const scheduler::SeqId seq, compute(depth_tokens_[depth], /*save=*/true,
                                                                scheduler::CacheUse::kSaved));
    HCACHE_RETURN_IF_ERROR(serving_.flush());
    return release_idle(serving_, seq);
  }

  // Off means that the engine's graphs have no tap at all.
  Status set_capture(bool on) {
    return serving_.on_engine([&](state::Runtime& runtime) -> Status {
      engine::Engine& engine = runtime.engine();
      if (!on) return engine.set_capture(nullptr, {});
      engine::CaptureOptions options;
      for (const policy::Encoding encoding : runtime.save_plan().layers) {
        uint8_t mask = 0;
        if ((encoding & policy::kHasHidden) != 0) mask |= engine::kTapHidden;
        if ((encoding & policy::kHasKv) != 0) mask |= engine::kTapKv;
        options.layers.push_back(mask);
      }
      HCACHE_ASSIGN_OR_RETURN(options.hidden_types,
                              state::parse_state_type(args_.runtime.state_type, engine));
      return engine.set_capture(runtime.saver(), options);
    });
  }

  // A prompt of `prompt` tokens in batches, or with 0 --gen tokens one at a time.
  Status time_run(int64_t depth, int64_t prompt, bool capture, Speeds* out) {
    const int64_t n = prompt == 0 ? args_.gen : prompt;
    HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> tokens, source_.take(n + 1, next_seed_++));
    std::vector<int32_t> chain = depth_tokens_.at(depth);
    chain.push_back(tokens[0]);  // a prompt has at least one token to compute
    HCACHE_RETURN_IF_ERROR(set_capture(capture));
    HCACHE_RETURN_IF_ERROR(compute(chain, capture, scheduler::CacheUse::kSaved).status());

    // It goes on from the sequence that stayed resident.
    const std::span<const int32_t> rest = part(tokens, 1, n + 1);
    const std::span<const int32_t> at_once = prompt > 0 ? rest : rest.first(1);
    chain.insert(chain.end(), at_once.begin(), at_once.end());
    const double begin = now_s();
    HCACHE_ASSIGN_OR_RETURN(const scheduler::SeqId seq,
                            compute(std::move(chain), capture, scheduler::CacheUse::kAll,
                                    rest.subspan(at_once.size())));
    out->tps.push_back(static_cast<double>(n) / (now_s() - begin));
    HCACHE_RETURN_IF_ERROR(serving_.flush());
    if (capture) out->durable_tps.push_back(static_cast<double>(n) / (now_s() - begin));
    return release_idle(serving_, seq);
  }

  static constexpr uint32_t kDepthSeed = 1;
  const ThroughputArgs& args_;
  serving::Serving& serving_;
  const model::Model& model_;
  TokenSource source_;
  uint32_t next_seed_ = 1000;
  std::map<int64_t, std::vector<int32_t>> depth_tokens_;
  // By depth, capture and prompt; prompt 0: decoding.
  std::map<std::tuple<int64_t, std::string, int64_t>, Speeds> speeds_;
};

}  // namespace

Status bench_throughput(ThroughputArgs args) {
  if (args.runtime.model.device == "list") return list_devices();
  warn_of_debug_build();
  const int64_t deepest = *std::max_element(args.depths.begin(), args.depths.end());
  const int64_t longest = *std::max_element(args.prompts.begin(), args.prompts.end());
  args.runtime.ctx = deepest + std::max(longest, args.gen) + 256;
  const Scratch scratch(args.runtime);
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto serving, open_serving(args.runtime, env, line));
  HCACHE_ASSIGN_OR_RETURN(TokenSource source,
                          TokenSource::open(serving->runtime(), args.text_file));
  ThroughputBench bench(args, *serving, std::move(source));
  HCACHE_RETURN_IF_ERROR(bench.run(line));
  line.finish();
  const Json machine = machine_json(serving->runtime().model());
  Json rows = Json::array();
  std::vector<std::vector<std::string>> table;
  bench.results(&rows, &table);
  HCACHE_RETURN_IF_ERROR(serving->close());
  return report(args, {{"machine", machine}, {"rows", rows}}, table);
}

}  // namespace hcache::cli
