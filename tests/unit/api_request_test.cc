#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "api/embeddings.h"
#include "api/request.h"
#include "api/rerank.h"
#include "api_testing.h"

namespace hcache::api {
namespace {

using test::json;
using test::with;

const char* const kChat = R"({"messages": [{"role": "user", "content": "Hi"}]})";
const char* const kText = R"({"prompt": "Once"})";
const char* const kResponse = R"({"input": "Hi"})";
const char* const kMessages =
    R"({"max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]})";
const char* const kTool =
    R"("tools": [{"type": "function", "function": {"name": "f", "description": "d",
        "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}}])";

struct Parser {
  const char* base;
  std::function<Result<GenerationRequest>(const Json&)> parse;
};
const Parser kAll[] = {{kChat, [](const Json& j) { return parse_chat_completion(j); }},
                       {kText, [](const Json& j) { return parse_completion(j); }},
                       {kResponse, [](const Json& j) { return parse_response(j); }},
                       {kMessages, [](const Json& j) { return parse_messages(j); }},
                       {kText, [](const Json& j) { return parse_llama_completion(j); }}};
const Parser& chat() { return kAll[0]; }
const Parser& completion() { return kAll[1]; }
const Parser& response() { return kAll[2]; }
const Parser& messages() { return kAll[3]; }
const Parser& llama() { return kAll[4]; }

GenerationRequest good(const Parser& parser, const std::string& patch) {
  auto request = parser.parse(with(json(parser.base), patch));
  EXPECT_TRUE(request.ok()) << patch << ": " << request.status().to_string();
  return request.ok() ? *std::move(request) : GenerationRequest();
}

void bad(const Parser& parser, const std::string& patch, const std::string& message) {
  const auto request = parser.parse(with(json(parser.base), patch));
  EXPECT_EQ(request.code(), Code::kInvalidArgument) << patch;
  EXPECT_EQ(request.status().message(), message) << patch;
}

TEST(Requests, TruncationIsAskedForInAllDialects) {
  for (const Parser& p : kAll) {
    EXPECT_FALSE(good(p, "{}").truncate.has_value());
    EXPECT_EQ(good(p, R"({"truncation": "auto"})").truncate, true);
    EXPECT_EQ(good(p, R"({"truncation": "disabled"})").truncate, false);
  }
  bad(chat(), R"({"truncation": "always"})", "truncation: 'always' is none of auto, disabled");
}

TEST(Requests, AnthropicEditsOfTheContextAskForTruncation) {
  const std::string edit =
      R"("context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {}}]})";
  EXPECT_EQ(good(messages(), "{" + edit + "}").truncate, true);
  EXPECT_TRUE(good(messages(), "{" + edit + "}").edits_context);
  EXPECT_EQ(good(messages(), "{" + edit + R"(, "truncation": "disabled"})").truncate, false);
  for (const char* none : {"null", "{}", R"({"edits": []})"}) {
    const auto r = good(messages(), fmt::format(R"({{"context_management": {}}})", none));
    EXPECT_FALSE(r.truncate.has_value());
    EXPECT_FALSE(r.edits_context);
  }
  EXPECT_FALSE(good(chat(), "{" + edit + "}").truncate.has_value());
  bad(messages(), R"({"context_management": {"edits": [{}]}})",
      "context_management.edits[0].type: missing");
  bad(messages(), R"({"context_management": {"edits": 1}})",
      "context_management.edits: expected an array, got a number");
}

TEST(Requests, SamplingIsTheSameInAllDialects) {
  for (const Parser& p : kAll) {
    EXPECT_EQ(good(p, R"({"temperature": 0})").sampling.temperature, 0);
    EXPECT_EQ(good(p, R"({"temperature": null})").sampling.temperature, 0.8F);
    EXPECT_EQ(good(p, R"({"top_p": 0.5})").sampling.top_p, 0.5F);
    EXPECT_GT(good(p, R"({"top_p": 0})").sampling.top_p, 0);
    EXPECT_EQ(good(p, R"({"top_k": 7})").sampling.top_k, 7);
    EXPECT_EQ(good(p, R"({"top_k": -1})").sampling.top_k, 0);
    EXPECT_EQ(good(p, R"({"min_p": 0.25})").sampling.min_p, 0.25F);
    EXPECT_EQ(good(p, R"({"frequency_penalty": -1})").sampling.frequency_penalty, -1);
    EXPECT_EQ(good(p, R"({"presence_penalty": 2})").sampling.presence_penalty, 2);
    EXPECT_EQ(good(p, R"({"repeat_penalty": 1.5})").sampling.repeat_penalty, 1.5F);
    EXPECT_EQ(good(p, R"({"repetition_penalty": 1.5})").sampling.repeat_penalty, 1.5F);
    EXPECT_EQ(good(p, R"({"repeat_last_n": 5})").sampling.penalty_last_n, 5);
    EXPECT_GT(good(p, R"({"repeat_last_n": -1})").sampling.penalty_last_n, 1000);
    EXPECT_EQ(good(p, R"({"seed": 7})").seed, 7U);
    EXPECT_EQ(good(p, R"({"seed": 7.0})").seed, 7U);
    EXPECT_FALSE(good(p, R"({"seed": -1})").seed.has_value());
    EXPECT_FALSE(good(p, "{}").seed.has_value());
    EXPECT_NE(good(p, R"({"seed": 4294967301})").seed, 5U);
    const auto biases = good(p, R"({"logit_bias": {"15": -100, "2": false}})").sampling.logit_bias;
    ASSERT_EQ(biases.size(), 2U);
    EXPECT_EQ(biases[0], (std::pair<int32_t, float>(15, -100)));
    EXPECT_TRUE(biases[1].first == 2 && std::isinf(biases[1].second));
    EXPECT_EQ(good(p, R"({"logit_bias": [[3, 1.5]]})").sampling.logit_bias[0].second, 1.5F);
    EXPECT_EQ(good(p, R"({"grammar": "root ::= \"a\""})").sampling.grammar, "root ::= \"a\"");
    EXPECT_TRUE(good(p, R"({"ignore_eos": true})").ignore_eos);
  }
}

TEST(Requests, WrongSamplingIsNamed) {
  for (const Parser& p : kAll) {
    bad(p, R"({"temperature": "hot"})", "temperature: expected a number, got a string");
    bad(p, R"({"temperature": -1})",
        "temperature: -1 is out of range, it must be between 0 and 100");
    bad(p, R"({"top_p": 1.5})", "top_p: 1.5 is out of range, it must be between 0 and 1");
    bad(p, R"({"top_k": 1.5})", "top_k: expected an integer, got 1.5");
    bad(p, R"({"top_k": -2})", "top_k: -2 is out of range, it must be between -1 and 2147483647");
    bad(p, R"({"min_p": true})", "min_p: expected a number, got a boolean");
    bad(p, R"({"repeat_penalty": 0})",
        "repeat_penalty: 0 is out of range, it must be between 0.01 and 100");
    bad(p, R"({"seed": "x"})", "seed: expected an integer, got a string");
    EXPECT_EQ(good(p, R"({"logit_bias": {" x": 1}})").text_bias,
              (std::vector<std::pair<std::string, float>>{{" x", 1.0F}}));
    EXPECT_EQ(good(p, R"({"logit_bias": [["7", false]]})").text_bias[0].first, "7");
    bad(p, R"({"logit_bias": {"1": true}})",
        "logit_bias.1: expected a number or false, got a boolean");
    bad(p, R"({"logit_bias": [[1]]})", "logit_bias[0]: expected [token, bias]");
    bad(p, R"({"logit_bias": [[-1, 1]]})", "logit_bias[0][0]: -1 is no token id");
    bad(p, R"({"logit_bias": 1})", "logit_bias: expected an object, got a number");
    bad(p, R"({"json_schema": "x"})", "json_schema: expected an object, got a string");
    bad(p, R"({"json_schema": {}, "grammar": "g"})", "grammar: can't be combined with json_schema");
    bad(p, R"({"ignore_eos": 1})", "ignore_eos: expected a boolean, got a number");
  }
}

TEST(Requests, NamesAndCacheOfAllDialects) {
  for (const Parser& p : kAll) {
    const GenerationRequest r =
        good(p, R"({"model": "m", "stream": true, "session_id": "s", "cache_salt": "c", "user": "u",
               "prompt_cache_key": "k", "prompt_cache_retention": "24h", "priority": -3,
               "cache_prompt": false, "speculative.n_max": 7, "unknown": {"x": []}})");
    EXPECT_EQ(r.model_name, "m");
    EXPECT_EQ(r.max_draft, 7);
    EXPECT_TRUE(r.stream);
    EXPECT_EQ(r.session_id, "s");
    EXPECT_EQ(r.cache_salt, "c");
    EXPECT_EQ(r.user, "u");
    EXPECT_EQ(r.cache_key, "k");
    EXPECT_EQ(r.retention, Retention::kDay);
    EXPECT_EQ(r.priority, -3);
    EXPECT_FALSE(r.use_cache);
    EXPECT_EQ(good(p, R"({"prompt_cache_retention": "in_memory"})").retention, Retention::kMemory);
    EXPECT_EQ(good(p, "{}").retention, Retention::kDefault);
    bad(p, R"({"prompt_cache_retention": "1y"})",
        "prompt_cache_retention: '1y' is none of in_memory, in-memory, 24h");
    bad(p, R"({"stream": "yes"})", "stream: expected a boolean, got a string");
    bad(p, R"({"priority": 101})",
        "priority: 101 is out of range, it must be between -100 and 100");
    bad(p, "{\"cache_salt\": \"" + std::string(513, 'x') + "\"}",
        "cache_salt: 513 bytes are too many, at most 512 are allowed");
  }
}

TEST(Requests, TheBodyMustBeAnObject) {
  for (const Parser& p : kAll) {
    EXPECT_EQ(p.parse(json("[]")).status().message(), "the body: expected an object, got an array");
  }
}

TEST(Requests, DefaultsAreTheServers) {
  model::SamplingOptions defaults;
  defaults.temperature = 0.3F;
  defaults.top_k = 5;
  const auto r = parse_chat_completion(with(json(kChat), R"({"top_k": 9})"), defaults);
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->sampling.temperature, 0.3F);
  EXPECT_EQ(r->sampling.top_k, 9);
}

TEST(Requests, LimitsAndStops) {
  EXPECT_EQ(good(chat(), "{}").max_tokens, -1);
  EXPECT_EQ(good(chat(), R"({"max_tokens": 5})").max_tokens, 5);
  EXPECT_EQ(good(chat(), R"({"max_tokens": 5, "max_completion_tokens": 6})").max_tokens, 6);
  EXPECT_EQ(good(completion(), R"({"max_tokens": 5})").max_tokens, 5);
  EXPECT_EQ(good(response(), R"({"max_output_tokens": 5})").max_tokens, 5);
  EXPECT_EQ(good(messages(), R"({"max_tokens": 5})").max_tokens, 5);
  EXPECT_EQ(good(llama(), R"({"n_predict": -1})").max_tokens, -1);
  bad(chat(), R"({"max_tokens": -2})",
      "max_tokens: -2 is out of range, it must be between -1 and 2147483647");
  EXPECT_EQ(good(chat(), R"({"stop": "a"})").stop, std::vector<std::string>{"a"});
  EXPECT_EQ(good(messages(), R"({"stop_sequences": ["a", "", "b"]})").stop,
            (std::vector<std::string>{"a", "b"}));
  bad(llama(), R"({"stop": [1]})", "stop[0]: expected a string, got a number");
  bad(chat(), R"({"stop": {}})", "stop: expected a string or an array of strings, got an object");
  Json many = json(kChat);
  many["stop"] = std::vector<std::string>(65, "x");
  EXPECT_EQ(parse_chat_completion(many).status().message(), "stop: more than 64 strings");
}

TEST(Chat, Messages) {
  const GenerationRequest r = good(chat(), R"({"messages": [
      {"role": "system", "content": "s"},
      {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
      {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
        {"id": "2", "function": {"name": "g", "arguments": {"y": 2}}}]},
      {"role": "tool", "tool_call_id": "1", "name": "f", "content": "r"}]})");
  ASSERT_TRUE(r.chat.has_value());
  const auto& m = r.chat->messages;
  ASSERT_EQ(m.size(), 4U);
  EXPECT_EQ(m[0].role, "system");
  EXPECT_EQ(m[1].content, "a\nb");
  EXPECT_EQ(m[2].content, "");
  EXPECT_EQ(m[2].reasoning, "hm");
  ASSERT_EQ(m[2].tool_calls.size(), 2U);
  EXPECT_EQ(m[2].tool_calls[0], (model::ToolCall{"1", "f", "{\"x\": 1}"}));
  EXPECT_EQ(m[2].tool_calls[1].arguments, "{\"y\":2}");
  EXPECT_EQ(m[3].tool_call_id, "1");
  EXPECT_EQ(m[3].name, "f");
}

TEST(Chat, TheAnswerGoesOnWithTheAssistantsLastMessage) {
  const std::string parts = R"([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])";
  const std::string user = R"({"role": "user", "content": )" + parts + "}";
  const std::string begun = R"({"role": "assistant", "content": )" + parts + "}";
  const auto of = [](const std::string& messages, const std::string& more = "") {
    return R"({"messages": [)" + messages + "]" + more + "}";
  };
  const auto chat_of = [&](const std::string& messages, const std::string& more = "") {
    return *good(chat(), of(messages, more)).chat;
  };
  EXPECT_EQ(chat_of(user + "," + begun).messages[0].content, "a\nb");
  EXPECT_EQ(chat_of(user + "," + begun).messages[1].content, "a\n\nb");
  EXPECT_EQ(chat_of(user + "," + begun + "," + user).messages[1].content, "a\nb");
  EXPECT_TRUE(chat_of(user).begins_reply);
  EXPECT_FALSE(chat_of(user, R"(, "add_generation_prompt": false)").begins_reply);
  chat_of(user + "," + begun, R"(, "continue_final_message": true)");
  bad(chat(), of(user, R"(, "continue_final_message": true)"),
      "continue_final_message: the last message is not the assistant's");
  bad(chat(), of(user, R"(, "continue_final_message": true, "add_generation_prompt": true)"),
      "continue_final_message: excludes add_generation_prompt");
  bad(chat(), of(user + "," + begun + "," + begun),
      "messages: two messages of the assistant's at the end: the answer can go on with one");
}

TEST(Chat, WrongMessagesAreNamed) {
  const auto wrong = [](const std::string& messages, const std::string& message) {
    bad(chat(), "{\"messages\": " + messages + "}", message);
  };
  wrong("null", "messages: missing");
  wrong("{}", "messages: expected an array, got an object");
  wrong("[]", "messages: empty");
  wrong("[3]", "messages[0]: expected an object, got a number");
  wrong("[{}]", "messages[0].role: missing");
  wrong(R"([{"role": "king", "content": ""}])",
        "messages[0].role: 'king' is none of system, developer, user, assistant, tool");
  wrong(R"([{"role": "user"}])", "messages[0].content: missing");
  wrong(R"([{"role": "user", "content": 3}])",
        "messages[0].content: expected a string or an array of parts, got a number");
  wrong(R"([{"role": "user", "content": "x"}, {"role": "user", "content": [{"type": "text"}]}])",
        "messages[1].content[0].text: missing");
  wrong(R"([{"role": "user", "content": [{"type": "text", "text": 5}]}])",
        "messages[0].content[0].text: expected a string, got a number");
  wrong(R"([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])",
        "messages[0].content[0].image_url.url: base64 of 1 digits is cut short");
  wrong(R"([{"role": "user", "content": [{"type": "input_audio"}]}])",
        "messages[0].content[0].input_audio: missing");
  wrong(R"([{"role": "user", "content": [{"type": "video"}]}])",
        "messages[0].content[0].type: parts of type 'video' are not supported here");
  wrong(R"([{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}])",
        "messages[0].tool_calls: only the assistant calls tools");
  wrong(R"([{"role": "assistant", "tool_calls": [{"function": {}}]}])",
        "messages[0].tool_calls[0].function.name: missing");
  wrong(R"([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]}])",
        "messages[0].tool_calls[0].function.arguments: expected a string, got a number");
}

TEST(Chat, Tools) {
  const GenerationRequest r = good(chat(), std::string("{") + kTool + "}");
  ASSERT_EQ(r.chat->tools.size(), 1U);
  EXPECT_EQ(r.chat->tools[0].name, "f");
  EXPECT_EQ(r.chat->tools[0].description, "d");
  // The order of the properties is kept.
  EXPECT_EQ(r.chat->tools[0].parameters, R"({"type":"object","properties":{"b":{},"a":{}}})");
  EXPECT_EQ(r.chat->tool_choice, model::ToolChoice::kAuto);
  EXPECT_TRUE(r.chat->parallel_tool_calls);
  const auto choose = [](const std::string& choice) {
    return *good(chat(), std::string("{") + kTool + ", \"tool_choice\": " + choice + "}").chat;
  };
  EXPECT_EQ(choose("\"none\"").tool_choice, model::ToolChoice::kNone);
  EXPECT_EQ(choose("\"required\"").tool_choice, model::ToolChoice::kRequired);
  const auto named = choose(R"({"type": "function", "function": {"name": "f"}})");
  EXPECT_EQ(named.tool_choice, model::ToolChoice::kRequired);
  EXPECT_EQ(named.only_tool, "f");
  EXPECT_FALSE(good(chat(), R"({"parallel_tool_calls": false})").chat->parallel_tool_calls);

  bad(chat(), R"({"tools": [{"type": "function"}]})", "tools[0].function: missing");
  bad(chat(), R"({"tools": [{"type": "web_search"}]})",
      "tools[0].type: 'web_search' is none of function");
  bad(chat(), R"({"tools": [{"function": {"name": "a b"}}]})",
      "tools[0].function.name: must be 1 to 128 letters, digits or any of _-.:/");
  bad(chat(), R"({"tools": [{"function": {"name": "f", "parameters": []}}]})",
      "tools[0].function.parameters: expected an object, got an array");
  bad(chat(), R"({"tool_choice": "perhaps"})",
      "tool_choice: must be auto, none, required or an object that names a function");
  bad(chat(), R"({"tool_choice": "required"})",
      "tool_choice: requires a tool, but there are no tools");
  bad(chat(),
      std::string("{") + kTool +
          R"(, "tool_choice": {"type": "function", "function": {"name": "g"}}})",
      "tool_choice: there is no tool 'g'");
  bad(chat(), std::string("{") + kTool + R"(, "grammar": "g"})",
      "grammar: can't be combined with tools or a JSON schema");
}

TEST(Chat, FormatsAndLogprobs) {
  const auto schema = [](const std::string& format) {
    return good(chat(), "{\"response_format\": " + format + "}").chat->json_schema;
  };
  EXPECT_EQ(schema(R"({"type": "text"})"), "");
  EXPECT_EQ(schema(R"({"type": "json_object"})"), R"({"type":"object"})");
  EXPECT_EQ(schema(R"({"type": "json_schema", "json_schema": {"name": "n", "strict": true,
                       "schema": {"type": "array"}}})"),
            R"({"type":"array"})");
  EXPECT_EQ(schema(R"({"type": "json_object", "schema": {"type": "array"}})"),
            R"({"type":"array"})");
  EXPECT_EQ(good(chat(), R"({"json_schema": {"type": "array"}})").chat->json_schema,
            R"({"type":"array"})");
  bad(chat(), R"({"response_format": {"type": "xml"}})",
      "response_format.type: 'xml' is none of text, json_object, json_schema");
  bad(chat(), R"({"response_format": {}})", "response_format.type: missing");
  bad(chat(), R"({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}})",
      "response_format.json_schema.schema: expected an object, got a number");

  const GenerationRequest r = good(chat(), R"({"logprobs": true, "top_logprobs": 3, "n": 2})");
  EXPECT_TRUE(r.logprobs);
  EXPECT_EQ(r.top_logprobs, 3);
  EXPECT_EQ(r.n, 2);
  bad(chat(), R"({"top_logprobs": 3})", "top_logprobs: needs logprobs: true");
  bad(chat(), R"({"n": 0})", "n: 0 is out of range, it must be between 1 and 128");
  EXPECT_TRUE(good(chat(), R"({"stream_options": {"include_usage": true}})").include_usage);
}

TEST(Chat, TemplateVariables) {
  const auto args = [](const std::string& patch) { return *good(chat(), patch).chat; };
  EXPECT_TRUE(args("{}").thinking);
  EXPECT_FALSE(args(R"({"chat_template_kwargs": {"enable_thinking": false}})").thinking);
  EXPECT_FALSE(args(R"({"reasoning_effort": "none"})").thinking);
  EXPECT_EQ(args(R"({"reasoning_effort": "low"})").template_args.at("reasoning_effort"), "\"low\"");
  EXPECT_EQ(args(R"({"chat_template_kwargs": {"x": [1]}})").template_args.at("x"), "[1]");
  bad(chat(), R"({"chat_template_kwargs": {"enable_thinking": "no"}})",
      "chat_template_kwargs.enable_thinking: expected a boolean, got a string");
}

TEST(Completion, Prompts) {
  using Tokens = std::vector<int32_t>;
  const auto prompts = [](const std::string& prompt) {
    return good(completion(), "{\"prompt\": " + prompt + "}").prompts;
  };
  EXPECT_EQ(std::get<std::string>(prompts("\"a\"").at(0).parts.at(0)), "a");
  EXPECT_EQ(std::get<Tokens>(prompts("[1, 2]").at(0).parts.at(0)), (Tokens{1, 2}));
  EXPECT_EQ(prompts(R"(["a", "b"])").size(), 2U);
  EXPECT_EQ(std::get<Tokens>(prompts("[[1], [2, 3]]").at(1).parts.at(0)), (Tokens{2, 3}));
  const auto mixed = prompts(R"([7, "a", 8])");
  ASSERT_EQ(mixed.size(), 1U);
  EXPECT_EQ(mixed[0].parts.size(), 3U);
  bad(completion(), R"({"prompt": null})", "prompt: missing");
  bad(completion(), R"({"prompt": []})", "prompt: empty");
  bad(completion(), R"({"prompt": {}})", "prompt.prompt_string: missing");
  bad(completion(), R"({"prompt": [1, -2]})", "prompt[1]: -2 is no token id");
  bad(completion(), R"({"prompt": [[1], [true]]})",
      "prompt[1][0]: expected a token id, got a boolean");
  bad(completion(), R"({"prompt": [1, 1.5]})", "prompt[1]: expected a token id, got a number");
  Json many = json("{}");
  many["prompt"] = std::vector<std::string>(2049, "x");
  EXPECT_EQ(parse_completion(many).status().message(), "prompt: more than 2048 prompts");
}

TEST(Completion, Options) {
  const GenerationRequest r = good(completion(), R"({"logprobs": 0, "echo": false, "suffix": ""})");
  EXPECT_TRUE(r.logprobs);
  EXPECT_EQ(r.top_logprobs, 0);
  EXPECT_FALSE(good(completion(), "{}").logprobs);
  bad(completion(), R"({"echo": true})", "echo: giving the prompt back is not supported");
  bad(completion(), R"({"suffix": "x"})", "suffix: filling in is not supported");
  EXPECT_EQ(
      good(completion(), R"({"response_format": {"type": "json_object"}})").sampling.json_schema,
      R"({"type":"object"})");
}

TEST(Response, Items) {
  const GenerationRequest r = good(response(), R"({"instructions": "i", "store": false,
      "previous_response_id": "resp_1", "reasoning": {"effort": "low"}, "input": [
      {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
      {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
      {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
      {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
      {"type": "function_call_output", "call_id": "1", "output": "r"}]})");
  const auto& m = r.chat->messages;
  ASSERT_EQ(m.size(), 4U);
  EXPECT_EQ(m[0].role, "system");
  EXPECT_EQ(m[1].content, "a");
  // What the assistant thought, said and called is one message.
  EXPECT_EQ(m[2].reasoning, "hm");
  EXPECT_EQ(m[2].content, "b");
  EXPECT_EQ(m[2].tool_calls.at(0), (model::ToolCall{"1", "f", "{}"}));
  EXPECT_EQ(m[3].role, "tool");
  EXPECT_EQ(m[3].content, "r");
  EXPECT_EQ(r.previous_response_id, "resp_1");
  EXPECT_FALSE(r.store);
  EXPECT_EQ(good(response(), "{}").chat->messages.at(0).content, "Hi");

  bad(response(), R"({"input": []})", "input: empty");
  bad(response(), R"({"input": 3})", "input: expected a string or an array of items, got a number");
  bad(response(), R"({"input": [{"type": "computer_call"}]})",
      "input[0].type: 'computer_call' is none of message, function_call, function_call_output, "
      "reasoning");
  bad(response(), R"({"input": [{"role": "user", "content": [{"type": "input_image"}]}]})",
      "input[0].content[0].image_url: missing");
  bad(response(), R"({"input": [{"type": "function_call", "call_id": "1", "name": "f"}]})",
      "input[0].arguments: missing");
}

TEST(Response, GoesOnFromAConversation) {
  for (const char* named :
       {R"({"conversation": "conv_1"})", R"({"conversation": {"id": "conv_1"}})"}) {
    const GenerationRequest r = good(response(), named);
    EXPECT_EQ(r.conversation_id, "conv_1");
    EXPECT_EQ(r.input_items, std::vector<Json>{json(R"({"role": "user", "content": "Hi"})")});
  }
  const GenerationRequest r = good(response(), R"({"conversation": "c", "input": [
      {"role": "user", "content": "a"}, {"type": "reasoning"}]})");
  ASSERT_EQ(r.input_items.size(), 2U);
  EXPECT_EQ(r.input_items[1], json(R"({"type": "reasoning"})"));
  EXPECT_TRUE(good(response(), R"({"conversation": null})").input_items.empty());
  EXPECT_TRUE(good(response(), R"({"conversation": "c", "instructions": "i"})").instructed);
  EXPECT_FALSE(r.instructed);
  EXPECT_TRUE(good(response(), R"({"conversation": "c", "input": null})").chat->messages.empty());
  bad(response(), R"({"input": null})", "input: missing");
  bad(response(), R"({"conversation": ""})", "conversation: empty");
  bad(response(), R"({"conversation": 1})",
      "conversation: expected a string or an object with an id, got a number");
  bad(response(), R"({"conversation": {"name": "x"}})", "conversation.id: missing");
  bad(response(), R"({"conversation": "c", "previous_response_id": "r"})",
      "conversation: excludes previous_response_id");
  bad(response(), R"({"conversation": "c", "session_id": "s"})",
      "conversation: excludes session_id");
}

TEST(Response, ToolsAndFormat) {
  const GenerationRequest r =
      good(response(),
           R"({"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
          "tool_choice": {"type": "function", "name": "f"}, "top_logprobs": 2,
          "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "array"}}}})");
  EXPECT_EQ(r.chat->tools.at(0).parameters, R"({"type":"object"})");
  EXPECT_EQ(r.chat->only_tool, "f");
  EXPECT_EQ(r.chat->json_schema, R"({"type":"array"})");
  EXPECT_TRUE(r.logprobs);
  bad(response(), R"({"tools": [{"type": "web_search"}]})",
      "tools[0].type: 'web_search' is none of function");
}

TEST(Messages, Blocks) {
  const GenerationRequest r = good(messages(), R"({
      "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
      "messages": [
      {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
      {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "c"},
        {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}}]},
      {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "1", "is_error": true,
         "content": [{"type": "text", "text": "r"}]},
        {"type": "text", "text": "d"}]},
      {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "2"}]}]})");
  const auto& m = r.chat->messages;
  ASSERT_EQ(m.size(), 6U);
  EXPECT_EQ(m[0].content, "s");
  EXPECT_EQ(m[1].content, "a\nb");
  EXPECT_EQ(m[2].reasoning, "hm");
  EXPECT_EQ(m[2].content, "c");
  EXPECT_EQ(m[2].tool_calls.at(0), (model::ToolCall{"1", "f", "{\"x\":1}"}));
  EXPECT_EQ(m[3].role, "tool");
  EXPECT_EQ(m[3].tool_call_id, "1");
  EXPECT_EQ(m[3].content, "Error: r");
  EXPECT_EQ(m[4].role, "user");
  EXPECT_EQ(m[4].content, "d");
  EXPECT_EQ(m[5].role, "tool");

  bad(messages(), R"({"messages": []})", "messages: empty");
  bad(messages(), R"({"messages": [{"role": "user", "content": [{"type": "image"}]}]})",
      "messages[0].content[0].source: missing");
  bad(messages(), R"({"messages": [{"role": "user", "content": [{"type": "document"}]}]})",
      "messages[0].content[0].type: blocks of type 'document' are not supported");
  bad(messages(), R"({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]})",
      "messages[0].content[0].tool_use_id: missing");
  bad(messages(), R"({"system": 3})",
      "system: expected a string or an array of parts, got a number");
}

TEST(Messages, ToolsAndThinking) {
  const std::string tools = R"("tools": [{"name": "f", "input_schema": {"type": "object"}}])";
  const auto choose = [&](const std::string& choice) {
    return *good(messages(), "{" + tools + ", \"tool_choice\": " + choice + "}").chat;
  };
  EXPECT_EQ(choose(R"({"type": "any", "disable_parallel_tool_use": true})").tool_choice,
            model::ToolChoice::kRequired);
  EXPECT_FALSE(choose(R"({"type": "any", "disable_parallel_tool_use": true})").parallel_tool_calls);
  EXPECT_EQ(choose(R"({"type": "tool", "name": "f"})").only_tool, "f");
  EXPECT_EQ(choose(R"({"type": "none"})").tool_choice, model::ToolChoice::kNone);
  EXPECT_EQ(choose(R"({"type": "auto"})").tool_choice, model::ToolChoice::kAuto);
  EXPECT_EQ(choose(R"({"type": "auto"})").tools.at(0).parameters, R"({"type":"object"})");
  bad(messages(), "{" + tools + R"(, "tool_choice": {"type": "tool"}})",
      "tool_choice.name: missing");
  bad(messages(), R"({"tools": [{"type": "bash_20250124", "name": "bash"}]})",
      "tools[0].type: 'bash_20250124' is none of custom");
  EXPECT_FALSE(good(messages(), R"({"thinking": {"type": "disabled"}})").chat->thinking);
  EXPECT_TRUE(
      good(messages(), R"({"thinking": {"type": "enabled", "budget_tokens": 9}})").chat->thinking);
  EXPECT_EQ(good(messages(), R"({"metadata": {"user_id": "u"}})").user, "u");
}

TEST(Llama, Completion) {
  const GenerationRequest r =
      good(llama(),
           R"({"n_predict": 5, "n_probs": 2, "id_slot": 3, "return_tokens": true, "n_cmpl": 2})");
  EXPECT_EQ(r.max_tokens, 5);
  EXPECT_EQ(r.top_logprobs, 2);
  EXPECT_TRUE(r.logprobs);
  EXPECT_EQ(r.id_slot, 3);
  EXPECT_TRUE(r.return_tokens);
  EXPECT_EQ(r.n, 2);
}

TEST(Llama, Tokens) {
  const auto t = parse_tokenize(json(R"({"content": "a", "add_special": true, "with_pieces": true,
                                        "parse_special": false})"));
  ASSERT_TRUE(t.ok()) << t.status().to_string();
  EXPECT_TRUE(t->add_special && t->with_pieces && !t->parse_special);
  EXPECT_EQ(parse_tokenize(json("{}")).status().message(), "content: missing");
  EXPECT_EQ(parse_detokenize(json(R"({"tokens": [1, 2]})")).value(), (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(parse_detokenize(json(R"({"tokens": ["a"]})")).status().message(),
            "tokens[0]: expected a token id, got a string");
  const auto chat = parse_apply_template(json(kChat));
  ASSERT_TRUE(chat.ok());
  EXPECT_EQ(chat->messages.size(), 1U);
}

TEST(Embedding, Inputs) {
  const auto r = parse_embedding(json(R"({"input": ["a", "b"], "encoding_format": "base64"})"));
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->inputs.size(), 2U);
  EXPECT_TRUE(r->base64);
  EXPECT_EQ(parse_embedding(json(R"({"input": "a", "encoding_format": "hex"})")).status().message(),
            "encoding_format: 'hex' is none of float, base64");
}

TEST(Embedding, LlamaServersForms) {
  const auto r = parse_llama_embedding(json(R"({"content": ["a", [1, 2]], "embd_normalize": -1})"));
  ASSERT_TRUE(r.ok()) << r.status().to_string();
  EXPECT_EQ(r->inputs.size(), 2U);
  EXPECT_EQ(r->normalize, kNotNormalized);
  EXPECT_EQ(parse_llama_embedding(json(R"({"input": "a"})"), 1)->normalize, 1);
  EXPECT_EQ(parse_llama_embedding(json("{}")).status().message(),
            "content: missing, and so is input");
}

TEST(Embedding, OllamasForms) {
  const auto several = parse_ollama_embed(json(R"({"model": "m", "input": ["a", "b"]})"));
  ASSERT_TRUE(several.ok()) << several.status().to_string();
  EXPECT_EQ(several->inputs.size(), 2U);
  EXPECT_TRUE(several->truncate);
  EXPECT_FALSE(
      parse_ollama_embed(json(R"({"model": "m", "input": "a", "truncate": false})"))->truncate);
  const auto one = parse_ollama_embeddings(json(R"({"model": "m", "prompt": "a"})"));
  ASSERT_TRUE(one.ok()) << one.status().to_string();
  EXPECT_EQ(one->normalize, kNotNormalized);
  EXPECT_EQ(parse_ollama_embeddings(json(R"({"model": "m"})")).status().message(),
            "prompt: missing");
}

TEST(Embedding, VectorsAreCutAndNormalised) {
  EmbeddingRequest r;
  const auto shaped = [&](int normalize, int64_t dimensions = 0) {
    r.normalize = normalize;
    r.dimensions = dimensions;
    Embedding made = {.rows = {{3, -4, 5}}};
    EXPECT_TRUE(shape_embedding(r, true, &made).ok());
    return made.rows.front();
  };
  EXPECT_EQ(shaped(kNotNormalized), (std::vector<float>{3, -4, 5}));
  EXPECT_EQ(shaped(kNotNormalized, 2), (std::vector<float>{3, -4}));
  EXPECT_EQ(shaped(kEuclidean, 2), (std::vector<float>{0.6F, -0.8F}));
  EXPECT_EQ(shaped(kMaxNormalized, 2), (std::vector<float>{24570, -32760}));
  EXPECT_EQ(shaped(1), (std::vector<float>{0.25F, -4.0F / 12, 5.0F / 12}));
  Embedding zeros = {.rows = {{0, 0}}};
  EXPECT_TRUE(shape_embedding(r, true, &zeros).ok());
  EXPECT_EQ(zeros.rows.front(), (std::vector<float>{0, 0}));
  r.dimensions = 3;
  EXPECT_EQ(shape_embedding(r, true, &zeros).message(),
            "dimensions: 3, but the model's vectors have 2 numbers");
  // Rows of single tokens are left as they are.
  Embedding rows = {.rows = {{3, 4}, {5, 6}}};
  EXPECT_TRUE(shape_embedding(r, false, &rows).ok());
  EXPECT_EQ(rows.rows, (std::vector<std::vector<float>>{{3, 4}, {5, 6}}));
}

TEST(Embedding, OnlyOneFormHasARowForEachToken) {
  for (const EmbeddingRoute& route : embedding_routes(kEuclidean)) {
    const bool rows = std::string_view(route.path).find("/embedding") == 0;
    EmbeddingRequest r;
    r.form = rows ? EmbeddingForm::kLlama : EmbeddingForm::kOpenAi;
    EXPECT_TRUE(check_pooling(r, true).ok()) << route.path;
    EXPECT_EQ(check_pooling(r, false).ok(), rows) << route.path;
    const auto parsed =
        route.parse(json(R"({"model": "m", "input": "a", "content": "a", "prompt": "a"})"));
    ASSERT_TRUE(parsed.ok()) << route.path << ": " << parsed.status().to_string();
    EXPECT_EQ(parsed->form == EmbeddingForm::kLlama, rows) << route.path;
    EXPECT_EQ(parsed->inputs.size(), 1U) << route.path;
  }
}

TEST(SlotFile, IsANameAndNoPath) {
  const auto parsed = [](const std::string& name) {
    Json body;
    body["filename"] = name;
    return parse_slot_file(body);
  };
  for (const char* name : {"x", "slot 1.bin", "a.b-c_d", "\xC3\xA9t\xC3\xA9.bin", ".hidden"}) {
    EXPECT_EQ(parsed(name).value_or(""), name);
  }
  for (const char* name : {"",
                           ".",
                           "..",
                           "a/b",
                           "/etc/passwd",
                           "..\\x",
                           "a\\b",
                           "a..b",
                           " a",
                           "a ",
                           "a.",
                           "a:b",
                           "a*",
                           "a?",
                           "a\"",
                           "<a",
                           "a>",
                           "a|b",
                           "a\nb",
                           "a\x7F",
                           "a\xC2\x85",
                           "\xEF\xBC\x8E",
                           "a\xE2\x88\x95",
                           "\xE2\x88\x96z",
                           "\xEF\xBB\xBFx",
                           "\xEF\xBF\xBD"}) {
    EXPECT_EQ(parsed(name).code(), Code::kInvalidArgument) << name;
  }
  EXPECT_EQ(parsed(std::string("a\0b", 3)).code(), Code::kInvalidArgument);
  EXPECT_TRUE(parsed(std::string(255, 'x')).ok());
  EXPECT_FALSE(parsed(std::string(256, 'x')).ok());
}

TEST(Requests, ThePromptsGrammarAndStopsAreTakenOver) {
  GenerationRequest r = good(chat(), R"({"stop": "a", "grammar": "own"})");
  model::ChatPrompt prompt;
  prompt.stops = {"b"};
  apply_prompt(prompt, &r);
  EXPECT_EQ(r.sampling.grammar, "own");
  EXPECT_EQ(r.stop, (std::vector<std::string>{"a", "b"}));
  prompt.grammar = "root ::= \"x\"";
  prompt.grammar_scope.trigger_tokens = {5};
  apply_prompt(prompt, &r);
  EXPECT_EQ(r.sampling.grammar, "root ::= \"x\"");
  EXPECT_TRUE(r.sampling.grammar_scope.lazy());
}

TEST(Requests, RankDocumentsOrTexts) {
  const RerankRequest jina =
      parse_rerank(json(R"({"query": "q", "documents": ["a", "b"], "top_n": 1})")).value();
  EXPECT_EQ(jina.query, "q");
  EXPECT_EQ(jina.documents, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(jina.top_n, 1);
  EXPECT_FALSE(jina.tei);
  const RerankRequest tei =
      parse_rerank(json(R"({"query": "q", "texts": ["a"], "return_text": true})")).value();
  EXPECT_TRUE(tei.tei);
  EXPECT_TRUE(tei.return_text);
  EXPECT_FALSE(tei.top_n);
  for (const char* bad :
       {R"({"documents": ["a"]})", R"({"query": "q"})", R"({"query": "q", "documents": []})",
        R"({"query": ["q"], "documents": ["a"]})", R"({"query": "q", "documents": "a"})",
        R"({"query": "q", "documents": [1]})",
        R"({"query": "q", "documents": ["a"], "top_n": 0})"}) {
    EXPECT_EQ(parse_rerank(json(bad)).code(), Code::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace hcache::api
