// What the tests of answers share: a generation's outcome, its tokens, and what a builder makes of
// them.
#pragma once

#include <gtest/gtest.h>

#include <limits>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "api/reply.h"
#include "api_testing.h"
#include "model/chat.h"
#include "model/tokenizer.h"

namespace hcache::api::test {

inline Outcome outcome() {
  Outcome o;
  o.prompt_tokens = 100;
  o.reply_tokens = 7;
  o.resident = 10;
  o.hidden = 50;
  o.kv = 20;
  o.recomputed = 5;
  o.fresh = 15;
  o.bytes.disk = 4096;
  o.restore_ms = 2.5;
  o.prompt_ms = 10;
  o.reply_ms = 70;
  o.restore.overlap = 0.75;
  o.restore.schedule = "H:26 KV:4";
  o.restore.devices = {{.device = "RPC0", .n_layers = 15, .pages = {.disk = 2048}},
                       {.device = "RPC1", .n_layers = 15, .pages = {.dram = 48, .disk = 2000}}};
  return o;
}

inline ReplyContext context() {
  ReplyContext c;
  c.id = "abc123";
  c.created_s = 1700000000;
  c.model_name = "m";
  c.fingerprint = "fp";
  c.prompts = {"Once", "Twice"};
  return c;
}

inline GenerationRequest request(Dialect dialect, bool stream) {
  GenerationRequest r;
  r.dialect = dialect;
  r.stream = stream;
  if (dialect == Dialect::kCompletion || dialect == Dialect::kLlama) {
    r.prompts.emplace_back();
  } else {
    r.chat.emplace();
  }
  return r;
}

// Feeds `text` in pieces of a few bytes, as tokens 0, 1, ...
inline std::string feed(ReplyBuilder* builder, int choice, const std::string& text, uint32_t seed) {
  std::mt19937 rng(seed);
  std::string out;
  int32_t token = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t n = 1 + rng() % 5;
    TokenEvent event;
    event.text = text.substr(at, n);
    event.chosen = {token, event.text, -0.5F};
    event.top = {{token, event.text, -0.5F},
                 {99, "\xE2\x82", -std::numeric_limits<float>::infinity()}};
    out += builder->push(choice, event);
    at += n;
    token++;
  }
  return out;
}

struct Transcript {
  std::string stream;
  Json answer;
  model::ChatMessage message;
};

inline Transcript run(const GenerationRequest& r, const ReplyContext& c, const std::string& text,
                      const Finish& finish, uint32_t seed = 1) {
  const auto builder = ReplyBuilder::create(r, c);
  Transcript out;
  out.stream = builder->begin({100, 80});
  out.stream += feed(builder.get(), 0, text, seed);
  out.stream += builder->finish(0, "", finish);
  out.stream += builder->end();
  out.answer = builder->answer();
  out.message = builder->message(0);
  return out;
}

inline Finish ended() { return {FinishReason::kEnd, "", outcome()}; }

// A template whose replies have thoughts and tool calls.
class Replies : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    auto tokenizer = model::Tokenizer::load(HCACHE_TEST_MODEL);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
    tokenizer_ = std::move(tokenizer).value().release();
    auto chat = model::ChatTemplate::create(*tokenizer_);
    ASSERT_TRUE(chat.ok()) << chat.status().to_string();
    model::ChatInput input;
    input.messages = {{"user", "Hi"}};
    input.tools = {
        {"get_weather", "", R"({"type":"object","properties":{"city":{"type":"string"}}})"},
        {"now", "", ""}};
    auto prompt = chat.value()->prompt(input);
    ASSERT_TRUE(prompt.ok()) << prompt.status().to_string();
    with_tools_ = prompt->format;
    input.tools.clear();
    plain_ = chat.value()->prompt(input).value().format;
  }
  static void TearDownTestSuite() {
    with_tools_.reset();
    plain_.reset();
    delete tokenizer_;
  }

  static ReplyContext tools_context() {
    ReplyContext c = context();
    c.format = with_tools_;
    return c;
  }

  static inline const model::Tokenizer* tokenizer_ = nullptr;
  static inline std::shared_ptr<const model::ReplyFormat> with_tools_;
  static inline std::shared_ptr<const model::ReplyFormat> plain_;
};

inline constexpr const char* kCalls =
    "Let me look.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Köln\"}}\n"
    "</tool_call>\n<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";

}  // namespace hcache::api::test
