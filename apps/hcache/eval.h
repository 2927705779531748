// What the evaluations share: their options, and prompts whose tokens' logits are looked at, with
// the first part computed anew or brought back from the store as after a restart.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/throttled_env.h"
#include "bench.h"
#include "eval/statistics.h"
#include "model/tokenizer.h"
#include "overflow_args.h"
#include "policy/truncation.h"
#include "session.h"
#include "terminal.h"

namespace hcache::cli {

struct EvalArgs : BenchArgs {
  EvalArgs();

  std::vector<std::string> methods;  // offer_methods()
  std::string base_model =
      text(&base_model, "--base-model", "FILE", "",
           "what is compared with, computed: another GGUF file of the same vocabulary; default: "
           "the same model");
  std::string base_kv_type =
      choice(&base_kv_type, "--base-kv-type", "same", "same|f32|f16|bf16|q8_0",
             "type of the KV cache of what is compared with");

 protected:
  void offer_methods(std::string_view fallback);
};

// A text cut into windows that are scored one by one.
struct WindowArgs : EvalArgs {
  std::string file = text(&file, "FILE", "", "", "the text, in UTF-8", {.required = true});
  int64_t window =
      integer(&window, "--window", "TOKENS", 512, {8}, "tokens of a window, BOS included");
  int64_t windows = integer(&windows, "--windows", "N", 0, {0}, "use so many; 0: all");
  int64_t from = integer(&from, "--from", "TOKENS", 0, {0},
                         "so many tokens of a window are only seen, and are what is saved and "
                         "restored; 0: half");
};

struct PplArgs : WindowArgs {
  PplArgs();
};

struct KlArgs : WindowArgs {
  KlArgs();
};

struct TasksArgs : EvalArgs {
  TasksArgs();

  std::string file =
      text(&file, "FILE", "", "",
           "questions, a line of JSON each: {\"prompt\": …, \"choices\": [\"…\", …], \"answer\": "
           "0}; without: made up, as --lines says");
  int64_t lines =
      integer(&lines, "--lines", "N", 20, {4, 100000},
              "made-up questions: find a number that one of the first of so many sentences gives",
              {.excludes = "FILE"});
  int64_t questions = integer(&questions, "--questions", "N", 100, {1, 1000000}, "at most so many");
  int64_t seed =
      integer(&seed, "--seed", "N", 1, {0}, "of the made-up questions", {.excludes = "FILE"});
};

struct TruncationArgs : EvalArgs {
  TruncationArgs();

  std::string file = text(&file, "FILE", "", "", "the text, in UTF-8", {.required = true});
  int64_t context =
      integer(&context, "--context", "TOKENS", 512, {256}, "the context that the text outgrows");
  std::vector<std::string> overflows =
      texts(&overflows, "--overflows", "N,...", "1,4,16", "",
            "score what comes behind so many overflows in a row, up to the next one; N-M: behind "
            "each of the Nth to the Mth");
  std::vector<std::string> compare = texts(
      &compare, "--compare", "NAME,...", "anew,last,unrotated,whole", "anew|last|unrotated|whole",
      "what truncated text is held against: what is held computed anew (always), the last "
      "rows alone, K as it was rotated, nothing dropped; each but the first takes as long "
      "as the truncated text itself");
  CutArgs cuts{this};
  double anew_share =
      number(&anew_share, "--anew-share", "X", 0, {0, 0.99},
             "what is computed anew is what is left where so much leaves at once, as with programs "
             "that truncate prompts, 0.5; 0: as many tokens as the truncated text holds");
  int64_t pieces =
      integer(&pieces, "--pieces", "N", 20, {1}, "use so many pieces of the text at most");
};

struct CompressionArgs : BenchArgs {
  CompressionArgs();

  std::string file = text(&file, "FILE", "", "",
                          "the text, in UTF-8; without: made-up questions, as --lines says");
  std::vector<std::string> policies =
      texts(&policies, "--policies", "NAME,...", "recent,random,car,snap,self",
            "none|recent|random|car|snap|self", "which rows the layers keep of a context");
  std::vector<std::string> budgets = texts(&budgets, "--budgets", "SHARE,...", "0.75,0.5,0.25,0.1",
                                           "", "shares of the rows that are kept");
  std::string layers = choice(&layers, "--layers", "uniform",
                              {{"uniform", "each layer keeps as many"},
                               {"profile",
                                "in proportion to the attention weights that count in "
                                "it (CaR)"},
                               {"ranked", "the rows of all layers are ranked by their scores"}},
                              "how the rows are shared out over the layers");
  int64_t context = integer(&context, "--context", "TOKENS", 1024, {64},
                            "tokens of the text that the rows are of, one piece of it at a time");
  int64_t tokens =
      integer(&tokens, "--tokens", "TOKENS", 128, {1, 4096}, "so many behind them are predicted");
  int64_t pieces =
      integer(&pieces, "--pieces", "N", 8, {1}, "use so many pieces of the text at most");
  int64_t lines = integer(&lines, "--lines", "N", 20, {8, 100000},
                          "made-up questions: a number that one of the first of so many sentences "
                          "gives, asked for behind another question",
                          {.excludes = "FILE"});
  int64_t questions = integer(&questions, "--questions", "N", 50, {1, 1000000},
                              "so many made-up ones", {.excludes = "FILE"});
  int64_t seed =
      integer(&seed, "--seed", "N", 1, {0}, "of the made-up questions, and of random rows");
};

// Perplexity of a text, by each method.
[[nodiscard]] Status eval_ppl(PplArgs args);
// How far the predictions of each method are from the base's, token by token.
[[nodiscard]] Status eval_kl(KlArgs args);
// How many questions are answered right by each method and by the base.
[[nodiscard]] Status eval_tasks(TasksArgs args);

// How well text is predicted that outgrows the context.
[[nodiscard]] Status eval_truncation(TruncationArgs args);
// What is lost where layers keep some rows only.
[[nodiscard]] Status eval_compression(CompressionArgs args);

// Where the first part of a prompt comes from.
struct EvalMethod {
  std::string name;
  bool restores = false;
  policy::Mode mode = policy::Mode::kPlan;
};

// Where the tokens before `from` came from, summed over prompts.
struct EvalSource {
  int64_t computed = 0;
  int64_t hidden = 0;
  int64_t kv = 0;
  int64_t recomputed = 0;  // by restores
  uint64_t bytes_read = 0;

  [[nodiscard]] int64_t restored() const { return hidden + kv + recomputed; }
};

// A prompt of which the tokens from `from` on are looked at.
struct EvalPrompt {
  std::vector<int32_t> tokens;
  int64_t from = 0;  // at least 1
  std::optional<policy::TruncationLimits> truncation = {};
};

// Prompts on what serves requests. Threading: one thread; OnLogits runs on the engine's, while
// that thread waits.
class Evaluation {
 public:
  // Of token `position` of the prompt.
  using OnLogits = std::function<void(int64_t position, std::span<const float> logits)>;

  // Opens the base, and what is compared with it if that is something else. `longest`: tokens of a
  // prompt. args and line must outlive it.
  static Result<std::unique_ptr<Evaluation>> open(EvalArgs& args, int64_t longest,
                                                  ProgressLine& line);
  ~Evaluation();

  [[nodiscard]] const std::vector<EvalMethod>& methods() const { return methods_; }
  [[nodiscard]] const model::Model& model() const { return serving_->runtime().model(); }
  [[nodiscard]] const std::string& base_path() const { return base().runtime().model().path(); }
  // The base would make the same tokens of a text as the model's tokenizer.
  [[nodiscard]] Status check_base(const model::Tokenizer& tokenizer, const std::string& text) const;

  // Where any method restores: computes and saves what comes before each prompt's `from`, and opens
  // everything anew, as a restart does. Calls score() afterwards.
  Status save(std::span<const EvalPrompt> prompts);
  // The logits of the prompt's tokens from `from` on, in order; adds to *source.
  Status score(const EvalPrompt& prompt, const EvalMethod& method, const OnLogits& on_logits,
               EvalSource* source);
  // The same computed by the base.
  Status score_base(const EvalPrompt& prompt, const OnLogits& on_logits);
  Status tell(const std::string& what, double fraction);

  Status close();

 private:
  Evaluation(EvalArgs& args, ProgressLine& line);
  Status open_serving();
  [[nodiscard]] serving::Serving& base() const { return base_ ? *base_ : *serving_; }
  Result<scheduler::Outcome> run(serving::Serving& serving, scheduler::Request request);
  Result<scheduler::Outcome> score_on(serving::Serving& serving, const EvalPrompt& prompt,
                                      const EvalMethod& method, const OnLogits& on_logits);

  EvalArgs& args_;
  ProgressLine& line_;
  ThrottledEnv env_;
  ThrottledEnv base_env_;
  Scratch scratch_;
  std::vector<EvalMethod> methods_;
  std::unique_ptr<serving::Serving> serving_;
  std::unique_ptr<serving::Serving> base_;  // null: serving_ computes it
};

// A text's tokens in pieces of so many, at most `most` of them; the rest is left out. Each begins
// with BOS where the model wants one, in place of a token of the text.
[[nodiscard]] std::vector<std::vector<int32_t>> pieces_of(const model::Tokenizer& tokenizer,
                                                          std::span<const int32_t> tokens,
                                                          int64_t size, int64_t most);
// The vocabulary of the model that the options name.
[[nodiscard]] Result<std::unique_ptr<model::Tokenizer>> load_tokenizer(const EvalArgs& args);
[[nodiscard]] Json to_json(const eval::Estimate& estimate);
[[nodiscard]] Json to_json(const EvalSource& source);
// Of what to_json() made of an estimate: "12.34 (12.30 to 12.40)" of its figures times `factor`, in
// fmt's format for each.
[[nodiscard]] std::string with_interval(const Json& estimate, std::string_view format,
                                        double factor = 1);
// Machine, models and what else every report begins with.
[[nodiscard]] Json eval_json(const Evaluation& evaluation);

}  // namespace hcache::cli
