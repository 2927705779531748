// Text that a request marks as volatile is read at the end of the last turn, whatever the protocol.
#include <gtest/gtest.h>

#include <functional>

#include "api/request.h"
#include "api_testing.h"

namespace hcache::api {
namespace {

using test::json;
using Messages = std::vector<std::string>;

// "role: content" of each message.
Messages said(const Result<model::ChatInput>& chat) {
  if (!chat.ok()) return {chat.status().to_string()};
  Messages out;
  for (const auto& message : chat->messages) out.push_back(message.role + ": " + message.content);
  return out;
}

Messages chat_of(const std::string& body) { return said(parse_apply_template(json(body))); }

Result<model::ChatInput> chat_in(Result<GenerationRequest> request) {
  if (!request.ok()) return request.status();
  return *std::move(request->chat);
}
Messages response_of(const std::string& body) { return said(chat_in(parse_response(json(body)))); }
Messages anthropic_of(const std::string& body) {
  const Messages counted = said(parse_count_tokens(json(body)));
  EXPECT_EQ(said(chat_in(parse_messages(json(body)))), counted);
  return counted;
}

#define VOLATILE R"("cache_control": {"type": "volatile"})"

TEST(VolatileText, OfAChatGoesToTheEndOfTheLastUsersMessage) {
  const std::string system =
      R"({"role": "system", "content": [{"type": "text", "text": "Be brief."},
          {"type": "text", "text": "It is noon.", )" VOLATILE
      R"(}, {"type": "text", "text": "Be kind."}]})";
  EXPECT_EQ(chat_of(R"({"messages": [)" + system + R"(, {"role": "user", "content": "Hi"}]})"),
            (Messages{"system: Be brief.\nBe kind.", "user: Hi\n\nIt is noon."}));
  const std::string later = R"({"messages": [)" + system + R"(, {"role": "user", "content": "Hi"},
      {"role": "assistant", "content": "Ho"},
      {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]})";
  EXPECT_EQ(chat_of(later), (Messages{"system: Be brief.\nBe kind.", "user: Hi", "assistant: Ho",
                                      "user: a\nb\n\nIt is noon."}));
  EXPECT_EQ(said(chat_in(parse_chat_completion(json(later)))), chat_of(later));
  // An answer that goes on stays the last.
  EXPECT_EQ(chat_of(R"({"messages": [)" + system + R"(, {"role": "user", "content": "Hi"},
                        {"role": "assistant", "content": "Ho"}]})")
                .at(1),
            "user: Hi\n\nIt is noon.");
}

TEST(VolatileText, SeveralStayInTheirOrder) {
  EXPECT_EQ(chat_of(R"({"messages": [
      {"role": "system", "content": [{"type": "text", "text": "1", )" VOLATILE R"(}]},
      {"role": "user", "content": [{"type": "text", "text": "2", )" VOLATILE
                    R"(}, {"type": "text", "text": "a"}]},
      {"role": "assistant", "content": "b"},
      {"role": "user", "content": [{"type": "text", "text": "3", )" VOLATILE
                    R"(}, {"type": "text", "text": "c"}]}]})"),
            (Messages{"user: a", "assistant: b", "user: c\n\n1\n\n2\n\n3"}));
  // A message that is nothing else.
  EXPECT_EQ(
      chat_of(
          R"({"messages": [{"role": "user", "content": [{"type": "text", "text": "1", )" VOLATILE
          R"(}, {"type": "text", "text": "2", )" VOLATILE R"(}]}]})"),
      Messages{"user: 1\n\n2"});
}

TEST(VolatileText, GoesBehindTheResultOfATool) {
  const std::string system =
      R"({"role": "system", "content": [{"type": "text", "text": "noon", )" VOLATILE R"(}]})";
  const std::string call = R"({"role": "assistant", "content": "", "tool_calls": [
      {"id": "1", "function": {"name": "f", "arguments": "{}"}}]})";
  EXPECT_EQ(chat_of(R"({"messages": [)" + system + R"(, {"role": "user", "content": "a"}, )" +
                    call + R"(, {"role": "tool", "tool_call_id": "1", "content": "r"}]})"),
            (Messages{"user: a", "assistant: ", "tool: r\n\nnoon"}));
  EXPECT_EQ(response_of(R"({"input": [
      {"role": "developer", "content": [{"type": "input_text", "text": "noon", )" VOLATILE R"(}]},
      {"role": "user", "content": "a"},
      {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "1", "output": "r"}]})"),
            (Messages{"user: a", "assistant: ", "tool: r\n\nnoon"}));
  // Anthropic's results stand in a user's message, whose text comes behind them.
  EXPECT_EQ(anthropic_of(R"({"max_tokens": 1, "system": [{"type": "text", "text": "s"},
      {"type": "text", "text": "noon", )" VOLATILE R"(}], "messages": [
      {"role": "user", "content": "a"},
      {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
          {"type": "text", "text": "r"}, {"type": "text", "text": "late", )" VOLATILE R"(}]}]}]})"),
            (Messages{"system: s", "user: a", "assistant: ", "tool: r", "user: noon\n\nlate"}));
}

TEST(VolatileText, OfOtherProtocols) {
  EXPECT_EQ(
      anthropic_of(R"({"max_tokens": 1, "system": [{"type": "text", "text": "noon", )" VOLATILE
                   R"(}], "messages": [{"role": "user", "content": [
      {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]})"),
      Messages{"user: a\n\nnoon"});
  EXPECT_EQ(response_of(R"({"instructions": "i", "input": [
      {"role": "user", "content": [{"type": "input_text", "text": "noon", )" VOLATILE
                        R"(}, {"type": "input_text", "text": "a"}]},
      {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]})"),
            (Messages{"system: i", "user: a", "assistant: b", "user: c\n\nnoon"}));
  // What a conversation keeps is what the model read.
  const auto r = parse_response(json(R"({"conversation": "conv_1", "input": [
      {"role": "system", "content": [{"type": "input_text", "text": "noon", )" VOLATILE R"(}]},
      {"role": "user", "content": "a"}]})"));
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->input_items, std::vector<Json>{json(R"({"role": "user", "content": "a\n\nnoon"})")});
}

TEST(VolatileText, StaysWhereThereIsNoTurnToReadItIn) {
  EXPECT_EQ(chat_of(R"({"messages": [{"role": "system", "content": [{"type": "text", "text": "s"},
                        {"type": "text", "text": "noon", )" VOLATILE R"(}]}]})"),
            Messages{"system: s\nnoon"});
}

TEST(VolatileText, OtherMarksDoNothing) {
  for (const char* mark :
       {R"({"type": "ephemeral"})", R"({"type": "ephemeral", "ttl": "1h"})", "null", "5",
        R"("volatile")", R"({"type": 1})", "{}", R"({"type": "other"})"}) {
    const std::string part =
        std::string(R"({"type": "text", "text": "s", "cache_control": )") + mark + "}";
    EXPECT_EQ(chat_of(R"({"messages": [{"role": "system", "content": [)" + part +
                      R"(]}, {"role": "user", "content": "a"}]})"),
              (Messages{"system: s", "user: a"}))
        << mark;
  }
  // The assistant's words are its own.
  EXPECT_EQ(chat_of(R"({"messages": [{"role": "user", "content": "a"}, {"role": "assistant",
      "content": [{"type": "text", "text": "b", )" VOLATILE
                    R"(}]}, {"role": "user", "content": "c"}]})"),
            (Messages{"user: a", "assistant: b", "user: c"}));
}

TEST(VolatileText, WhatIsWrongIsStillRefused) {
  const auto refused = [](const std::string& body) {
    const auto r = parse_chat_completion(json(body));
    EXPECT_EQ(r.code(), Code::kInvalidArgument) << body;
    return r.status().message();
  };
  const std::string marked =
      R"({"role": "system", "content": [{"type": "text", "text": "s", )" VOLATILE R"(}]})";
  EXPECT_EQ(refused(R"({"messages": [)" + marked + R"(, {"role": "user", "content": 5}]})"),
            "messages[1].content: expected a string or an array of parts, got a number");
  EXPECT_EQ(refused(R"({"messages": [)" + marked + R"(, {"role": "user"}]})"),
            "messages[1].content: missing");
  EXPECT_EQ(refused(R"({"messages": [)" + marked + R"(, 5]})"),
            "messages[1]: expected an object, got a number");
  EXPECT_EQ(
      refused(
          R"({"messages": [{"role": "system", "content": [{"type": "image", "text": "s", )" VOLATILE
          R"(}]}, {"role": "user", "content": "a"}]})"),
      "messages[0].content[0].source: missing");
}

}  // namespace
}  // namespace hcache::api
