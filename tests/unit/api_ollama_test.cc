// Ollama's words: requests, answers, streams of lines, and errors.
#include <gtest/gtest.h>

#include "api/answers.h"
#include "api/ollama.h"
#include "api/reply.h"
#include "api/request.h"
#include "api_reply_testing.h"

namespace hcache::api {
namespace {

using test::context;
using test::ended;
using test::expect_documented;
using test::json;
using test::kCalls;
using test::outcome;
using test::request;
using test::run;
using test::Transcript;
using test::with;

const char* const kAsk = R"({"model": "m", "messages": [{"role": "user", "content": "Hi"}]})";
const char* const kPrompt = R"({"model": "m", "prompt": "Hi"})";

GenerationRequest chat(const std::string& patch) {
  auto request = parse_ollama_chat(with(json(kAsk), patch));
  EXPECT_TRUE(request.ok()) << patch << ": " << request.status().to_string();
  return request.ok() ? *std::move(request) : GenerationRequest();
}

InfillRequest generate(const std::string& patch) {
  auto request = parse_ollama_generate(with(json(kPrompt), patch));
  EXPECT_TRUE(request.ok()) << patch << ": " << request.status().to_string();
  return request.ok() ? *std::move(request) : InfillRequest();
}

void bad_chat(const std::string& patch, const std::string& message) {
  const auto request = parse_ollama_chat(with(json(kAsk), patch));
  EXPECT_EQ(request.code(), Code::kInvalidArgument) << patch;
  EXPECT_EQ(request.status().message(), message) << patch;
}

void bad_prompt(const std::string& patch, const std::string& message) {
  const auto request = parse_ollama_generate(with(json(kPrompt), patch));
  EXPECT_EQ(request.code(), Code::kInvalidArgument) << patch;
  EXPECT_EQ(request.status().message(), message) << patch;
}

TEST(OllamaRequests, AreStreamsUnlessTheySayOtherwise) {
  EXPECT_TRUE(chat("{}").stream);
  EXPECT_TRUE(chat(R"({"stream": true})").stream);
  EXPECT_FALSE(chat(R"({"stream": false})").stream);
  EXPECT_TRUE(generate("{}").generation.stream);
  EXPECT_FALSE(generate(R"({"stream": false})").generation.stream);
  // As Ollama's own command line leaves things out.
  EXPECT_TRUE(chat(R"({"format": null, "options": null, "tools": null, "think": null})").stream);
}

TEST(OllamaRequests, Messages) {
  const GenerationRequest r = chat(R"({"messages": [
      {"role": "system", "content": "Be brief."},
      {"role": "user", "content": "Rain?", "images": []},
      {"role": "assistant", "thinking": "Hm.", "content": "",
       "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bergen"}}}]},
      {"role": "tool", "tool_name": "weather", "content": "rain"}]})");
  EXPECT_EQ(r.dialect, Dialect::kOllamaChat);
  EXPECT_EQ(r.model_name, "m");
  EXPECT_FALSE(r.only_loads);
  const auto& m = r.chat->messages;
  ASSERT_EQ(m.size(), 4U);
  EXPECT_EQ(m[0].role, "system");
  EXPECT_EQ(m[2].reasoning, "Hm.");
  ASSERT_EQ(m[2].tool_calls.size(), 1U);
  EXPECT_EQ(m[2].tool_calls[0].name, "weather");
  EXPECT_EQ(m[2].tool_calls[0].arguments, R"({"city":"Bergen"})");
  EXPECT_EQ(m[3].name, "weather");
  EXPECT_EQ(m[3].content, "rain");
  bad_chat(R"({"messages": [{"content": "Hi"}]})", "messages[0].role: missing");
  bad_chat(R"({"messages": [{"role": "user", "content": []}]})",
           "messages[0].content: expected a string, got an array");
  bad_chat(R"({"messages": [{"role": "user", "images": ["iV-O"]}]})",
           "messages[0].images[0]: byte 2 of 4 is no base64");
}

TEST(OllamaRequests, WithoutAnythingToAnswerTheyLoad) {
  for (const char* patch : {R"({"messages": []})", R"({"messages": null})"}) {
    EXPECT_TRUE(chat(patch).only_loads);
  }
  EXPECT_TRUE(generate(R"({"prompt": ""})").generation.only_loads);
  EXPECT_TRUE(generate(R"({"prompt": null, "keep_alive": 0})").generation.only_loads);
  EXPECT_FALSE(generate("{}").generation.only_loads);
  EXPECT_FALSE(generate(R"({"prompt": "", "suffix": "x"})").generation.only_loads);
}

TEST(OllamaRequests, Options) {
  const GenerationRequest r = chat(R"({"keep_alive": "5m", "options": {
      "num_predict": 7, "temperature": 0.5, "top_k": 9, "top_p": 0.7, "min_p": 0.1, "seed": 3,
      "stop": ["a", "b"], "repeat_penalty": 1.1, "repeat_last_n": 33, "presence_penalty": 0.2,
      "frequency_penalty": 0.3, "num_ctx": 4096, "mirostat": 1, "typical_p": 0.7,
      "use_mmap": true}})");
  EXPECT_EQ(r.max_tokens, 7);
  EXPECT_EQ(r.seed, 3U);
  EXPECT_EQ(r.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(r.sampling.temperature, 0.5F);
  EXPECT_EQ(r.sampling.top_k, 9);
  EXPECT_EQ(r.sampling.top_p, 0.7F);
  EXPECT_EQ(r.sampling.min_p, 0.1F);
  EXPECT_EQ(r.sampling.repeat_penalty, 1.1F);
  EXPECT_EQ(r.sampling.penalty_last_n, 33);
  EXPECT_EQ(r.sampling.presence_penalty, 0.2F);
  EXPECT_EQ(r.sampling.frequency_penalty, 0.3F);
  for (const char* none : {"-1", "-2", "0", "null"}) {
    EXPECT_EQ(chat(std::string(R"({"options": {"num_predict": )") + none + "}}").max_tokens, -1);
  }
  EXPECT_EQ(generate(R"({"options": {"num_predict": 5}})").generation.max_tokens, 5);
  bad_chat(R"({"options": {"temperature": "hot"}})",
           "options.temperature: expected a number, got a string");
  bad_chat(R"({"options": {"num_predict": -3}})",
           "options.num_predict: -3 is out of range, it must be between -2 and 2147483647");
}

TEST(OllamaRequests, DefaultsAreTheServers) {
  model::SamplingOptions defaults;
  defaults.temperature = 0.3F;
  defaults.json_schema = R"({"type":"array"})";
  const auto r = parse_ollama_chat(json(kAsk), defaults);
  ASSERT_TRUE(r.ok());
  EXPECT_EQ(r->sampling.temperature, 0.3F);
  EXPECT_EQ(r->chat->json_schema, R"({"type":"array"})");
  EXPECT_EQ(r->sampling.json_schema, "");
}

TEST(OllamaRequests, FormatsThinkingAndLogprobs) {
  EXPECT_EQ(chat(R"({"format": ""})").chat->json_schema, "");
  EXPECT_EQ(chat(R"({"format": "json"})").chat->json_schema, R"({"type":"object"})");
  EXPECT_EQ(chat(R"({"format": {"type": "array"}})").chat->json_schema, R"({"type":"array"})");
  bad_chat(R"({"format": "xml"})", "format: expected json or a JSON schema");
  const auto said = [](const GenerationRequest& r) {
    return r.chat->template_args.contains("enable_thinking");
  };
  EXPECT_TRUE(chat("{}").chat->thinking);
  EXPECT_FALSE(said(chat("{}")));
  const GenerationRequest off = chat(R"({"think": false})");
  EXPECT_FALSE(off.chat->thinking);
  EXPECT_EQ(off.chat->template_args.at("enable_thinking"), "false");
  const GenerationRequest high = chat(R"({"think": "high"})");
  EXPECT_TRUE(high.chat->thinking && said(high));
  EXPECT_EQ(high.chat->template_args.at("reasoning_effort"), R"("high")");
  bad_chat(R"({"think": "much"})", "think: expected a boolean, low, medium or high");
  const GenerationRequest likely = chat(R"({"logprobs": true, "top_logprobs": 3})");
  EXPECT_TRUE(likely.logprobs);
  EXPECT_EQ(likely.top_logprobs, 3);
  bad_chat(R"({"top_logprobs": 3})", "top_logprobs: needs logprobs: true");
}

TEST(OllamaRequests, ToolsAndTheCache) {
  const GenerationRequest r = chat(R"({"session_id": "s", "cache_salt": "x", "truncate": true,
      "tools": [{"type": "function", "function": {"name": "f", "description": "d",
                 "parameters": {"type": "object", "properties": {"b": {}, "a": {}}}}}]})");
  ASSERT_EQ(r.chat->tools.size(), 1U);
  EXPECT_EQ(r.chat->tools[0].name, "f");
  EXPECT_EQ(r.chat->tools[0].parameters, R"({"type":"object","properties":{"b":{},"a":{}}})");
  EXPECT_EQ(r.session_id, "s");
  EXPECT_EQ(r.cache_salt, "x");
  EXPECT_EQ(r.truncate, true);
  EXPECT_EQ(chat(R"({"truncate": false})").truncate, false);
  EXPECT_FALSE(chat("{}").truncate.has_value());
  bad_chat(R"({"tools": [{"function": {}}]})", "tools[0].function.name: missing");
}

TEST(OllamaRequests, PromptsGoThroughTheTemplateUnlessTheyAreRaw) {
  const GenerationRequest r = generate(R"({"system": "Be brief.", "format": "json"})").generation;
  EXPECT_EQ(r.dialect, Dialect::kOllamaGenerate);
  ASSERT_TRUE(r.chat.has_value());
  ASSERT_EQ(r.chat->messages.size(), 2U);
  EXPECT_EQ(r.chat->messages[0].content, "Be brief.");
  EXPECT_EQ(r.chat->messages[1].role, "user");
  EXPECT_EQ(r.chat->messages[1].content, "Hi");
  EXPECT_EQ(r.chat->json_schema, R"({"type":"object"})");
  const GenerationRequest raw = generate(R"({"raw": true, "format": "json"})").generation;
  EXPECT_FALSE(raw.chat.has_value());
  ASSERT_EQ(raw.prompts.size(), 1U);
  EXPECT_EQ(std::get<std::string>(raw.prompts[0].parts.at(0)), "Hi");
  EXPECT_EQ(raw.sampling.json_schema, R"({"type":"object"})");
  const InfillRequest gap = generate(R"({"suffix": "return x"})");
  EXPECT_FALSE(gap.generation.chat.has_value());
  EXPECT_EQ(gap.prefix, "Hi");
  EXPECT_EQ(gap.suffix, "return x");
  bad_prompt(R"({"raw": true, "system": "x"})", "system: can't be combined with raw or a suffix");
  bad_prompt(R"({"template": "{{ .Prompt }}"})",
             "template: not supported; start the server with --chat-template");
  bad_prompt(R"({"context": [1]})", "context: not supported; send the conversation to /api/chat");
  EXPECT_FALSE(generate(R"({"context": [], "template": ""})").generation.only_loads);
}

TEST(OllamaRequests, ShowNamesAModel) {
  EXPECT_EQ(parse_ollama_show(json(R"({"model": "a"})")).value(), "a");
  EXPECT_EQ(parse_ollama_show(json(R"({"name": "b", "verbose": true})")).value(), "b");
  EXPECT_EQ(parse_ollama_show(json(R"({"name": "b", "model": "a"})")).value(), "a");
  EXPECT_EQ(parse_ollama_show(json("{}")).status().message(), "model: missing");
}

// ---- Answers ------------------------------------------------------------------------------------

std::vector<Json> lines(const std::string& stream) {
  std::vector<Json> out;
  for (size_t at = 0; at < stream.size();) {
    const size_t end = stream.find('\n', at);
    EXPECT_NE(end, std::string::npos) << "a line without an end";
    if (end == std::string::npos) break;
    out.push_back(json(stream.substr(at, end - at)));
    at = end + 1;
  }
  return out;
}

// What a client puts together from the lines before the last one.
Json assembled(const std::vector<Json>& stream) {
  Json message = {{"role", "assistant"}, {"content", ""}};
  for (const Json& line : stream) {
    const Json& part = line["message"];
    for (const char* name : {"content", "thinking"}) {
      const std::string more = part.value(name, "");
      if (!more.empty()) message[name] = message.value(name, "") + more;
    }
    if (part.contains("tool_calls")) message["tool_calls"] = part["tool_calls"];
  }
  return message;
}

const char* const kThinker = R"({%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}
{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- m.content + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %})";

class OllamaReplies : public test::Replies {};

TEST_F(OllamaReplies, Whole) {
  const Json a = run(request(Dialect::kOllamaChat, false), context(), "Hello.", ended()).answer;
  expect_documented(a, "OllamaChat");
  EXPECT_EQ(a["model"], "m");
  EXPECT_EQ(a["created_at"], "2023-11-14T22:13:20.000000Z");
  EXPECT_EQ(a["message"], json(R"({"role": "assistant", "content": "Hello."})"));
  EXPECT_EQ(a["done"], true);
  EXPECT_EQ(a["done_reason"], "stop");
  EXPECT_EQ(a["load_duration"], 2'500'000);
  EXPECT_EQ(a["prompt_eval_count"], 100);
  EXPECT_EQ(a["prompt_eval_duration"], 10'000'000);
  EXPECT_EQ(a["eval_count"], 7);
  EXPECT_EQ(a["eval_duration"], 70'000'000);
  EXPECT_EQ(a["hcache"]["schedule"], "H:26 KV:4");
  const Finish cut = {FinishReason::kLength, "", outcome()};
  const Json b = run(request(Dialect::kOllamaGenerate, false), context(), "Hello.", cut).answer;
  expect_documented(b, "OllamaGeneration");
  EXPECT_EQ(b["response"], "Hello.");
  EXPECT_FALSE(b.contains("message"));
  EXPECT_EQ(b["done_reason"], "length");
}

TEST_F(OllamaReplies, StreamsGiveTheWholeAnswer) {
  for (uint32_t seed = 0; seed < 20; seed++) {
    const Json whole =
        run(request(Dialect::kOllamaChat, false), tools_context(), kCalls, ended(), seed).answer;
    const Transcript streamed =
        run(request(Dialect::kOllamaChat, true), tools_context(), kCalls, ended(), seed);
    const std::vector<Json> all = lines(streamed.stream);
    ASSERT_GT(all.size(), 2U);
    for (const Json& line : all) {
      expect_documented(line, "OllamaChat");
      EXPECT_EQ(line["done"], &line == &all.back());
    }
    EXPECT_EQ(assembled(all), whole["message"]);
    Json last = all.back();
    EXPECT_EQ(last["message"], json(R"({"role": "assistant", "content": ""})"));
    last["message"] = whole["message"];
    EXPECT_EQ(last, whole);
  }
}

TEST_F(OllamaReplies, CallsHaveTheirArgumentsAsObjects) {
  const Json a = run(request(Dialect::kOllamaChat, false), tools_context(), kCalls, ended()).answer;
  const Json& calls = a["message"]["tool_calls"];
  ASSERT_EQ(calls.size(), 2U);
  EXPECT_EQ(calls[0]["function"], json(R"({"index": 0, "name": "get_weather",
                                           "arguments": {"city": "Köln"}})"));
  EXPECT_EQ(calls[1]["function"]["arguments"], Json::object());
  // Cut short within the first call's arguments.
  const std::string text(kCalls);
  const Finish cut = {FinishReason::kLength, "", outcome()};
  for (const bool stream : {false, true}) {
    const Transcript t = run(request(Dialect::kOllamaChat, stream), tools_context(),
                             text.substr(0, text.find("Köln")), cut);
    const Json message = stream ? assembled(lines(t.stream)) : t.answer["message"];
    ASSERT_TRUE(message.contains("tool_calls")) << message.dump();
    EXPECT_EQ(message["tool_calls"][0]["function"]["arguments"], Json::object());
  }
}

TEST_F(OllamaReplies, ThoughtsAreBesideTheContent) {
  const auto chat = model::ChatTemplate::create(*tokenizer_, kThinker);
  ASSERT_TRUE(chat.ok()) << chat.status().to_string();
  model::ChatInput input;
  input.messages = {{"user", "Hi"}};
  ReplyContext c = context();
  c.format = chat.value()->prompt(input).value().format;
  const std::string text = "<think>\nA greeting.\n</think>\n\nHello.";
  const Json whole = run(request(Dialect::kOllamaChat, false), c, text, ended()).answer;
  EXPECT_EQ(whole["message"]["thinking"], "A greeting.\n");
  EXPECT_EQ(whole["message"]["content"], "Hello.");
  const std::vector<Json> all =
      lines(run(request(Dialect::kOllamaChat, true), c, text, ended()).stream);
  EXPECT_EQ(assembled(all)["thinking"], whole["message"]["thinking"]);
  EXPECT_EQ(assembled(all)["content"], "Hello.");
  const Json generated = run(request(Dialect::kOllamaGenerate, false), c, text, ended()).answer;
  EXPECT_EQ(generated["thinking"], "A greeting.\n");
  EXPECT_EQ(generated["response"], "Hello.");
}

TEST_F(OllamaReplies, Logprobs) {
  GenerationRequest r = request(Dialect::kOllamaGenerate, true);
  r.logprobs = true;
  r.top_logprobs = 2;
  const Transcript t = run(r, context(), "Hello there.", ended());
  Json all = Json::array();
  std::string text;
  for (const Json& line : lines(t.stream)) {
    expect_documented(line, "OllamaGeneration");
    text += line["response"].get<std::string>();
    for (const Json& token : line.value("logprobs", Json::array())) all.push_back(token);
  }
  EXPECT_EQ(text, "Hello there.");
  EXPECT_EQ(all, t.answer["logprobs"]);
  EXPECT_EQ(all[0]["logprob"], -0.5);
  EXPECT_EQ(all[0]["top_logprobs"].size(), 2U);
}

TEST_F(OllamaReplies, StreamsAreLinesAndFailInOne) {
  const auto builder = ReplyBuilder::create(request(Dialect::kOllamaChat, true), context());
  EXPECT_EQ(builder->stream_type(), "application/x-ndjson");
  EXPECT_EQ(ReplyBuilder::create(request(Dialect::kChat, true), context())->stream_type(),
            "text/event-stream");
  EXPECT_EQ(builder->fail(unavailable("the device is gone")),
            "{\"error\":\"the device is gone\"}\n");
}

TEST(OllamaAnswers, Loading) {
  GenerationRequest r;
  r.dialect = Dialect::kOllamaChat;
  const Json chat = ollama_load_answer(r, "m", 1);
  expect_documented(chat, "OllamaChat");
  EXPECT_EQ(chat, json(R"({"model": "m", "created_at": "1970-01-01T00:00:01.000000Z",
      "message": {"role": "assistant", "content": ""}, "done": true, "done_reason": "load"})"));
  r.dialect = Dialect::kOllamaGenerate;
  const Json text = ollama_load_answer(r, "m", 1);
  expect_documented(text, "OllamaGeneration");
  EXPECT_EQ(text["response"], "");
}

TEST(OllamaAnswers, TellOfTheModel) {
  OllamaModel m;
  m.card.name = "tiny";
  m.card.parameters = 134'515'008;
  m.card.bytes = 90'000'000;
  m.card.context = 2048;
  m.card.created_s = 1700000000;
  m.digest = "abc";
  m.architecture = "llama";
  m.weight_types = "Q4_1";
  m.numbers = {{"context_length", 2048}, {"rope.scaling.factor", 0.5}};
  m.chat_template = "{{ messages }}";
  m.thinks = true;
  const Json tags = ollama_tags_answer({&m, 1});
  expect_documented(tags, "OllamaModels");
  const Json& entry = tags["models"][0];
  EXPECT_EQ(entry["name"], "tiny");
  EXPECT_EQ(entry["size"], 90'000'000);
  EXPECT_EQ(entry["digest"], "abc" + std::string(61, '0'));
  EXPECT_EQ(entry["details"]["parameter_size"], "134.5M");
  EXPECT_EQ(entry["details"]["quantization_level"], "Q4_1");
  const Json ps = ollama_ps_answer({&m, 1});
  expect_documented(ps, "OllamaRunning");
  EXPECT_EQ(ps["models"][0]["context_length"], 2048);
  const Json show = ollama_show_answer(m);
  expect_documented(show, "OllamaShow");
  EXPECT_EQ(show["model_info"],
            json(R"({"general.architecture": "llama", "general.parameter_count": 134515008,
                     "llama.context_length": 2048, "llama.rope.scaling.factor": 0.5})"));
  EXPECT_EQ(show["capabilities"], json(R"(["completion", "tools", "thinking"])"));
  EXPECT_NE(show["parameters"].get<std::string>().find("temperature"), std::string::npos);
  expect_documented(ollama_version_answer("0.1.0"), "OllamaVersion");
}

TEST(OllamaErrors, AreATextBelowApi) {
  for (const char* path : {"/api/chat", "/api/x/y"}) {
    EXPECT_EQ(error_style(path), ErrorStyle::kOllama);
  }
  EXPECT_EQ(error_style("/apix"), ErrorStyle::kOpenAi);
  EXPECT_EQ(error_style(Dialect::kOllamaGenerate), ErrorStyle::kOllama);
  ErrorAnswer answer = render_error(out_of_range("too long"), ErrorStyle::kOllama);
  tell_context(9, 8, ErrorStyle::kOllama, &answer);
  expect_documented(answer.body, "OllamaError");
  EXPECT_EQ(answer.http_status, 400);
  EXPECT_EQ(answer.body, json(R"({"error": "too long"})"));
  EXPECT_EQ(render_error(unavailable("x"), ErrorStyle::kOllama).http_status, 503);
  EXPECT_EQ(render_error(unimplemented("x"), ErrorStyle::kOllama).http_status, 501);
}

}  // namespace
}  // namespace hcache::api
