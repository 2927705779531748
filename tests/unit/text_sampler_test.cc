#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "model/sampler.h"

namespace hcache::model {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

std::unique_ptr<Sampler> make(int32_t n_vocab, const SamplingOptions& options) {
  auto sampler = Sampler::create(n_vocab, options);
  EXPECT_TRUE(sampler.ok()) << sampler.status().to_string();
  return sampler.ok() ? std::move(sampler).value() : nullptr;
}

SamplingOptions greedy() {
  SamplingOptions o;
  o.temperature = 0;
  return o;
}

std::vector<float> random_logits(size_t n, uint32_t seed) {
  std::mt19937 rng(seed);
  std::normal_distribution<float> normal(0, 2);
  std::vector<float> logits(n);
  for (float& x : logits) x = normal(rng);
  return logits;
}

TEST(Sampler, GreedyTakesTheFirstMaximum) {
  const auto s = make(5, greedy());
  EXPECT_EQ(s->sample(std::vector<float>{0, 3, 1, 3, -1}).value(), 1);
  // A padded output matrix has more rows than the vocabulary has tokens.
  EXPECT_EQ(s->sample(std::vector<float>{0, 1, 1, 2, -1, 99}).value(), 3);
  EXPECT_EQ(s->sample(std::vector<float>{0, 1}).code(), Code::kInvalidArgument);
}

TEST(Sampler, SurvivesNanAndEmptyDistributions) {
  SamplingOptions warm;
  for (const SamplingOptions& o : {greedy(), warm}) {
    const auto s = make(3, o);
    EXPECT_EQ(s->sample(std::vector<float>{NAN, 1, NAN}).value(), 1);
    EXPECT_EQ(s->sample(std::vector<float>{NAN, NAN, NAN}).code(), Code::kInternal);
    EXPECT_EQ(s->sample(std::vector<float>{-kInf, -kInf, -kInf}).code(), Code::kInternal);
  }
}

std::vector<int32_t> draw(const SamplingOptions& options, int n) {
  const auto s = make(1000, options);
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; i++) {
    tokens.push_back(s->sample(random_logits(1000, static_cast<uint32_t>(i))).value());
    EXPECT_TRUE(s->accept(tokens.back()).ok());
  }
  return tokens;
}

TEST(Sampler, TheSeedDecides) {
  SamplingOptions o;
  o.temperature = 1.5F;
  o.repeat_penalty = 1.1F;
  o.seed = 42;
  const auto first = draw(o, 50);
  EXPECT_EQ(draw(o, 50), first);
  o.seed = 43;
  EXPECT_NE(draw(o, 50), first);
  o.seed = 0xFFFFFFFF;  // the library's "random seed", which would not repeat
  EXPECT_EQ(draw(o, 50), draw(o, 50));
}

TEST(Sampler, EachFilterNarrowsTheChoice) {
  const std::vector<float> logits = {4, 3.9F, 3.8F, 0, -1, -2};
  const auto seen = [&](SamplingOptions o) {
    std::set<int32_t> tokens;
    for (uint32_t seed = 0; seed < 400; seed++) {
      o.seed = seed;
      tokens.insert(make(6, o)->sample(logits).value());
    }
    return tokens;
  };
  SamplingOptions open;
  open.temperature = 3;
  open.top_k = 0;
  open.top_p = 1;
  open.min_p = 0;
  EXPECT_EQ(seen(open).size(), 6U);
  SamplingOptions o = open;
  o.top_k = 2;
  EXPECT_EQ(seen(o), (std::set<int32_t>{0, 1}));
  o = open;
  o.min_p = 0.5F;
  EXPECT_EQ(seen(o), (std::set<int32_t>{0, 1, 2}));
  o = open;
  o.top_p = 0.3F;
  EXPECT_EQ(seen(o), (std::set<int32_t>{0}));
  o = open;
  o.logit_bias = {{0, -kInf}, {5, 100}};
  EXPECT_EQ(seen(o), (std::set<int32_t>{5}));
}

// Only the likeliest of a large vocabulary are looked at; the choice is as if all were.
TEST(Sampler, ALargeVocabularyChangesNothing) {
  constexpr size_t kTokens = 5000;
  constexpr size_t kTopK = 40;
  SamplingOptions o;
  o.presence_penalty = 1.5F;
  o.penalty_last_n = 8;
  o.logit_bias = {{17, 3.0F}, {4999, -kInf}};
  for (uint32_t seed = 0; seed < 100; seed++) {
    std::vector<float> logits = random_logits(kTokens, seed);
    logits[3] = NAN;
    // The likeliest are the last ones said: all of them are penalised.
    std::vector<int32_t> order(kTokens);
    for (size_t i = 0; i < kTokens; i++) order[i] = static_cast<int32_t>(i);
    std::erase(order, 3);
    const auto likelier = [&](int32_t a, int32_t b) {
      return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
    };
    std::sort(order.begin(), order.end(), likelier);
    const std::vector<int32_t> recent(order.begin(), order.begin() + 8);
    o.temperature = seed % 2 == 0 ? 0.0F : 0.9F;
    o.seed = seed;
    const auto ours = make(kTokens, o);
    ours->remember(recent);

    // The same by hand: change the logits, take away all but the first, choose among the rest.
    std::vector<float> changed = logits;
    changed[3] = -kInf;
    for (const int32_t token : recent) changed[static_cast<size_t>(token)] -= 1.5F;
    for (const auto& [token, bias] : o.logit_bias) changed[static_cast<size_t>(token)] += bias;
    std::vector<float> sorted = changed;
    std::sort(sorted.begin(), sorted.end(), std::greater<>());
    for (float& x : changed) {
      if (x < sorted[kTopK - 1]) x = -kInf;
    }
    SamplingOptions plain;
    plain.temperature = o.temperature;
    plain.seed = seed;
    plain.top_k = 0;
    EXPECT_EQ(ours->sample(logits).value(), make(kTokens, plain)->sample(changed).value()) << seed;
  }
}

TEST(Sampler, PenaltiesCountPromptAndReply) {
  SamplingOptions o = greedy();
  o.presence_penalty = 2;
  const auto s = make(3, o);
  const std::vector<float> logits = {3, 2, 1.5F};
  EXPECT_EQ(s->sample(logits).value(), 0);
  s->remember(std::vector<int32_t>{0, -7, 99});  // foreign ids are left out
  EXPECT_EQ(s->sample(logits).value(), 1);
  EXPECT_TRUE(s->accept(1).ok());
  EXPECT_EQ(s->sample(logits).value(), 2);
  EXPECT_EQ(s->accept(3).code(), Code::kInvalidArgument);
}

TEST(Sampler, OptionsAreCheckedByName) {
  const auto fails = [](auto change, const char* name) {
    SamplingOptions o;
    change(o);
    const auto s = Sampler::create(10, o);
    EXPECT_EQ(s.code(), Code::kInvalidArgument) << name;
    EXPECT_NE(s.status().message().find(name), std::string::npos) << s.status().message();
  };
  fails([](auto& o) { o.temperature = -1; }, "temperature");
  fails([](auto& o) { o.temperature = NAN; }, "temperature");
  fails([](auto& o) { o.top_k = -1; }, "top_k");
  fails([](auto& o) { o.top_p = 0; }, "top_p");
  fails([](auto& o) { o.min_p = 1.1F; }, "min_p");
  fails([](auto& o) { o.repeat_penalty = 0; }, "repeat_penalty");
  fails([](auto& o) { o.frequency_penalty = kInf; }, "frequency_penalty");
  fails([](auto& o) { o.presence_penalty = NAN; }, "presence_penalty");
  fails([](auto& o) { o.penalty_last_n = -1; }, "penalty_last_n");
  fails([](auto& o) { o.logit_bias = {{10, 1.0F}}; }, "logit_bias");
  fails([](auto& o) { o.json_schema = "{}"; }, "vocabulary");
}

TEST(Logprobs, AreOfTheRawLogits) {
  const std::vector<float> logits = {1, 3, NAN, 2, 3};
  const Logprobs out = logprobs(logits, 3, 3);
  double sum = 0;
  for (const float x : {1.0, 3.0, 2.0, 3.0}) sum += std::exp(x);
  EXPECT_NEAR(out.chosen, 2 - std::log(sum), 1e-6);
  ASSERT_EQ(out.top.size(), 3U);
  EXPECT_EQ(out.top[0].token, 1);
  EXPECT_EQ(out.top[1].token, 4);
  EXPECT_EQ(out.top[2].token, 3);
  EXPECT_NEAR(out.top[0].logprob, 3 - std::log(sum), 1e-6);
  EXPECT_EQ(logprobs(logits, 2, 0).chosen, -kInf);
  EXPECT_EQ(logprobs(logits, 0, 99).top.size(), 5U);
  EXPECT_TRUE(logprobs(logits, 0, 0).top.empty());
}

TEST(Logprobs, SurviveBrokenRows) {
  EXPECT_EQ(logprobs(std::vector<float>{NAN, NAN}, 0, 2).chosen, -kInf);
  EXPECT_EQ(logprobs(std::vector<float>{-kInf, -kInf}, 1, 1).chosen, -kInf);
  // Large logits do not overflow.
  EXPECT_NEAR(logprobs(std::vector<float>{1000, 1000}, 0, 1).chosen, -std::log(2.0), 1e-6);
}

class Grammar : public testing::Test {
 protected:
  void SetUp() override {
    auto t = Tokenizer::load(HCACHE_TEST_MODEL);
    ASSERT_TRUE(t.ok()) << t.status().to_string();
    tokenizer_ = std::move(t).value();
  }
  [[nodiscard]] std::vector<int32_t> encode(const std::string& text) const {
    return tokenizer_->encode(text).value();
  }
  std::unique_ptr<Tokenizer> tokenizer_;
};

TEST_F(Grammar, ForcesNoiseIntoTheSchema) {
  SamplingOptions o;
  o.temperature = 1;
  o.json_schema = R"({"type":"object","properties":{"name":{"type":"string","maxLength":8},)"
                  R"("legs":{"type":"integer","minimum":0,"maximum":99}},)"
                  R"("required":["name","legs"],"additionalProperties":false})";
  for (uint32_t seed = 0; seed < 3; seed++) {
    o.seed = seed;
    auto sampler = Sampler::create(*tokenizer_, o);
    ASSERT_TRUE(sampler.ok()) << sampler.status().to_string();
    std::string text;
    for (uint32_t i = 0; i < 80; i++) {
      const auto logits = random_logits(static_cast<size_t>(tokenizer_->n_vocab()), 100 * seed + i);
      const int32_t token = sampler.value()->sample(logits).value();
      ASSERT_TRUE(sampler.value()->accept(token).ok());
      if (tokenizer_->is_eog(token)) break;
      text += tokenizer_->piece(token);
    }
    const auto json = nlohmann::json::parse(text, nullptr, false);
    ASSERT_FALSE(json.is_discarded()) << text;
    EXPECT_TRUE(json.at("name").is_string()) << text;
    EXPECT_TRUE(json.at("legs").is_number_integer()) << text;
  }
}

TEST_F(Grammar, RefusesWhatBreaksIt) {
  SamplingOptions o = greedy();
  o.grammar = "root ::= \"yes\" | \"no\"";
  auto sampler = Sampler::create(*tokenizer_, o);
  ASSERT_TRUE(sampler.ok()) << sampler.status().to_string();
  const int32_t maybe = tokenizer_->encode("maybe").value()[0];
  EXPECT_EQ(sampler.value()->accept(maybe).code(), Code::kInvalidArgument);
  const int32_t no = tokenizer_->encode("no").value()[0];
  EXPECT_TRUE(sampler.value()->accept(no).ok());
}

TEST_F(Grammar, LazyOnesWaitForTheirTrigger) {
  const auto feed = [&](Sampler* sampler, const std::string& text) {
    for (const int32_t token : encode(text)) {
      if (const Status s = sampler->accept(token); !s.ok()) return s;
    }
    return Status();
  };
  SamplingOptions o = greedy();
  o.grammar = "root ::= \"<call>\" (\"yes\" | \"no\")";
  o.grammar_scope.trigger_patterns = {"<call>"};
  auto sampler = Sampler::create(*tokenizer_, o);
  ASSERT_TRUE(sampler.ok()) << sampler.status().to_string();
  EXPECT_TRUE(feed(sampler->get(), "maybe, who knows <call").ok());
  EXPECT_TRUE(feed(sampler->get(), ">").ok());
  EXPECT_EQ(feed(sampler->get(), "maybe").code(), Code::kInvalidArgument);
  EXPECT_TRUE(feed(sampler->get(), "no").ok());
}

TEST_F(Grammar, TheirTriggerMayBeAToken) {
  SamplingOptions o = greedy();
  o.grammar = "root ::= \"<|im_start|>\" \"x\"";
  const int32_t start = tokenizer_->encode("<|im_start|>", {.parse_special = true}).value()[0];
  o.grammar_scope.trigger_tokens = {start};
  auto sampler = Sampler::create(*tokenizer_, o);
  ASSERT_TRUE(sampler.ok()) << sampler.status().to_string();
  const int32_t y = tokenizer_->encode("y").value()[0];
  EXPECT_TRUE(sampler.value()->accept(y).ok());
  EXPECT_TRUE(sampler.value()->accept(start).ok());
  EXPECT_EQ(sampler.value()->accept(y).code(), Code::kInvalidArgument);
  EXPECT_TRUE(sampler.value()->accept(tokenizer_->encode("x").value()[0]).ok());
}

TEST_F(Grammar, ThoughtsTriggerNothing) {
  SamplingOptions o = greedy();
  o.grammar = "root ::= \"<call>x\"";
  o.grammar_scope.trigger_patterns = {"<call>"};
  o.grammar_scope.thinking_start = "<think>";
  o.grammar_scope.thinking_ends = {"</think>"};
  o.grammar_scope.prefix = "assistant\n<think>";
  auto sampler = Sampler::create(*tokenizer_, o);
  ASSERT_TRUE(sampler.ok()) << sampler.status().to_string();
  const auto feed = [&](const std::string& text) {
    for (const int32_t token : encode(text)) {
      if (!sampler.value()->accept(token).ok()) return false;
    }
    return true;
  };
  EXPECT_TRUE(feed("a <call> would be"));
  EXPECT_TRUE(feed("</think>"));
  EXPECT_TRUE(feed("so <call>"));
  EXPECT_FALSE(feed("y"));
  EXPECT_TRUE(feed("x"));
}

TEST_F(Grammar, SkipsWhatThePromptHolds) {
  SamplingOptions o = greedy();
  o.grammar = "root ::= \"<|im_start|>assistant\\n\" \"yes\"";
  o.grammar_scope.prefix = "<|im_start|>assistant\n";
  auto sampler = Sampler::create(*tokenizer_, o);
  ASSERT_TRUE(sampler.ok()) << sampler.status().to_string();
  EXPECT_TRUE(sampler.value()->accept(tokenizer_->encode("yes").value()[0]).ok());
  // What does not fit, an end-of-turn token included, is an error.
  for (const char* prefix : {"user", "<|im_end|>"}) {
    o.grammar_scope.prefix = prefix;
    EXPECT_EQ(Sampler::create(*tokenizer_, o).code(), Code::kInvalidArgument);
  }
}

TEST_F(Grammar, ErrorsSayWhichTextIsBad) {
  SamplingOptions o;
  o.json_schema = "{not json";
  const auto schema = Sampler::create(*tokenizer_, o);
  EXPECT_EQ(schema.code(), Code::kInvalidArgument);
  EXPECT_NE(schema.status().message().find("JSON schema"), std::string::npos);
  o = {};
  o.grammar = "root ::= (";
  const auto grammar = Sampler::create(*tokenizer_, o);
  EXPECT_EQ(grammar.code(), Code::kInvalidArgument);
  EXPECT_NE(grammar.status().message().find("grammar"), std::string::npos);
  o.json_schema = "{}";
  EXPECT_EQ(Sampler::create(*tokenizer_, o).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache::model
