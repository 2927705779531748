// hcache batch: a file of requests, answered for throughput.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <string>

#include "answer_args.h"
#include "base/env.h"
#include "base/units.h"
#include "commands.h"
#include "server/batch.h"
#include "session.h"
#include "terminal.h"

namespace hcache::cli {
namespace {

constexpr double kNsPerSecond = 1e9;
constexpr int64_t kTerminalPauseNs = 500'000'000;
constexpr int64_t kLinePauseNs = 10'000'000'000;

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
  AnswerArgs answers{this};
  RuntimeArgs runtime{this};
  SamplingArgs sampling{this};
  bool json = flag(&json, "--json", "print the summary as JSON");
};

Result<server::ServerOptions> server_options(const BatchArgs& args) {
  server::ServerOptions o;
  HCACHE_ASSIGN_OR_RETURN(o.runtime, runtime_options(args.runtime));
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

Json to_json(const BatchArgs& args, const server::BatchProgress& p, const std::string& result) {
  return {{"input", args.input},
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
                                      .in_flight = 2L * args.parallel};
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
      HCACHE_RETURN_IF_ERROR(write_json(to_json(args, last, stopped ? "interrupted" : "done"), ""));
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
