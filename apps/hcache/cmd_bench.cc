// hcache bench restore|throughput|batch|pipeline|serve. All but the last verify or warm up before
// they time, alternate between the rows that will be compared, and print the machine they ran on;
// the last loads a server.

#include "bench.h"
#include "bench_serve.h"
#include "commands.h"

namespace hcache::cli {

BenchArgs::BenchArgs() {
  offer(runtime, {&runtime.model.path, &runtime.model.device, &runtime.model.gpu_layers,
                  &runtime.model.tensor_split, &runtime.model.override_tensors,
                  &runtime.model.split_mode, &runtime.model.main_gpu, &runtime.model.threads,
                  &runtime.batch, &runtime.kv_type, &runtime.attention, &runtime.state.state_dir,
                  &runtime.state.stores, &runtime.state.key_file, &runtime.state_type,
                  &runtime.pack, &runtime.quality, &runtime.saver});
}

void BenchArgs::save_all() {
  runtime.save = choice(&runtime.save, "--save", "all", "plan|hidden|kv|all",
                        "what is saved: with all, every method finds what it wants to read");
}

RestoreBenchArgs::RestoreBenchArgs() {
  runtime.offer_kv_budget();
  offer(runtime,
        {&runtime.token_rounding, &runtime.kv_budget, &runtime.kv_quality, &runtime.kv_policy});
  save_all();
}

BatchBenchArgs::BatchBenchArgs() {
  withhold({&runtime.model.path, &runtime.kv_type, &runtime.state.stores, &runtime.state.key_file,
            &runtime.state_type, &runtime.pack, &runtime.quality, &runtime.saver, &text_file});
}

PipelineBenchArgs::PipelineBenchArgs() {
  withhold({&runtime.kv_type, &runtime.attention, &runtime.state.key_file, &runtime.state_type,
            &runtime.pack, &runtime.quality, &runtime.saver, &text_file});
}

ThroughputArgs::ThroughputArgs() { offer(runtime, {&runtime.save}); }

void add_bench(CLI::App& app, Verb* verb) {
  CLI::App* group = app.add_subcommand("bench", "Measure restoring, throughput, and servers");
  group->require_subcommand(1);
  add_verb<RestoreBenchArgs>(
      *group, verb, "restore",
      "Time the first token after a restart, by every method; checks the answers first",
      bench_restore);
  add_verb<ThroughputArgs>(*group, verb, "throughput",
                           "Time prefill and decode, with and without saving the state",
                           bench_throughput);
  add_verb<BatchBenchArgs>(
      *group, verb, "batch",
      "Time a large batch whose state comes over a slow link, by every way to keep it; checks the "
      "tokens first",
      bench_batch);
  add_verb<PipelineBenchArgs>(
      *group, verb, "pipeline",
      "Time decoding and restoring over several devices, slowed equally by sleeping: on all of "
      "them "
      "at once, and on one after another; checks tokens and restored state first",
      bench_pipeline);
  add_verb<ServeArgs>(*group, verb, "serve",
                      "Hold many conversations with a server at a time, and measure its answers",
                      bench_serve);
}

}  // namespace hcache::cli
