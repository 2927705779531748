// hcache batch: a file of requests, answered for throughput.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "answer_args.h"
#include "base/env.h"
#include "base/units.h"
#include "commands.h"
#include "policy/hybrid_plan.h"
#include "server/batch.h"
#include "session.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

constexpr double kNsPerSecond = 1e9;
constexpr int64_t kTerminalPauseNs = 500'000'000;
constexpr uint64_t kMostCacheDisk = uint64_t{64} << 30;
constexpr int64_t kLinePauseNs = 10'000'000'000;

std::vector<Choice> mode_choices() {
  std::vector<Choice> choices;
  for (const policy::HybridModeInfo& mode : policy::hybrid_modes()) {
    choices.push_back({mode.name, mode.what});
  }
  return choices;
}

struct BatchArgs : Options {
  BatchArgs() { withhold({&runtime.token_rounding, &sampling.seed}); }

  std::string input = text(&input, "FILE", "", "",
                           "requests, one JSON object a line: OpenAI's (custom_id, method, url, "
                           "body) or Anthropic's (custom_id, params)",
                           {.required = true});
  std::string output =
      text(&output, "-o,--output", "FILE", "",
           "where results go, a line each, in the order in which they come; one that is "
           "unfinished is gone on with",
           {.required = true});
  bool restart = flag(&restart, "--restart", "give up what the output has, and begin anew");
  int parallel = integer(&parallel, "--parallel,--np", "N", 32, {1, 4096},
                         "most sequences in one step; fewer where --ctx has no room for them");
  int step_tokens = integer(&step_tokens, "--step-tokens", "TOKENS", 512, {1, 65536},
                            "most tokens of one step: replies first, then prompts");
  std::string engine = choice(
      &engine, "--engine", "auto",
      {{"auto", "hybrid where weights are streamed or --ctx does not hold what runs at once"},
       {"ordinary", "the server's: all state in the KV cache (--ctx)"},
       {"hybrid", "state in host memory and on disk, each layer's weights once for all requests"}},
      "what computes the answers");
  uint64_t cache_memory = bytes(&cache_memory, "--cache-memory", uint64_t{1} << 30,
                                "of host memory for the hybrid engine's state");
  uint64_t cache_disk =
      bytes(&cache_disk, "--cache-disk", 0,
            "of the state directory's disk for the rest of it; 0: half of what is free, at most "
            "64GiB");
  std::string cache_policy = choice(&cache_policy, "--cache-policy", "search", mode_choices(),
                                    "what the hybrid engine keeps of each context");
  double share = number(&share, "--share", "FRACTION", 0.5, {0, 1},
                        "of each context, with --cache-policy fixed and tokens");
  int64_t buffer_tokens = integer(
      &buffer_tokens, "--buffer", "TOKENS", engine::HybridOptions().buffer_tokens, {320, 1 << 20},
      "of each of the hybrid engine's two buffers, which hold a layer of a mini-batch; no "
      "request may be longer");
  AnswerArgs answers{this};
  RuntimeArgs runtime{this};
  SamplingArgs sampling{this};
  bool json = flag(&json, "--json", "print the summary as JSON");
};

// What the batch engine has for its blocks: on disk at most half of what is free.
Status set_cache(const BatchArgs& args, state::RuntimeOptions* runtime) {
  state::BatchEngineOptions& batch = runtime->batch;
  batch.use = args.engine == "ordinary" ? state::BatchEngineUse::kNever
              : args.engine == "hybrid" ? state::BatchEngineUse::kAlways
                                        : state::BatchEngineUse::kWhereStreamed;
  HCACHE_ASSIGN_OR_RETURN(batch.mode, policy::parse_hybrid_mode(args.cache_policy));
  batch.share = args.share;
  batch.engine.buffer_tokens = args.buffer_tokens;
  batch.engine.max_step_rows = std::max(args.step_tokens, args.parallel);
  batch.engine.host_bytes = args.cache_memory;
  batch.engine.disk_bytes = args.cache_disk;
  batch.engine.disk_dir = join_path(runtime->state_dir, "batch");
  if (batch.use == state::BatchEngineUse::kNever || args.cache_disk > 0) return {};
  HCACHE_RETURN_IF_ERROR(Env::real().make_dirs(batch.engine.disk_dir));
  HCACHE_ASSIGN_OR_RETURN(const SpaceInfo space, Env::real().space(batch.engine.disk_dir));
  batch.engine.disk_bytes = std::min(space.free_bytes / 2, kMostCacheDisk);
  return {};
}

Result<server::ServerOptions> server_options(const BatchArgs& args) {
  server::ServerOptions o;
  HCACHE_ASSIGN_OR_RETURN(o.runtime, runtime_options(args.runtime));
  HCACHE_RETURN_IF_ERROR(set_cache(args, &o.runtime));
  o.runtime.forward = state::EngineChoice::kAuto;
  HCACHE_ASSIGN_OR_RETURN(o.sampling, args.sampling.resolved());
  HCACHE_ASSIGN_OR_RETURN(o.restore_mode, policy::parse_mode(args.runtime.restore_method));
  HCACHE_RETURN_IF_ERROR(args.answers.apply(&o));
  o.scheduler.batch.max_sequences = args.parallel;
  o.scheduler.batch.max_step_tokens = std::max(args.step_tokens, args.parallel);
  // What waits is read ahead.
  o.scheduler.fetch = policy::FetchPolicy::kSchedulerAware;
  o.scheduler.max_queued = 4L * args.parallel;
  o.max_sequences = std::max(64, 4 * args.parallel);
  return o;
}

std::string rate_text(double tokens, double seconds) {
  return fmt::format("{:.1f}", seconds > 0 ? tokens / seconds : 0.0);
}

int64_t before_decode_steps(const server::BatchProgress& before) {
  return before.engine ? before.engine->decode_steps : 0;
}

// "120/400 done (2 failed), prefill 812.0 and decode 214.3 tokens/s, 41 % cached, 5m 10s left".
std::string progress_text(const server::BatchProgress& now, const server::BatchProgress& before) {
  const double seconds = now.seconds - before.seconds;
  std::string text = fmt::format("{}/{} done", now.done(), now.total);
  if (now.failed > 0) text += fmt::format(" ({} failed)", now.failed);
  text +=
      fmt::format(", prefill {} and decode {} tokens/s",
                  rate_text(static_cast<double>(now.prefill_rows - before.prefill_rows), seconds),
                  rate_text(static_cast<double>(now.decode_rows - before.decode_rows), seconds));
  if (now.prompt_tokens > 0) {
    text += fmt::format(", {:.0f} % cached", 100.0 * static_cast<double>(now.cached_tokens) /
                                                 static_cast<double>(now.prompt_tokens));
  }
  if (now.engine && now.engine->decode_steps > before_decode_steps(before)) {
    text += fmt::format(", {:.0f} % ACT", 100 * now.engine->act_share);
    const serving::BatchReport none;
    const serving::BatchReport& then = before.engine ? *before.engine : none;
    const auto n = static_cast<double>(now.engine->decode_steps - then.decode_steps);
    text += fmt::format(", step {:.0f} ms ({:.0f} by the cost model)",
                        1e3 * (now.engine->decode_step_s - then.decode_step_s) / n,
                        1e3 * (now.engine->predicted_step_s - then.predicted_step_s) / n);
  }
  const int64_t answered = now.done() - now.found;
  if (answered > 0 && now.done() < now.total) {
    const double left_s =
        now.seconds / static_cast<double>(answered) * static_cast<double>(now.total - now.done());
    text += fmt::format(", {} left", format_duration(static_cast<int64_t>(left_s * kNsPerSecond)));
  }
  return text;
}

// Threading: one thread.
class ProgressPrinter {
 public:
  ProgressPrinter() : terminal_(isatty(STDERR_FILENO) == 1) {}
  void update(const server::BatchProgress& now) {
    const int64_t at_ns = Env::real().monotonic_ns();
    if (at_ns - printed_ns_ < (terminal_ ? kTerminalPauseNs : kLinePauseNs)) return;
    if (printed_ns_ > 0) {
      const std::string line = progress_text(now, before_);
      std::fputs((terminal_ ? "\r" + line + "\033[K" : line + "\n").c_str(), stderr);
      std::fflush(stderr);
    }
    printed_ns_ = at_ns;
    before_ = now;
  }
  void finish() const {
    if (terminal_ && printed_ns_ > 0) fmt::print(stderr, "\r\033[K");
  }

 private:
  const bool terminal_;
  int64_t printed_ns_ = 0;
  server::BatchProgress before_;
};

Json fit_json(const policy::LinearFit& fit) {
  return {{"us_per_token", fit.slope * 1e6}, {"us", fit.intercept * 1e6}, {"r2", fit.r2}};
}

double mean(double sum, int64_t n) { return n > 0 ? sum / static_cast<double>(n) : 0; }

Json engine_json(const serving::BatchReport& r) {
  return {{"name", "hybrid"},
          {"policy", std::string(policy::hybrid_mode_name(r.mode))},
          {"act_share", r.act_share},
          {"mini_batches", r.mini_batches},
          {"fits",
           {{"from_profile", r.from_profile},
            {"kv_gen", fit_json(r.kv_gen)},
            {"load_kv", fit_json(r.load_kv)},
            {"load_act", fit_json(r.load_act)},
            {"forward", fit_json(r.forward)}}},
          {"steps", r.steps},
          {"rows", r.rows},
          {"step_s", r.step_s},
          {"wait_s", r.wait_s},
          {"weights_wait_s", r.weights_wait_s},
          {"read_bytes", r.read_bytes},
          {"streamed_bytes", r.streamed_bytes},
          {"host_bytes", r.cache.host_bytes},
          {"disk_bytes", r.cache.disk_bytes},
          {"decode_steps", r.decode_steps},
          {"decode_step_ms", 1e3 * mean(r.decode_step_s, r.decode_steps)},
          {"predicted_step_ms", 1e3 * mean(r.predicted_step_s, r.decode_steps)},
          {"link_idle", mean(r.link_idle, r.decode_steps)},
          {"compute_idle", mean(r.compute_idle, r.decode_steps)}};
}

Json progress_json(const BatchArgs& args, const server::BatchProgress& p,
                   const std::string& result) {
  return {{"engine", p.engine ? engine_json(*p.engine) : Json{{"name", "ordinary"}}},
          {"input", args.input},
          {"output", args.output},
          {"result", result},
          {"total", p.total},
          {"completed", p.completed},
          {"failed", p.failed},
          {"bad_lines", p.bad_lines},
          {"found", p.found},
          {"prompt_tokens", p.prompt_tokens},
          {"cached_tokens", p.cached_tokens},
          {"reply_tokens", p.reply_tokens},
          {"prefill_rows", p.prefill_rows},
          {"decode_rows", p.decode_rows},
          {"seconds", p.seconds}};
}

void print_summary(const BatchArgs& args, const server::BatchProgress& p) {
  fmt::print("{}: {} of {} requests done, {} completed, {} failed", args.output, p.done(), p.total,
             p.completed, p.failed);
  if (p.bad_lines > 0) fmt::print(" ({} lines are no requests)", p.bad_lines);
  if (p.found > 0) fmt::print(", {} of them by an earlier run", p.found);
  fmt::print("\n{} prompt tokens, {} of them cached, and {} reply tokens in {}: {} tokens/s\n",
             p.prompt_tokens, p.cached_tokens, p.reply_tokens,
             format_duration(static_cast<int64_t>(p.seconds * kNsPerSecond)),
             rate_text(static_cast<double>(p.prompt_tokens + p.reply_tokens), p.seconds));
  if (p.engine) {
    const serving::BatchReport& r = *p.engine;
    fmt::print("hybrid engine, {}: {:.0f} % ACT blocks; {} steps", policy::hybrid_mode_name(r.mode),
               100 * r.act_share, r.steps);
    if (r.decode_steps > 0) {
      fmt::print(", of one row each {:.0f} ms, {:.0f} by the cost model",
                 1e3 * mean(r.decode_step_s, r.decode_steps),
                 1e3 * mean(r.predicted_step_s, r.decode_steps));
    }
    fmt::print(
        "\ncosts {}: K and V generated {:.1f} us a token and layer (R2 {:.4f}), loaded {:.1f} "
        "(R2 {:.4f})\n",
        r.from_profile ? "of an earlier run" : "measured", 1e6 * r.kv_gen.slope, r.kv_gen.r2,
        1e6 * r.load_kv.slope, r.load_kv.r2);
  }
  std::fflush(stdout);
}

Status batch(const BatchArgs& args) {
  if (args.runtime.model.device == "list") return list_devices();
  HCACHE_ASSIGN_OR_RETURN(server::ServerOptions options, server_options(args));
  ProgressLine line;
  options.runtime.progress = [&line](const std::string& what, double fraction) {
    return line.update(what, fraction);
  };
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const Link link, parse_link(args.runtime.link));
  slow_to(link, env, &options.runtime);
  // Beside the sequences of a step as many that wait, so that their state can be read ahead.
  const server::BatchOptions batch = {.input = args.input,
                                      .output = args.output,
                                      .restart = args.restart,
                                      .in_flight = 2L * args.parallel,
                                      .parallel = args.parallel};
  ProgressPrinter printer;
  server::BatchProgress last;
  const Status status = server::run_batch(
      env, options, batch,
      [&](const server::BatchProgress& now) {
        line.finish();
        printer.update(now);
        return !interrupted();
      },
      &last);
  line.finish();
  printer.finish();
  const bool stopped = status.code() == Code::kCancelled;
  if (status.ok() || stopped) {
    if (args.json) {
      HCACHE_RETURN_IF_ERROR(
          write_json(progress_json(args, last, stopped ? "interrupted" : "done"), ""));
    } else {
      print_summary(args, last);
    }
  }
  if (stopped) {
    fmt::print(stderr, "hcache: interrupted; the same command goes on with the other {} requests\n",
               last.total - last.done());
  }
  return status;
}

}  // namespace

void add_batch(CLI::App& app, Verb* verb) {
  add_verb<BatchArgs>(app, verb, "batch",
                      "Answer a file of requests, OpenAI's or Anthropic's, for throughput", batch);
}

}  // namespace hcache::cli
