// What the benchmarks share: options, the machine, tokens to run on, and how results are told.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "model/tokenizer.h"
#include "session.h"
#include "state/runtime.h"
#include "terminal.h"

namespace hcache::cli {

// What all benchmarks take.
struct BenchArgs : Options {
  BenchArgs();

  int64_t reps = integer(&reps, "--reps", "N", 3, {1, 1000},
                         "timed runs of each row, alternating between rows");
  std::string text_file = text(&text_file, "--text", "FILE", "",
                               "text to take tokens from; default: made-up sentences");
  RuntimeArgs runtime{nullptr};  // its ctx follows from what is measured
  bool paced =
      flag(&paced, "--paced", "say \"ready\" and wait for a line on stdin before each repetition");
  std::string json_file =
      text(&json_file, "--json", "FILE", "",
           "also write the figures as JSON; - prints them instead of the table");

 protected:
  void save_all();  // offers --save
};

struct RestoreBenchArgs : BenchArgs {
  RestoreBenchArgs();

  std::vector<int64_t> histories =
      integers(&histories, "--history", "TOKENS,...", "512,1024,2048,4096", {2},
               "saved tokens to restore, one row each");
  int64_t new_tokens =
      integer(&new_tokens, "--new", "TOKENS", 50, {1}, "tokens that are new behind the history");
  std::vector<std::string> methods = texts(
      &methods, "--methods", "METHOD,...", "plan,hidden,kv,recompute,resident",
      "plan|hidden|kv|recompute|naive-hybrid|token-partition|token-partition-rounded|resident",
      "ways to restore; resident: the KV cache never left, the ideal");
  std::vector<std::string> links =
      texts(&links, "--link", "RATE|paper|none,...", "none", "",
            "slow real reads down to this (19MB/s); paper: the paper's ratio of compute to link");
  int64_t decoded =
      integer(&decoded, "--decoded", "TOKENS", 64, {0},
              "so many of the history's last tokens are decoded one at a time, as replies are");
  int64_t greedy =
      integer(&greedy, "--greedy", "TOKENS", 32, {1, 4096},
              "length of the continuation that is compared with the uninterrupted run's");
  int64_t conversations = integer(&conversations, "--conversations", "N", 1, {1, 1000},
                                  "repeat everything with so many different texts");
};

struct ThroughputArgs : BenchArgs {
  ThroughputArgs();

  std::vector<int64_t> prompts =
      integers(&prompts, "--prompt", "TOKENS,...", "512,2048", {1}, "prompt lengths to time");
  int64_t gen = integer(&gen, "--gen", "TOKENS", 64, {1}, "tokens to decode");
  std::vector<int64_t> depths = integers(&depths, "--depth", "TOKENS,...", "0,4096", {0},
                                         "tokens in the KV cache before the prompt");
  std::vector<std::string> captures =
      texts(&captures, "--capture", "on|off,...", "off", "on|off", "save the state while running");
};

struct BatchBenchArgs : BenchArgs {
  BatchBenchArgs();
  [[nodiscard]] engine::AttentionKind attention() const;

  std::string model_file =
      text(&model_file, "-m,--model", "FILE", "",
           "GGUF model; default: a multi-head F16 one of width 1,024 and eight layers, made up");
  int64_t requests =
      integer(&requests, "--requests", "N", 32, {1, 65536}, "sequences that are decoded together");
  int64_t shortest =
      integer(&shortest, "--shortest", "TOKENS", 256, {1}, "length of the shortest prompt");
  int64_t longest = integer(&longest, "--longest", "TOKENS", 1024, {1},
                            "length of the longest; the others lie between them, evenly");
  int64_t new_tokens =
      integer(&new_tokens, "--new", "TOKENS", 32, {2}, "tokens that every sequence gets");
  std::vector<std::string> modes =
      texts(&modes, "--modes", "MODE,...", "search,kv,act,unmanaged,policies,tokens",
            "search|policies|unmanaged|fixed|kv|act|tokens",
            "how the state is kept; search and policies choose by what was measured");
  double share = number(&share, "--share", "SHARE", 0.5, {0, 1},
                        "of ACT blocks with fixed, of recomputed tokens with tokens");
  std::string link = text(&link, "--link", "RATE|balance|none", "balance",
                          "slow real reads down to this (150MB/s); balance: as --balance says");
  double balance =
      number(&balance, "--balance", "RATIO", 0.85, {0.01, 100},
             "the link at which generating K and V of a token takes so much of loading them");
  int64_t buffer_tokens =
      integer(&buffer_tokens, "--buffer", "TOKENS", 6144, {1280}, "tokens of a mini-batch");
  int buffers = integer(&buffers, "--buffers", "N", 2, {2, 64},
                        "mini-batches that may be loaded or computed at a time");
};

struct PipelineBenchArgs : BenchArgs {
  PipelineBenchArgs();

  int64_t sequences =
      integer(&sequences, "--sequences", "N", 4, {2, 1024}, "sequences that decode together");
  int64_t gen = integer(&gen, "--gen", "TOKENS", 32, {1, 4096}, "tokens that each of them gets");
  double row_ms = number(&row_ms, "--slow", "MS", 25, {0, 10000},
                         "each device sleeps so long for every row of a step, and behind every "
                         "product of a restore");
  int64_t history = integer(&history, "--history", "TOKENS", 512, {64},
                            "tokens of the conversation that is restored, a multiple of 64");
  bool quick = flag(&quick, "--quick", "one run of few tokens");
};

// Times the first token after a restart by every method (HCache §6), after comparing
// the restored state and its continuation with the uninterrupted run's.
[[nodiscard]] Status bench_restore(RestoreBenchArgs args);
// Times prefill and decode at several depths, with and without saving the state.
[[nodiscard]] Status bench_throughput(ThroughputArgs args);
// Times steps of the batch engine for each way to keep the state (HybridServe §5), after comparing
// their tokens.
[[nodiscard]] Status bench_batch(BatchBenchArgs args);

// Times decoding over several devices, with steps in flight on all of them and one after another,
// and restoring a conversation to all of them at once and to one after another, after comparing
// tokens and state. The devices are slowed by sleeping.
[[nodiscard]] Status bench_pipeline(PipelineBenchArgs args);

[[nodiscard]] double now_s();  // of the monotonic clock
[[nodiscard]] double median(std::vector<double> v);
// {"min", "median", "max"} of the values times `factor`.
[[nodiscard]] Json spread(const std::vector<double>& v, double factor);

// The device, or each with how many layers it has.
[[nodiscard]] std::string describe_devices(const model::Model& model);
[[nodiscard]] Json machine_json(const model::Model& model);
void warn_of_debug_build();
// Prints machine and table (unless the JSON goes to stdout), writes the JSON where it is wanted.
[[nodiscard]] Status report(const BenchArgs& args, const Json& results,
                            const std::vector<std::vector<std::string>>& table);

// Drops an idle sequence from the arena.
[[nodiscard]] Status release_idle(serving::Serving& serving, scheduler::SeqId seq);

// With --paced: says "ready" and waits for a line before each repetition, so that a script can let
// another program take its turn. At the end of the input it waits no more.
void wait_for_turn(const BenchArgs& args);

// A store of its own for one benchmark, next to the state, gone afterwards.
class Scratch {
 public:
  explicit Scratch(RuntimeArgs& args);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

 private:
  store::StoreOptions options_;
};

// A text, or sentences made up, for a model with a vocabulary; random ids for one without.
class TokenSource {
 public:
  static Result<TokenSource> open(const state::Runtime& runtime, const std::string& file);
  // n tokens; the same seed gives the same ones, another seed differs from the start.
  [[nodiscard]] Result<std::vector<int32_t>> take(int64_t n, uint32_t seed) const;

 private:
  int64_t n_vocab_ = 0;
  std::unique_ptr<model::Tokenizer> tokenizer_;
  std::string text_;
};

[[nodiscard]] std::span<const int32_t> part(const std::vector<int32_t>& tokens, int64_t from,
                                            int64_t to);

}  // namespace hcache::cli
