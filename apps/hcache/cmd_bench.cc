// hcache bench restore|throughput. Both verify or warm up before they time, alternate between the
// rows that will be compared, and print the machine they ran on.

#include <memory>

#include "bench.h"
#include "commands.h"

namespace hcache::cli {

void add_bench(CLI::App& app, Verb* verb) {
  CLI::App* group = app.add_subcommand("bench", "Measure restoring and throughput");
  group->require_subcommand(1);

  CLI::App* restore = group->add_subcommand(
      "restore", "Time the first token after a restart, by every method; checks the answers first");
  const auto r = std::make_shared<BenchArgs>();
  add_option(*restore, "histories", &r->histories);
  add_option(*restore, "new", &r->new_tokens);
  add_option(*restore, "methods", &r->methods);
  add_option(*restore, "links", &r->links);
  add_option(*restore, "reps", &r->reps);
  add_option(*restore, "decoded", &r->decoded);
  add_option(*restore, "greedy", &r->greedy);
  add_option(*restore, "conversations", &r->conversations);
  add_option(*restore, "token-rounding", &r->runtime.token_rounding);
  add_option(*restore, "text", &r->text);
  add_bench_options(*restore, &r->runtime);
  add_option(*restore, "bench-save", &r->runtime.save);
  add_option(*restore, "paced", &r->paced);
  add_option(*restore, "json-file", &r->json_file);
  restore->callback([r, verb] { *verb = [r] { return bench_restore(*r); }; });

  CLI::App* throughput = group->add_subcommand(
      "throughput", "Time prefill and decode, with and without saving the state");
  const auto t = std::make_shared<BenchArgs>();
  add_option(*throughput, "prompts", &t->prompts);
  add_option(*throughput, "gen", &t->gen);
  add_option(*throughput, "depths", &t->depths);
  add_option(*throughput, "captures", &t->captures);
  add_option(*throughput, "reps", &t->reps);
  add_option(*throughput, "text", &t->text);
  add_bench_options(*throughput, &t->runtime);
  add_option(*throughput, "save", &t->runtime.save);
  add_option(*throughput, "paced", &t->paced);
  add_option(*throughput, "json-file", &t->json_file);
  throughput->callback([t, verb] { *verb = [t] { return bench_throughput(*t); }; });
}

}  // namespace hcache::cli
