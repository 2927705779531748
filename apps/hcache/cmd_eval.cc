// hcache eval ppl|kl|truncation|compression|tasks: what a way to keep state costs in quality.
// Everything is scored on what serves requests: saved, closed, opened anew, restored, gone on from.

#include "commands.h"
#include "eval.h"

namespace hcache::cli {

void add_eval(CLI::App& app, Verb* verb) {
  CLI::App* group = app.add_subcommand(
      "eval", "Measure how well text is predicted and questions are answered after a restore");
  group->require_subcommand(1);
  add_verb<PplArgs>(*group, verb, "ppl",
                    "Perplexity of a text in windows, as llama-perplexity counts it", eval_ppl);
  add_verb<KlArgs>(*group, verb, "kl",
                   "KL divergence and agreement of predictions, token by token, with what is "
                   "computed on the spot, or by another file of the model",
                   eval_kl);
  add_verb<TruncationArgs>(*group, verb, "truncation",
                           "Perplexity of a text that outgrows the context, whose oldest tokens "
                           "are dropped from the KV cache, against computing anew without them",
                           eval_truncation);
  add_verb<CompressionArgs>(*group, verb, "compression",
                            "What is lost where the layers keep some rows of the KV cache only, "
                            "by which rows and how many",
                            eval_compression);
  add_verb<TasksArgs>(*group, verb, "tasks",
                      "Share of questions whose right answer is the likeliest: of a file, or made "
                      "up to be looked up in a long text",
                      eval_tasks);
}

}  // namespace hcache::cli
