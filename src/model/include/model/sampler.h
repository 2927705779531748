// Chooses the next token from logits: llama.cpp's sampler chain without its context.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "model/tokenizer.h"

namespace hcache::model {

// When a chat template's grammar applies; ChatTemplate::prompt() fills it in.
struct GrammarScope {
  std::string prefix{};  // the text with which the rules begin and the prompt has ended already
  // With triggers the grammar is lazy: it constrains nothing until the reply so far has a match of
  // a pattern (ECMAScript), from which it follows the rules, or one of the tokens comes.
  std::vector<std::string> trigger_patterns{};
  std::vector<int32_t> trigger_tokens{};
  // The tags around the model's thoughts, where it has such: inside, nothing triggers.
  std::string thinking_start{};
  std::vector<std::string> thinking_ends{};

  [[nodiscard]] bool lazy() const { return !trigger_patterns.empty() || !trigger_tokens.empty(); }
};

// The order of application: grammar, logit bias, penalties, top-k, top-p, min-p, temperature.
struct SamplingOptions {
  float temperature = 0.8F;  // >= 0; 0 takes the most likely token (greedy)
  int top_k = 40;            // keep the k most likely tokens; 0: all
  float top_p = 0.95F;       // keep the smallest set with this probability, (0, 1]; 1: all
  float min_p = 0.05F;       // drop tokens below this share of the best one's probability, [0, 1]
  float repeat_penalty = 1.0F;     // divides the logits of recent tokens, > 0; 1: off
  float frequency_penalty = 0.0F;  // subtracted per occurrence; 0: off
  float presence_penalty = 0.0F;   // subtracted once per recent token; 0: off
  int penalty_last_n = 64;         // how many tokens are recent, >= 0
  uint32_t seed = 0;               // the same seed, logits and options give the same tokens
  std::vector<std::pair<int32_t, float>> logit_bias;  // (token, added to its logit; -inf: never)
  std::string json_schema;     // a JSON schema that the reply must follow; empty: none
  std::string grammar;         // a GBNF grammar with the rule `root`; not both; empty: none
  GrammarScope grammar_scope;  // of `grammar`
};

// Chances after the sampling options; those of tokens that they leave, best first.
struct SampledProbs {
  float chosen = 0;
  std::vector<std::pair<int32_t, float>> top;
};

// One sequence, one thread. Holds no reference to the Tokenizer's text, but the Tokenizer must
// outlive it when a grammar is set.
class Sampler {
 public:
  // kInvalidArgument names the option that is out of range, or says why the schema or grammar
  // could not be read.
  static Result<std::unique_ptr<Sampler>> create(const Tokenizer& tokenizer,
                                                 const SamplingOptions& options);
  // For a model without a vocabulary: token ids in [0, n_vocab). kInvalidArgument when the options
  // hold a schema or a grammar.
  static Result<std::unique_ptr<Sampler>> create(int32_t n_vocab, const SamplingOptions& options);
  ~Sampler();
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;

  // The next token for `logits` [n_vocab]; longer rows (padded output matrices) are cut.
  // kInvalidArgument when the row is too short, kInternal when no token is left (all NaN or -inf).
  // Does not remember the token: accept() does.
  [[nodiscard]] Result<int32_t> sample(std::span<const float> logits);
  // What the last sample() chose from: `token`, which it returned, and the `top` likeliest.
  [[nodiscard]] SampledProbs probabilities(int32_t token, int top) const;
  // Notes that `token` follows: it counts for the penalties and moves the grammar on.
  // kInvalidArgument when the token is outside the vocabulary or breaks the grammar.
  [[nodiscard]] Status accept(int32_t token);
  // Counts `tokens` (the prompt) for the penalties only.
  void remember(std::span<const int32_t> tokens);

 private:
  struct Impl;
  explicit Sampler(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

struct TokenLogprob {
  int32_t token = Tokenizer::kNoToken;
  float logprob = 0;  // natural; -inf for a token that can't come

  friend bool operator==(const TokenLogprob&, const TokenLogprob&) = default;
};

// What the model alone thinks of a row of logits [n_vocab], before sampling options change it: the
// log-probability of `token`, and the `top` most likely tokens, best first (equal ones by id). NaN
// counts as -inf. `token` lies in [0, n_vocab). Pure.
struct Logprobs {
  float chosen = 0;
  std::vector<TokenLogprob> top;
};
[[nodiscard]] Logprobs logprobs(std::span<const float> logits, int32_t token, int top);

}  // namespace hcache::model
