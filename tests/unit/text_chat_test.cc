#include <gtest/gtest.h>

#include <algorithm>

#include "model/chat.h"
#include "text_gguf.h"

namespace hcache::model {
namespace {

class Chat : public testing::Test {
 protected:
  void SetUp() override {
    auto t = Tokenizer::load(HCACHE_TEST_MODEL);
    ASSERT_TRUE(t.ok()) << t.status().to_string();
    tokenizer_ = std::move(t).value();
    chat_ = create();
  }
  std::unique_ptr<ChatTemplate> create(const std::string& source = {}) const {
    auto chat = ChatTemplate::create(*tokenizer_, source);
    EXPECT_TRUE(chat.ok()) << chat.status().to_string();
    return chat.ok() ? std::move(chat).value() : nullptr;
  }
  [[nodiscard]] std::vector<int32_t> encode(const std::string& text) const {
    return tokenizer_->encode(text, {.parse_special = true}).value();
  }
  std::unique_ptr<Tokenizer> tokenizer_;
  std::unique_ptr<ChatTemplate> chat_;
};

TEST_F(Chat, RendersTheModelsOwnTemplate) {
  EXPECT_FALSE(chat_->is_fallback());
  const std::vector<ChatMessage> messages = {{"system", "Be brief."}, {"user", "Hi"}};
  EXPECT_EQ(chat_->render(messages, true).value(),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n");
  EXPECT_EQ(chat_->render({}, true).code(), Code::kInvalidArgument);
}

TEST_F(Chat, ANewTurnOnlyAppends) {
  const std::vector<ChatMessage> first = {{"system", "Be brief."}, {"user", "Hi"}};
  std::vector<int32_t> chain = encode(chat_->render(first, true).value());
  for (const int32_t token : encode("Hello there.<|im_end|>")) chain.push_back(token);
  const std::string next = chat_->render_next({"user", "Who are you?"}, true).value();
  for (const int32_t token : encode(next)) chain.push_back(token);

  const std::vector<ChatMessage> whole = {
      first[0], first[1], {"assistant", "Hello there."}, {"user", "Who are you?"}};
  EXPECT_EQ(chain, encode(chat_->render(whole, true).value()));
  // A reply that was cut short is ended by the next turn.
  EXPECT_EQ(chat_->render_next({"user", "Who are you?"}, false).value(), "<|im_end|>" + next);
}

TEST_F(Chat, WhatTheTemplateDoesToRepliesDoesNotMatter) {
  // Trims replies and drops what they thought, as reasoning models' templates do.
  const auto chat = create(
      "{% for m in messages %}{% if m.role == 'assistant' %}[A]{{ m.content.split('</think>')[-1] "
      "| trim }}<|im_end|>{% else %}[U]{{ m.content }}{% endif %}{% endfor %}"
      "{% if add_generation_prompt %}[A]{% endif %}");
  ASSERT_NE(chat, nullptr);
  EXPECT_EQ(chat->render_next({"user", "Next"}, true).value(), "[U]Next[A]");
  EXPECT_EQ(chat->render_next({"user", "Next"}, false).value(), "<|im_end|>[U]Next[A]");
}

TEST_F(Chat, TemplateErrorsAreStatuses) {
  EXPECT_EQ(ChatTemplate::create(*tokenizer_, "{% for %}").code(), Code::kInvalidArgument);
  const auto chat = create("{{ raise_exception('only users may speak') }}");
  ASSERT_NE(chat, nullptr);
  const std::vector<ChatMessage> messages = {{"user", "Hi"}};
  const auto text = chat->render(messages, true);
  EXPECT_EQ(text.code(), Code::kInvalidArgument);
  EXPECT_NE(text.status().message().find("only users may speak"), std::string::npos);
  EXPECT_EQ(chat->render_next({"user", "Hi"}, true).code(), Code::kInvalidArgument);
}

TEST_F(Chat, BosIsWrittenOnce) {
  EXPECT_TRUE(chat_->add_special("anything"));  // this vocabulary adds none by itself
}

// Where each message of a conversation begins, and nowhere else.
TEST_F(Chat, MessagesBeginBehindThoseThatEnded) {
  const std::vector<std::string> parts = {"<|im_start|>system\nBe brief.<|im_end|>\n",
                                          "<|im_start|>user\nTell me of\n\nships<|im_end|>\n",
                                          "<|im_start|>assistant\nThey float.<|im_end|>\n",
                                          "<|im_start|>user\nWhy?<|im_end|>\n",
                                          "<|im_start|>assistant\n"};
  std::string text;
  std::vector<int64_t> begins;
  for (const std::string& part : parts) {
    begins.push_back(static_cast<int64_t>(encode(text).size()));
    text += part;
  }
  const std::vector<int32_t> tokens = encode(text);
  const auto length = static_cast<int64_t>(tokens.size());
  for (int64_t from = 1; from <= length; ++from) {
    const auto next = std::lower_bound(begins.begin(), begins.end(), from);
    EXPECT_EQ(next_message(*tokenizer_, tokens, from), next == begins.end() ? -1 : *next) << from;
  }
  // Not beyond the end, and not in text without messages.
  EXPECT_EQ(next_message(*tokenizer_, std::span(tokens).first(static_cast<size_t>(begins[2])),
                         begins[1] + 1),
            -1);
  EXPECT_EQ(next_message(*tokenizer_, encode("Ships float.\n\nWhy?"), 0), -1);
}

TEST(ChatFallback, ChatmlWhereTheFileHasNoTemplate) {
  const test::TempFile file(test::tiny_vocab());
  auto tokenizer = Tokenizer::load(file.path());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  auto chat = ChatTemplate::create(**tokenizer);
  ASSERT_TRUE(chat.ok()) << chat.status().to_string();
  EXPECT_TRUE(chat.value()->is_fallback());
  const std::vector<ChatMessage> messages = {{"user", "Hi"}};
  EXPECT_EQ(chat.value()->render(messages, true).value(),
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

TEST(ChatFallback, BosOfTheTemplateIsNotDoubled) {
  const test::Gguf ctx = test::tiny_vocab();
  gguf_set_val_bool(ctx.get(), "tokenizer.ggml.add_bos_token", true);
  const test::TempFile file(ctx);
  auto tokenizer = Tokenizer::load(file.path());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().to_string();
  auto chat = ChatTemplate::create(**tokenizer);
  ASSERT_TRUE(chat.ok());
  EXPECT_TRUE(chat.value()->add_special("Hi"));
  EXPECT_FALSE(chat.value()->add_special("<|im_end|>Hi"));
}

}  // namespace
}  // namespace hcache::model
