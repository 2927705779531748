// hcache run: one message, one reply.

#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "base/env.h"
#include "commands.h"
#include "session.h"

namespace hcache::cli {
namespace {

struct RunArgs {
  RuntimeArgs runtime;
  model::SamplingOptions sampling;
  std::string session;
  std::string system;
  std::string prompt;
  std::string file;
  bool raw = false;
  bool json = false;
  int64_t max_tokens = 0;
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
  ProgressLine line;
  ThrottledEnv env(Env::real());
  HCACHE_ASSIGN_OR_RETURN(const auto serving, open_serving(args.runtime, env, line));
  HCACHE_ASSIGN_OR_RETURN(const auto conversation,
                          Conversation::open(*serving, args.runtime, args.session));
  const auto print = [&](const std::string& piece) {
    if (args.json) return;
    fmt::print("{}", piece);
    std::fflush(stdout);
  };
  HCACHE_ASSIGN_OR_RETURN(
      const Turn turn,
      args.raw ? conversation->complete(text, args.sampling, args.max_tokens, print)
               : conversation->say(text, args.system, args.sampling, args.max_tokens, print));
  HCACHE_RETURN_IF_ERROR(conversation->save());
  Json saved;
  if (const state::Saver* saver = serving->runtime().saver(); saver != nullptr) {
    const state::SaverStats stats = saver->stats();
    saved = {{"rows", stats.rows_captured},
             {"rows_skipped", stats.rows_skipped},
             {"chunks_written", stats.chunks_written},
             {"bytes_written", stats.bytes_written},
             {"write_ms", stats.write_s * 1e3}};
  }
  const std::string model = serving->runtime().model().path();
  HCACHE_RETURN_IF_ERROR(serving->close());
  if (args.json) {
    Json json = {{"model", model}, {"session", args.session}};
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
  CLI::App* sub = app.add_subcommand("run", "Say one thing and print the reply");
  const auto args = std::make_shared<RunArgs>();
  add_option(*sub, "prompt", &args->prompt);
  add_option(*sub, "file", &args->file);
  add_option(*sub, "session", &args->session);
  add_option(*sub, "system", &args->system);
  add_option(*sub, "raw", &args->raw);
  add_option(*sub, "max-tokens", &args->max_tokens);
  add_runtime_options(*sub, &args->runtime);
  add_restore_options(*sub, &args->runtime);
  add_sampling_options(*sub, &args->sampling);
  add_option(*sub, "json", &args->json);
  sub->callback([args, verb] { *verb = [args] { return run(*args); }; });
}

}  // namespace hcache::cli
