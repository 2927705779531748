// Pictures and sounds in the requests of every protocol.
#include <gmock/gmock.h>

#include "api/request.h"
#include "api_testing.h"

namespace hcache::api {
namespace {

using test::json;

constexpr std::string_view kMarker = model::kMediaMarker;

std::string with_marker(const std::string& before, const std::string& behind) {
  return before + std::string(kMarker) + behind;
}

using Parse = Result<GenerationRequest> (*)(const Json&, const Defaults&);

GenerationRequest good(Parse parse, const std::string& body) {
  auto r = parse(json(body), {});
  EXPECT_TRUE(r.ok()) << r.status().to_string() << " in " << body;
  return r.value_or({});
}

std::string refused(Parse parse, const std::string& body) {
  const auto r = parse(json(body), {});
  EXPECT_EQ(r.code(), Code::kInvalidArgument) << body;
  return r.status().message();
}

std::string bytes(const model::Medium& medium) { return medium.bytes ? *medium.bytes : "none"; }

TEST(MediaRequests, OpenAiChat) {
  const auto r = good(parse_chat_completion, R"({"messages": [
      {"role": "user", "content": [
        {"type": "text", "text": "One"}, {"type": "text", "text": "line"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,UE5H"}},
        {"type": "text", "text": "and"},
        {"type": "input_audio", "input_audio": {"data": "V0FW", "format": "wav"}},
        {"type": "image_url", "image_url": "file://a/b.png"}]}]})");
  const model::ChatMessage& m = r.chat->messages.at(0);
  EXPECT_EQ(m.content,
            with_marker("One\nline", "and" + std::string(kMarker) + std::string(kMarker)));
  ASSERT_EQ(m.media.size(), 3U);
  EXPECT_EQ(bytes(m.media[0]), "PNG");
  EXPECT_EQ(bytes(m.media[1]), "WAV");
  EXPECT_EQ(m.media[2].name, "a/b.png");
}

TEST(MediaRequests, OpenAiResponses) {
  const auto r = good(parse_response, R"({"input": [
      {"role": "user", "content": [{"type": "input_text", "text": "See"},
        {"type": "input_image", "image_url": "data:image/jpeg;base64,SlBH"}]},
      {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "1", "output": [
        {"type": "input_image", "image_url": "data:image/png;base64,UE5H"}]}]})");
  ASSERT_EQ(r.chat->messages.size(), 3U);
  EXPECT_EQ(r.chat->messages[0].content, with_marker("See", ""));
  EXPECT_EQ(bytes(r.chat->messages[0].media.at(0)), "JPG");
  EXPECT_EQ(r.chat->messages[2].content, with_marker("", ""));
  EXPECT_EQ(bytes(r.chat->messages[2].media.at(0)), "PNG");
}

TEST(MediaRequests, Anthropic) {
  const auto r = good(parse_messages, R"({"max_tokens": 5, "messages": [
      {"role": "user", "content": [{"type": "text", "text": "See"},
        {"type": "image", "cache_control": {"type": "ephemeral"},
         "source": {"type": "base64", "media_type": "image/png", "data": "UE5H"}},
        {"type": "text", "text": "this"}]},
      {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [
        {"type": "image", "source": {"type": "url", "url": "data:image/gif;base64,R0lG"}}]}]}]})");
  ASSERT_EQ(r.chat->messages.size(), 3U);
  EXPECT_EQ(r.chat->messages[0].content, with_marker("See", "this"));
  EXPECT_EQ(bytes(r.chat->messages[0].media.at(0)), "PNG");
  EXPECT_EQ(bytes(r.chat->messages[2].media.at(0)), "GIF");
}

TEST(MediaRequests, Ollama) {
  const auto r = good(parse_ollama_chat, R"({"messages": [
      {"role": "user", "content": "What is it?", "images": ["UE5H", "SlBH"]}]})");
  const model::ChatMessage& m = r.chat->messages.at(0);
  EXPECT_EQ(m.content, std::string(kMarker) + with_marker("", "What is it?"));
  ASSERT_EQ(m.media.size(), 2U);
  EXPECT_EQ(bytes(m.media[1]), "JPG");
  const auto generate = [](const std::string& body) {
    auto g = parse_ollama_generate(json(body), {});
    EXPECT_TRUE(g.ok()) << g.status().to_string();
    return g.ok() ? std::move(g->generation) : GenerationRequest();
  };
  const auto asked = generate(R"({"prompt": "What?", "images": ["UE5H"]})");
  EXPECT_EQ(asked.chat->messages.back().content, with_marker("", "What?"));
  EXPECT_EQ(asked.chat->messages.back().media.size(), 1U);
  const auto raw = generate(R"({"prompt": "What?", "images": ["UE5H"], "raw": true})");
  EXPECT_EQ(std::get<std::string>(raw.prompts.at(0).parts.at(0)), with_marker("", "What?"));
  EXPECT_EQ(raw.prompts[0].media.size(), 1U);
  EXPECT_EQ(parse_ollama_generate(json(R"({"prompt": "a", "suffix": "b", "images": ["UE5H"]})"), {})
                .status()
                .message(),
            "images: can't be combined with a suffix");
}

TEST(MediaRequests, LlamaServer) {
  const auto r = good(parse_llama_completion, R"({"prompt":
      {"prompt_string": "See <__media__> and <__media__>", "multimodal_data": ["UE5H", "SlBH"]}})");
  EXPECT_EQ(std::get<std::string>(r.prompts.at(0).parts.at(0)),
            with_marker("See ", with_marker(" and ", "")));
  EXPECT_EQ(r.prompts[0].media.size(), 2U);
  // Without any, a marker is text.
  const auto text = good(parse_llama_completion,
                         R"({"prompt": {"prompt_string": "<__media__>", "multimodal_data": []}})");
  EXPECT_EQ(std::get<std::string>(text.prompts.at(0).parts.at(0)), "<__media__>");
}

TEST(MediaRequests, WhatIsWrongIsNamed) {
  const auto chat = [](const std::string& url) {
    return refused(parse_chat_completion, R"({"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": )" +
                                              url + "}}]}]}");
  };
  const std::string at = "messages[0].content[0].image_url.url: ";
  EXPECT_EQ(chat("5"), at + "expected a string, got a number");
  EXPECT_EQ(chat(R"("")"), at + "empty");
  EXPECT_EQ(chat(R"("https://example.org/a.png")"),
            at + "this server fetches nothing: send the file itself, as data:TYPE;base64,…");
  EXPECT_EQ(chat(R"("data:image/png,PNG")"), at + "expected data:TYPE;base64,…");
  EXPECT_EQ(chat(R"("data:image/png;base64,U~5H")"), at + "byte 1 of 4 is no base64");
  EXPECT_EQ(refused(parse_llama_completion,
                    R"({"prompt": {"prompt_string": "", "multimodal_data": ["!"]}})"),
            "prompt.multimodal_data[0]: byte 0 of 1 is no base64");
  EXPECT_EQ(refused(parse_messages, R"({"max_tokens": 5, "messages": [{"role": "user", "content": [
                {"type": "image", "source": {"type": "file"}}]}]})"),
            "messages[0].content[0].source.type: 'file' is none of base64, url");
}

}  // namespace
}  // namespace hcache::api
