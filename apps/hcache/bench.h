// What both benchmarks share: options, the machine, tokens to run on, and how results are told.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "model/tokenizer.h"
#include "session.h"
#include "state/runtime.h"
#include "terminal.h"

namespace hcache::cli {

struct BenchArgs {
  RuntimeArgs runtime;
  std::string json_file;
  std::string text;
  int64_t reps = 0;
  bool paced = false;
  // restore
  std::vector<int64_t> histories;
  std::vector<std::string> methods;
  std::vector<std::string> links;
  int64_t new_tokens = 0;
  int64_t decoded = 0;
  int64_t greedy = 0;
  int64_t conversations = 1;
  // throughput
  std::vector<int64_t> prompts;
  std::vector<int64_t> depths;
  std::vector<std::string> captures;
  int64_t gen = 0;
};

// Times the first token after a restart by every method (HCache §6), after comparing
// the restored state and its continuation with the uninterrupted run's.
[[nodiscard]] Status bench_restore(BenchArgs args);
// Times prefill and decode at several depths, with and without saving the state.
[[nodiscard]] Status bench_throughput(BenchArgs args);

[[nodiscard]] double now_s();  // of the monotonic clock
[[nodiscard]] double median(std::vector<double> v);
// {"min", "median", "max"} of the values times `factor`.
[[nodiscard]] Json spread(const std::vector<double>& v, double factor);

[[nodiscard]] Json machine_json(const state::Runtime& runtime);
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
