#include "model/sampler.h"

#include <fmt/format.h>
#include <json-schema-to-grammar.h>
#include <reasoning-budget.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <deque>
#include <exception>
#include <functional>
#include <limits>

#include "text/llama_handle.h"

namespace hcache::model {
namespace {

Status check(const SamplingOptions& o, int32_t n_vocab) {
  const auto bad = [](std::string_view name, auto value, std::string_view range) {
    return invalid_argument(fmt::format("{} is {}, but must be {}", name, value, range));
  };
  if (!std::isfinite(o.temperature) || o.temperature < 0) {
    return bad("temperature", o.temperature, "at least 0");
  }
  if (o.top_k < 0) return bad("top_k", o.top_k, "at least 0");
  if (!(o.top_p > 0 && o.top_p <= 1)) return bad("top_p", o.top_p, "in (0, 1]");
  if (!(o.min_p >= 0 && o.min_p <= 1)) return bad("min_p", o.min_p, "in [0, 1]");
  if (!(o.repeat_penalty > 0) || !std::isfinite(o.repeat_penalty) ||
      !std::isfinite(1 / o.repeat_penalty)) {
    return bad("repeat_penalty", o.repeat_penalty, "above 0");
  }
  if (!std::isfinite(o.frequency_penalty)) {
    return bad("frequency_penalty", o.frequency_penalty, "finite");
  }
  if (!std::isfinite(o.presence_penalty)) {
    return bad("presence_penalty", o.presence_penalty, "finite");
  }
  if (o.penalty_last_n < 0) return bad("penalty_last_n", o.penalty_last_n, "at least 0");
  for (const auto& [token, bias] : o.logit_bias) {
    if (token < 0 || token >= n_vocab) {
      return bad("logit_bias's token", token, fmt::format("in [0, {})", n_vocab));
    }
    if (std::isnan(bias)) return bad("logit_bias", bias, "a number");
  }
  if (!o.json_schema.empty() && !o.grammar.empty()) {
    return invalid_argument("json_schema and grammar exclude each other");
  }
  return {};
}

Result<LlamaSamplerPtr> make_grammar(const llama_vocab* vocab, const SamplingOptions& o) {
  if (o.json_schema.empty() && o.grammar.empty()) return LlamaSamplerPtr();
  const char* what = o.grammar.empty() ? "JSON schema" : "grammar";
  const ErrorLog log;
  try {
    if (o.grammar.empty()) {
      const std::string text = json_schema_to_grammar(common_json::parse(o.json_schema));
      LlamaSamplerPtr sampler(llama_sampler_init_grammar(vocab, text.c_str(), "root"));
      if (sampler) return sampler;
    } else if (!o.grammar_scope.lazy()) {
      LlamaSamplerPtr sampler(llama_sampler_init_grammar(vocab, o.grammar.c_str(), "root"));
      if (sampler) return sampler;
    } else {
      const GrammarScope& scope = o.grammar_scope;
      std::vector<const char*> patterns;
      for (const std::string& p : scope.trigger_patterns) patterns.push_back(p.c_str());
      LlamaSamplerPtr sampler(llama_sampler_init_grammar_lazy_patterns(
          vocab, o.grammar.c_str(), "root", patterns.data(), patterns.size(),
          scope.trigger_tokens.data(), scope.trigger_tokens.size()));
      if (sampler) return sampler;
    }
  } catch (const std::exception& e) {
    return invalid_argument(fmt::format("can't read the {}: {}", what, e.what()));
  }
  return invalid_argument(fmt::format("can't read the {}: {}", what, log.text("syntax error")));
}

// Watches for the model's thoughts, where a lazy grammar may be triggered by them. May be null.
Result<LlamaSamplerPtr> make_thinking(const Tokenizer& tokenizer, const GrammarScope& scope) {
  if (!scope.lazy() || scope.thinking_start.empty() || scope.thinking_ends.empty()) {
    return LlamaSamplerPtr();
  }
  const EncodeOptions special = {.parse_special = true};
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> start,
                          tokenizer.encode(scope.thinking_start, special));
  std::vector<std::vector<int32_t>> ends;
  for (const std::string& text : scope.thinking_ends) {
    HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> end, tokenizer.encode(text, special));
    if (!end.empty()) ends.push_back(std::move(end));
  }
  if (start.empty() || ends.empty()) return LlamaSamplerPtr();
  return LlamaSamplerPtr(common_reasoning_budget_init(tokenizer.impl().vocab, {start}, ends, {},
                                                      std::numeric_limits<int32_t>::max()));
}

// The tokens of the prefix; a space that the vocabulary puts before it does not count.
Result<std::vector<int32_t>> prefix_tokens(const Tokenizer& tokenizer, const std::string& prefix) {
  HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                          tokenizer.encode(prefix, {.parse_special = true}));
  if (tokens.empty() || prefix.empty()) return tokens;
  const std::string first = tokenizer.piece(tokens.front(), true);
  const auto is_space = [](char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; };
  if (!first.empty() && is_space(first.front()) && !is_space(prefix.front())) {
    tokens.erase(tokens.begin());
  }
  return tokens;
}

bool penalizes(const SamplingOptions& o) {
  return o.penalty_last_n > 0 &&
         (o.repeat_penalty != 1 || o.frequency_penalty != 0 || o.presence_penalty != 0);
}

}  // namespace

struct Sampler::Impl {
  int32_t n_vocab = 0;
  bool argmax_only = false;  // greedy without anything that changes logits
  LlamaSamplerPtr grammar;   // may be null
  LlamaSamplerPtr thinking;  // may be null; see make_thinking
  LlamaSamplerPtr chain;
  std::vector<llama_token_data> candidates;
  size_t n_left = 0;  // of them, the first: what the chain chose from
  // How many tokens can be chosen from once the chain has changed logits; 0: all.
  size_t keeps = 0;
  std::vector<int32_t> biased;  // tokens whose logits the chain always changes
  size_t n_recent = 0;          // and so do the last ones, when they are penalised
  std::deque<int32_t> recent;

  static Result<std::unique_ptr<Impl>> make(int32_t n_vocab, LlamaSamplerPtr grammar,
                                            const SamplingOptions& o) {
    auto impl = std::make_unique<Impl>();
    impl->n_vocab = n_vocab;
    impl->grammar = std::move(grammar);
    const bool greedy = o.temperature == 0;
    impl->argmax_only = greedy && !impl->grammar && o.logit_bias.empty() && !penalizes(o);
    llama_sampler_chain_params params = llama_sampler_chain_default_params();
    params.no_perf = true;
    impl->chain.reset(llama_sampler_chain_init(params));
    const auto add = [&](llama_sampler* s) { llama_sampler_chain_add(impl->chain.get(), s); };
    if (!o.logit_bias.empty()) {
      std::vector<llama_logit_bias> bias;
      for (const auto& [token, value] : o.logit_bias) bias.push_back({token, value});
      add(llama_sampler_init_logit_bias(n_vocab, static_cast<int32_t>(bias.size()), bias.data()));
    }
    if (penalizes(o)) {
      add(llama_sampler_init_penalties(n_vocab, o.penalty_last_n, o.repeat_penalty,
                                       o.frequency_penalty, o.presence_penalty));
    }
    for (const auto& [token, value] : o.logit_bias) impl->biased.push_back(token);
    if (penalizes(o)) impl->n_recent = static_cast<size_t>(o.penalty_last_n);
    impl->keeps = greedy ? 1 : static_cast<size_t>(o.top_k);
    if (greedy) {
      add(llama_sampler_init_greedy());
      return impl;
    }
    if (o.top_k > 0) add(llama_sampler_init_top_k(o.top_k));
    if (o.top_p < 1) add(llama_sampler_init_top_p(o.top_p, 1));
    if (o.min_p > 0) add(llama_sampler_init_min_p(o.min_p, 1));
    add(llama_sampler_init_temp(o.temperature));
    // LLAMA_DEFAULT_SEED would draw a random one.
    const uint32_t seed = o.seed == LLAMA_DEFAULT_SEED ? 0 : o.seed;
    add(llama_sampler_init_dist(seed));
    return impl;
  }

  // What the chain can choose from: the likeliest tokens, and those whose logits it changes. A
  // token that it leaves alone and keeps is among the first keeps + changed, since at most the
  // changed ones fall behind it. False: that would be too many to gain anything.
  bool fill_likeliest(std::span<const float> logits) {
    constexpr size_t kWorthwhile = 16;  // of the vocabulary one part in so many
    const size_t wanted = keeps + biased.size() + recent.size();
    if (keeps == 0 || wanted * kWorthwhile > static_cast<size_t>(n_vocab)) return false;
    const auto before = [](const llama_token_data& a, const llama_token_data& b) {
      return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
    };
    const auto cut = [&] {
      std::nth_element(candidates.begin(), candidates.begin() + static_cast<int64_t>(wanted) - 1,
                       candidates.end(), before);
      candidates.resize(wanted);
      return candidates.back().logit;
    };
    candidates.clear();
    candidates.reserve(8 * wanted);
    float least = -std::numeric_limits<float>::infinity();
    for (int32_t i = 0; i < n_vocab; i++) {
      const float logit = logits[static_cast<size_t>(i)];
      if (!(logit > least)) continue;  // nor NaN, which has no order
      candidates.push_back({i, logit, 0.0F});
      if (candidates.size() == 8 * wanted) least = cut();
    }
    if (candidates.size() > wanted) cut();
    add_changed(logits, biased);
    add_changed(logits, recent);
    // In the order of the vocabulary, so that of equals the first one is taken.
    const auto by_id = [](const auto& a, const auto& b) { return a.id < b.id; };
    const auto same = [](const auto& a, const auto& b) { return a.id == b.id; };
    std::sort(candidates.begin(), candidates.end(), by_id);
    candidates.erase(std::unique(candidates.begin(), candidates.end(), same), candidates.end());
    return true;
  }

  template <typename Tokens>
  void add_changed(std::span<const float> logits, const Tokens& tokens) {
    for (const int32_t token : tokens) {
      const float logit = logits[static_cast<size_t>(token)];
      candidates.push_back(
          {token, std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit, 0.0F});
    }
  }

  // That the chain counts it for the penalties.
  void note(int32_t token) {
    llama_sampler_accept(chain.get(), token);
    if (n_recent == 0) return;
    recent.push_back(token);
    if (recent.size() > n_recent) recent.pop_front();
  }

  void fill(std::span<const float> logits) {
    candidates.resize(static_cast<size_t>(n_vocab));
    for (int32_t i = 0; i < n_vocab; i++) {
      const float logit = logits[static_cast<size_t>(i)];
      // NaN has no order; a sampler that sorts must never see one.
      candidates[static_cast<size_t>(i)] = {
          i, std::isnan(logit) ? -std::numeric_limits<float>::infinity() : logit, 0.0F};
    }
  }

  // kNoToken when nothing is left to choose from.
  int32_t choose() {
    if (candidates.empty()) return Tokenizer::kNoToken;
    llama_token_data_array all = {candidates.data(), candidates.size(), -1, false};
    llama_sampler_apply(chain.get(), &all);
    n_left = all.size;
    if (all.selected < 0 || static_cast<size_t>(all.selected) >= all.size) {
      return Tokenizer::kNoToken;
    }
    const llama_token_data& best = all.data[all.selected];
    return std::isfinite(best.logit) ? best.id : Tokenizer::kNoToken;
  }

  bool grammar_allows(int32_t token) {
    llama_token_data one = {token, 1.0F, 0.0F};
    llama_token_data_array array = {&one, 1, -1, false};
    llama_sampler_apply(grammar.get(), &array);
    return one.logit == 1.0F;
  }

  [[nodiscard]] bool grammar_applies() const {
    if (!grammar) return false;
    if (!thinking) return true;
    const auto state = common_reasoning_budget_get_state(thinking.get());
    return state == REASONING_BUDGET_IDLE || state == REASONING_BUDGET_DONE;
  }

  // Moves the grammar over `token`; throws what the library throws.
  Status follow(int32_t token) {
    const bool applied = grammar_applies();
    if (thinking) {
      llama_sampler_accept(thinking.get(), token);
      if (grammar && !applied) replay_end_of_thoughts();
    }
    if (!applied) return {};
    if (!grammar_allows(token)) {
      return invalid_argument(fmt::format("token {} breaks the grammar", token));
    }
    llama_sampler_accept(grammar.get(), token);
    return {};
  }

  // The tag that ends the thoughts may trigger the grammar.
  void replay_end_of_thoughts() {
    if (common_reasoning_budget_get_state(thinking.get()) != REASONING_BUDGET_DONE) return;
    const auto* end = common_reasoning_budget_get_end_match(thinking.get());
    if (end == nullptr) return;
    for (const int32_t token : *end) llama_sampler_accept(grammar.get(), token);
  }

  // The prompt has ended with `tokens` already.
  Status skip_prefix(std::span<const int32_t> tokens, bool lazy) {
    for (const int32_t token : tokens) {
      if (thinking) llama_sampler_accept(thinking.get(), token);
      if (lazy) continue;
      if (!grammar_allows(token)) {
        return invalid_argument("the end of the prompt does not fit the grammar");
      }
      llama_sampler_accept(grammar.get(), token);
    }
    return {};
  }

  Result<int32_t> sample(std::span<const float> logits) {
    if (logits.size() < static_cast<size_t>(n_vocab)) {
      return invalid_argument(
          fmt::format("{} logits for a vocabulary of {}", logits.size(), n_vocab));
    }
    if (argmax_only) return argmax(logits.first(static_cast<size_t>(n_vocab)));
    if (!fill_likeliest(logits)) fill(logits);
    int32_t token = choose();
    // The grammar over the whole vocabulary is slow, and rarely needed: ask it about the choice
    // first.
    if (grammar_applies() && (token == Tokenizer::kNoToken || !grammar_allows(token))) {
      fill(logits);
      llama_token_data_array all = {candidates.data(), candidates.size(), -1, false};
      llama_sampler_apply(grammar.get(), &all);
      token = choose();
    }
    if (token == Tokenizer::kNoToken) return internal_error("no token is left to sample");
    return token;
  }

  static Result<int32_t> argmax(std::span<const float> logits) {
    int32_t best = Tokenizer::kNoToken;
    float best_logit = -std::numeric_limits<float>::infinity();
    for (size_t i = 0; i < logits.size(); i++) {
      if (logits[i] > best_logit) {
        best = static_cast<int32_t>(i);
        best_logit = logits[i];
      }
    }
    if (best == Tokenizer::kNoToken) return internal_error("no token is left to sample");
    return best;
  }
};

Sampler::Sampler(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Sampler::~Sampler() = default;

Result<std::unique_ptr<Sampler>> Sampler::create(const Tokenizer& tokenizer,
                                                 const SamplingOptions& options) {
  HCACHE_RETURN_IF_ERROR(check(options, tokenizer.n_vocab()));
  HCACHE_ASSIGN_OR_RETURN(LlamaSamplerPtr grammar, make_grammar(tokenizer.impl().vocab, options));
  HCACHE_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                          Impl::make(tokenizer.n_vocab(), std::move(grammar), options));
  const GrammarScope& scope = options.grammar_scope;
  if (!options.grammar.empty()) {
    HCACHE_ASSIGN_OR_RETURN(impl->thinking, make_thinking(tokenizer, scope));
    HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> prefix,
                            prefix_tokens(tokenizer, scope.prefix));
    try {
      HCACHE_RETURN_IF_ERROR(impl->skip_prefix(prefix, scope.lazy()));
    } catch (const std::exception& e) {
      return invalid_argument(fmt::format("the grammar does not fit the prompt: {}", e.what()));
    }
  }
  return std::unique_ptr<Sampler>(new Sampler(std::move(impl)));
}

Result<std::unique_ptr<Sampler>> Sampler::create(int32_t n_vocab, const SamplingOptions& options) {
  if (n_vocab <= 0) return invalid_argument(fmt::format("n_vocab is {}", n_vocab));
  HCACHE_RETURN_IF_ERROR(check(options, n_vocab));
  if (!options.json_schema.empty() || !options.grammar.empty()) {
    return invalid_argument("a grammar needs a model with a vocabulary");
  }
  HCACHE_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl,
                          Impl::make(n_vocab, LlamaSamplerPtr(), options));
  return std::unique_ptr<Sampler>(new Sampler(std::move(impl)));
}

Result<int32_t> Sampler::sample(std::span<const float> logits) {
  try {
    return impl_->sample(logits);
  } catch (const std::exception& e) {
    return internal_error(fmt::format("sampling failed: {}", e.what()));
  }
}

SampledProbs Sampler::probabilities(int32_t token, int top) const {
  // A greedy chain has no chances but its choice.
  if (impl_->keeps == 1) return {.chosen = 1, .top = {{token, 1.0F}}};
  SampledProbs out;
  for (const llama_token_data& left : std::span(impl_->candidates).first(impl_->n_left)) {
    if (left.id == token) out.chosen = left.p;
    if (left.p > 0) out.top.emplace_back(left.id, left.p);
  }
  std::ranges::stable_sort(out.top, std::greater{}, &std::pair<int32_t, float>::second);
  if (out.top.size() > static_cast<size_t>(top)) out.top.resize(static_cast<size_t>(top));
  return out;
}

Status Sampler::accept(int32_t token) {
  if (token < 0 || token >= impl_->n_vocab) {
    return invalid_argument(
        fmt::format("token {} is outside the vocabulary of {}", token, impl_->n_vocab));
  }
  try {
    HCACHE_RETURN_IF_ERROR(impl_->follow(token));
    impl_->note(token);
  } catch (const std::exception& e) {
    return invalid_argument(fmt::format("token {} breaks the grammar: {}", token, e.what()));
  }
  return {};
}

void Sampler::remember(std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    if (token >= 0 && token < impl_->n_vocab) impl_->note(token);
  }
}

}  // namespace hcache::model
