// hcache bench restore|throughput|serve. The first two verify or warm up before they time,
// alternate between the rows that will be compared, and print the machine they ran on; the third
// loads a server.

#include <memory>

#include "bench.h"
#include "bench_serve.h"
#include "commands.h"

namespace hcache::cli {
namespace {

void add_bench_serve(CLI::App& group, Verb* verb) {
  CLI::App* serve = group.add_subcommand(
      "serve", "Hold many conversations with a server at a time, and measure its answers");
  const auto s = std::make_shared<ServeArgs>();
  add_option(*serve, "url", &s->url);
  add_option(*serve, "served-model", &s->client.model);
  add_option(*serve, "bearer-key", &s->api_key);
  add_option(*serve, "trace", &s->trace);
  add_option(*serve, "sessions", &s->load.sessions);
  add_option(*serve, "rate", &s->load.rate);
  add_option(*serve, "rounds", &s->load.rounds);
  add_option(*serve, "think", &s->think_ns);
  add_option(*serve, "think-spread", &s->think_spread);
  add_option(*serve, "load-context", &s->load.context);
  add_option(*serve, "time-scale", &s->load.time_scale);
  add_option(*serve, "length-scale", &s->load.length_scale);
  add_option(*serve, "concurrency", &s->client.concurrency);
  add_option(*serve, "pause-after", &s->client.pause_after);
  add_option(*serve, "load-text", &s->text);
  add_option(*serve, "token-bytes", &s->bytes_per_token);
  add_option(*serve, "load-seed", &s->load.seed);
  add_option(*serve, "load-temperature", &s->client.temperature);
  add_option(*serve, "exact-length", &s->client.exact_length);
  add_option(*serve, "extra", &s->extra);
  add_option(*serve, "timeout", &s->timeout_ns);
  add_option(*serve, "retry", &s->client.retries);
  add_option(*serve, "warmup", &s->load.warmup);
  add_option(*serve, "answers", &s->answers_file);
  add_option(*serve, "dry-run", &s->dry_run);
  add_option(*serve, "json-file", &s->json_file);
  serve->callback([s, verb] { *verb = [s] { return bench_serve(*s); }; });
}

}  // namespace

void add_bench(CLI::App& app, Verb* verb) {
  CLI::App* group = app.add_subcommand("bench", "Measure restoring, throughput, and servers");
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

  add_bench_serve(*group, verb);
}

}  // namespace hcache::cli
