// hcache run: one message, one reply.

#include <fmt/format.h>

#include <cstdio>

#include "base/env.h"
#include "commands.h"
#include "draft_args.h"
#include "overflow_args.h"
#include "session.h"

namespace hcache::cli {
namespace {

struct RunArgs : Options {
  std::string prompt = text(&prompt, "-p,--prompt", "TEXT", "", "what to say");
  std::string file =
      text(&file, "-f,--file", "FILE", "", "say what this file holds; with -p, before that text");
  TalkArgs talk{this};
  OverflowArgs overflow{this, "refuse"};
  bool raw = flag(&raw, "--raw", "complete the text as it is, without the chat template",
                  {.excludes = "--system"});
  RuntimeArgs runtime{this};
  std::string engine = runtime.offer_engine();
  std::optional<double> kv_budget = runtime.offer_kv_budget();
  DraftArgs draft{this};
  SamplingArgs sampling{this};
  bool json = flag(&json, "--json", "print JSON instead of text");
};

Status run(const RunArgs& args) {
  if (args.runtime.model.device == "list") return list_devices();
  if (args.prompt.empty() && args.file.empty()) {
    return invalid_argument("nothing to say: give -p TEXT, -f FILE, or both");
  }
  std::string text = args.prompt;
  if (!args.file.empty()) {
    HCACHE_ASSIGN_OR_RETURN(text, read_whole_file(Env::real(), args.file));
    if (!args.prompt.empty()) text += "\n\n" + args.prompt;
  }
  HCACHE_ASSIGN_OR_RETURN(const model::SamplingOptions sampling, args.sampling.resolved());
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto serving, open_serving(args.runtime, env, line,
                                                           args.overflow.truncates(), &args.draft));
  HCACHE_ASSIGN_OR_RETURN(const auto conversation,
                          Conversation::open(*serving, args.runtime, args.talk.session));
  if (args.overflow.truncates()) conversation->truncate(args.overflow.limits());
  const auto print = [&](const std::string& piece) {
    if (args.json) return;
    fmt::print("{}", piece);
    std::fflush(stdout);
  };
  HCACHE_ASSIGN_OR_RETURN(
      const Turn turn,
      args.raw ? conversation->complete(text, sampling, args.talk.max_tokens, print)
               : conversation->say(text, args.talk.system, sampling, args.talk.max_tokens, print));
  HCACHE_RETURN_IF_ERROR(conversation->finish());
  Json saved;
  if (const auto saver = serving->runtime().saver_stats()) {
    saved = {{"rows", saver->rows_captured},
             {"rows_skipped", saver->rows_skipped},
             {"chunks_written", saver->chunks_written},
             {"bytes_written", saver->bytes_written},
             {"write_ms", saver->write_s * 1e3}};
  }
  const std::string model = serving->runtime().card().path;
  HCACHE_RETURN_IF_ERROR(serving->close());
  if (args.json) {
    Json json = {{"model", model}, {"session", args.talk.session}};
    json.update(to_json(turn));
    json["saved"] = saved;  // null where nothing is to be saved
    HCACHE_RETURN_IF_ERROR(write_json(json, ""));
  } else {
    fmt::print("\n");
    std::fflush(stdout);
    print_stats(summary(turn));
  }
  return turn.finish == "interrupted" ? cancelled("interrupted") : Status();
}

}  // namespace

void add_run(CLI::App& app, Verb* verb) {
  add_verb<RunArgs>(app, verb, "run", "Say one thing and print the reply", run);
}

}  // namespace hcache::cli
