#include <gtest/gtest.h>

#include "api/answers.h"
#include "api/embeddings.h"
#include "api/reply.h"
#include "api/rerank.h"
#include "api_reply_testing.h"

namespace hcache::api {
namespace {

using test::context;
using test::ended;
using test::Event;
using test::events;
using test::expect_documented;
using test::feed;
using test::kCalls;
using test::outcome;
using test::Replies;
using test::request;
using test::run;
using test::Transcript;

// The message that a client puts together from the chunks of one choice.
Json assembled_chat(const std::vector<Event>& stream, int choice, std::string* finish_reason) {
  Json message = {{"role", ""}, {"content", ""}, {"tool_calls", Json::array()}};
  for (const Event& event : stream) {
    if (event.data.is_string() || event.data["choices"].empty()) continue;
    const Json& c = event.data["choices"][0];
    if (c["index"] != choice) continue;
    if (!c["finish_reason"].is_null()) *finish_reason = c["finish_reason"];
    const Json& delta = c["delta"];
    if (delta.contains("role")) message["role"] = delta["role"];
    if (delta.contains("content") && !delta["content"].is_null()) {
      message["content"] =
          message["content"].get<std::string>() + delta["content"].get<std::string>();
    }
    for (const Json& part : delta.value("tool_calls", Json::array())) {
      const size_t index = part["index"];
      Json& calls = message["tool_calls"];
      if (part.contains("id")) {
        EXPECT_EQ(index, calls.size());
        calls.push_back(part);
        calls.back().erase("index");
      } else {
        Json& arguments = calls.at(index)["function"]["arguments"];
        arguments = arguments.get<std::string>() + part["function"]["arguments"].get<std::string>();
      }
    }
  }
  return message;
}

TEST_F(Replies, ChatWhole) {
  const Json a = run(request(Dialect::kChat, false), context(), "Hello.", ended()).answer;
  expect_documented(a, "ChatCompletion");
  EXPECT_EQ(a["id"], "chatcmpl-abc123");
  EXPECT_EQ(a["object"], "chat.completion");
  EXPECT_EQ(a["choices"][0]["message"], test::json(R"({"role":"assistant","content":"Hello."})"));
  EXPECT_EQ(a["choices"][0]["finish_reason"], "stop");
  EXPECT_EQ(a["usage"], test::json(R"({"prompt_tokens":100,"completion_tokens":7,"total_tokens":107,
      "prompt_tokens_details":{"cached_tokens":80}})"));
  EXPECT_EQ(
      a["hcache"]["tokens"],
      test::json(
          R"({"resident":10,"hidden":50,"kv":20,"recomputed":5,"new":15,"dropped_before":0})"));
  EXPECT_EQ(a["hcache"]["bytes"]["disk"], 4096);
  EXPECT_EQ(a["hcache"]["schedule"], "H:26 KV:4");
  EXPECT_EQ(a["hcache"]["devices"], Json::parse(R"([{"device": "RPC0", "layers": 15, "bytes": 2048},
                            {"device": "RPC1", "layers": 15, "bytes": 2048}])"));
  EXPECT_EQ(a["timings"]["cache_n"], 80);
  EXPECT_EQ(a["timings"]["prompt_n"], 20);
  EXPECT_EQ(a["timings"]["prompt_per_second"], 2000.0);
  // Seven tokens, six steps after the first.
  EXPECT_EQ(a["timings"]["predicted_per_token_ms"], 70.0 / 6);
}

TEST_F(Replies, ChatStreamGivesTheWholeAnswer) {
  GenerationRequest r = request(Dialect::kChat, true);
  r.include_usage = true;
  for (uint32_t seed = 0; seed < 20; seed++) {
    const Transcript whole =
        run(request(Dialect::kChat, false), tools_context(), kCalls, ended(), seed);
    const Transcript streamed = run(r, tools_context(), kCalls, ended(), seed);
    const auto stream = events(streamed.stream);
    std::string reason;
    const Json message = assembled_chat(stream, 0, &reason);
    EXPECT_EQ(message, whole.answer["choices"][0]["message"]);
    EXPECT_EQ(reason, "tool_calls");
    ASSERT_EQ(message["tool_calls"].size(), 2U);
    EXPECT_EQ(test::json(message["tool_calls"][0]["function"]["arguments"]),
              test::json(R"({"city":"Köln"})"));
    EXPECT_NE(message["tool_calls"][0]["id"], message["tool_calls"][1]["id"]);
    EXPECT_EQ(message["content"].get<std::string>().rfind("Let me look.", 0), 0U);
    EXPECT_EQ(streamed.message.tool_calls, whole.message.tool_calls);

    ASSERT_GE(stream.size(), 3U);
    EXPECT_EQ(stream.back().data, "[DONE]");
    const Json& usage = stream[stream.size() - 2].data;
    EXPECT_TRUE(usage["choices"].empty());
    EXPECT_EQ(usage["usage"], whole.answer["usage"]);
    const Json& last = stream[stream.size() - 3].data;
    EXPECT_EQ(last["hcache"], whole.answer["hcache"]);
    EXPECT_TRUE(stream[0].data["usage"].is_null());
  }
}

TEST_F(Replies, AToolCallThatIsCutShortStaysWhatItIs) {
  const std::string text(kCalls);
  for (size_t n = 0; n <= text.size(); n += 3) {
    const Finish finish = {FinishReason::kLength, "", outcome()};
    const Transcript whole =
        run(request(Dialect::kChat, false), tools_context(), text.substr(0, n), finish);
    const Transcript streamed =
        run(request(Dialect::kChat, true), tools_context(), text.substr(0, n), finish);
    std::string reason;
    const Json message = assembled_chat(events(streamed.stream), 0, &reason);
    EXPECT_EQ(reason, "length");
    const Json& expected = whole.answer["choices"][0]["message"];
    EXPECT_EQ(message["tool_calls"].size(), expected.value("tool_calls", Json::array()).size())
        << n;
  }
}

TEST_F(Replies, TextThatBreaksTheFormatIsContent) {
  for (const std::string text :
       {"<tool_call>\nnot json\n</tool_call>", "</tool_call>", "a <tool"}) {
    const Json a = run(request(Dialect::kChat, false), tools_context(), text, ended()).answer;
    EXPECT_EQ(a["choices"][0]["finish_reason"], "stop");
    EXPECT_EQ(a["choices"][0]["message"]["content"], text);
    const Json streamed = run(request(Dialect::kChat, true), tools_context(), text, ended()).answer;
    EXPECT_EQ(streamed["choices"][0]["message"], a["choices"][0]["message"]);
  }
}

TEST_F(Replies, ChoicesKeepTheirIndices) {
  GenerationRequest r = request(Dialect::kChat, true);
  r.n = 3;
  r.include_usage = true;
  const auto builder = ReplyBuilder::create(r, context());
  std::string stream = builder->begin({100, 80});
  for (int i = 0; i < 3; i++) stream += feed(builder.get(), i, "text " + std::to_string(i), 5);
  for (const int i : {2, 0, 1}) {
    Finish finish = ended();
    if (i == 1) finish.reason = FinishReason::kLength;
    stream += builder->finish(i, "!", finish);
  }
  stream += builder->end();
  const auto parsed = events(stream);
  for (int i = 0; i < 3; i++) {
    std::string reason;
    EXPECT_EQ(assembled_chat(parsed, i, &reason)["content"], "text " + std::to_string(i) + "!");
    EXPECT_EQ(reason, i == 1 ? "length" : "stop");
  }
  // The prompt counts once.
  const Json a = builder->answer();
  EXPECT_EQ(a["usage"]["prompt_tokens"], 100);
  EXPECT_EQ(a["usage"]["completion_tokens"], 21);
  EXPECT_EQ(a["choices"].size(), 3U);
}

TEST_F(Replies, ChatLogprobs) {
  for (const bool stream : {false, true}) {
    GenerationRequest r = request(Dialect::kChat, stream);
    r.logprobs = true;
    r.top_logprobs = 2;
    const Transcript out = run(r, context(), "Hello there, you.", ended());
    Json tokens = Json::array();
    if (stream) {
      for (const Event& e : events(out.stream)) {
        if (e.data.is_string()) continue;
        for (const Json& t : e.data["choices"][0]["logprobs"]["content"]) tokens.push_back(t);
      }
    } else {
      tokens = out.answer["choices"][0]["logprobs"]["content"];
    }
    std::string text;
    for (const Json& t : tokens) {
      text += t["token"].get<std::string>();
      EXPECT_EQ(t["logprob"], -0.5);
      EXPECT_EQ(t["bytes"].size(), t["token"].get<std::string>().size());
      ASSERT_EQ(t["top_logprobs"].size(), 2U);
      EXPECT_EQ(t["top_logprobs"][1]["token"], "\uFFFD");
      EXPECT_EQ(t["top_logprobs"][1]["logprob"], -9999.0);
    }
    EXPECT_EQ(text, "Hello there, you.");
  }
}

TEST_F(Replies, StreamsTellHowFarTheyAre) {
  for (const Dialect dialect :
       {Dialect::kChat, Dialect::kCompletion, Dialect::kLlama, Dialect::kResponse}) {
    GenerationRequest r = request(dialect, true);
    r.timings_per_token = true;
    const auto builder = ReplyBuilder::create(r, context());
    const auto told =
        events(builder->progress({.total = 100, .cached = 80, .processed = 90, .ms = 5}));
    EXPECT_EQ(told.at(0).data["prompt_progress"],
              test::json(R"({"total":100,"cache":80,"processed":90,"time_ms":5.0})"));
    std::string stream = builder->begin({.tokens = 100, .cached = 80, .prompt_ms = 10});
    TokenEvent event;
    event.text = "a";
    event.reply_ms = 4;
    for (int i = 0; i < 2; ++i) stream = builder->push(0, event);
    const Json timings = events(stream).back().data["timings"];
    EXPECT_EQ(timings["prompt_n"], 20);
    EXPECT_EQ(timings["prompt_ms"], 10.0);
    EXPECT_EQ(timings["predicted_n"], 2);
    EXPECT_EQ(timings["predicted_ms"], 4.0);
    EXPECT_EQ(timings["predicted_per_second"], 250.0);
  }
  EXPECT_EQ(ReplyBuilder::create(request(Dialect::kMessages, true), context())->progress({}), "");
}

TEST_F(Replies, VerboseChatsHaveLlamaServersAnswer) {
  GenerationRequest r = request(Dialect::kChat, false);
  EXPECT_FALSE(run(r, context(), "Hello.", ended()).answer.contains("__verbose"));
  r.seed = 42;
  r.verbose = true;
  const Json verbose = run(r, context(), "Hello.", ended()).answer["__verbose"];
  EXPECT_EQ(verbose["content"], "Hello.");
  EXPECT_EQ(verbose["prompt"], "Once");
  EXPECT_EQ(verbose["generation_settings"]["seed"], 42);
}

TEST_F(Replies, LlamaFieldsCanBeChosen) {
  GenerationRequest r = request(Dialect::kLlama, false);
  r.max_tokens = 9;
  r.response_fields = {"content", "generation_settings/n_predict", "timings/nothing", "nothing/x"};
  EXPECT_EQ(run(r, context(), "Hello.", ended()).answer,
            test::json(R"({"content":"Hello.","generation_settings/n_predict":9})"));
}

TEST_F(Replies, LlamaTellsChancesOfWhatWasSampled) {
  GenerationRequest r = request(Dialect::kLlama, false);
  r.logprobs = r.sampled_probs = true;
  const auto builder = ReplyBuilder::create(r, context());
  TokenEvent event;
  event.chosen = {.token = 1, .bytes = "a", .logprob = 0.75F};
  event.top = {event.chosen, {.token = 2, .bytes = "b", .logprob = 0.25F}};
  event.text = "a";
  EXPECT_EQ(builder->begin({}) + builder->push(0, event) + builder->finish(0, "", ended()), "");
  const Json token = builder->answer()["completion_probabilities"][0];
  EXPECT_EQ(token["prob"], 0.75);
  EXPECT_EQ(token["top_probs"][1]["prob"], 0.25);
  EXPECT_FALSE(token.contains("logprob"));
}

TEST_F(Replies, ResponseLogprobs) {
  for (const bool stream : {false, true}) {
    GenerationRequest r = request(Dialect::kResponse, stream);
    r.logprobs = true;
    r.top_logprobs = 2;
    r.cache_key = "k";
    r.retention = Retention::kDay;
    const Transcript out = run(r, context(), "Hello there, you.", ended());
    EXPECT_EQ(out.answer["prompt_cache_key"], "k");
    EXPECT_EQ(out.answer["prompt_cache_retention"], "24h");
    EXPECT_EQ(out.answer["top_logprobs"], 2);
    const Json tokens = out.answer["output"][0]["content"][0]["logprobs"];
    std::string text;
    for (const Json& t : tokens) {
      text += t["token"].get<std::string>();
      EXPECT_EQ(t["logprob"], -0.5);
      EXPECT_EQ(t["top_logprobs"].size(), 2U);
    }
    EXPECT_EQ(text, "Hello there, you.");
    if (!stream) continue;
    Json streamed = Json::array();
    for (const Event& e : events(out.stream)) {
      if (e.name == "response.output_text.delta") {
        for (const Json& t : e.data["logprobs"]) streamed.push_back(t);
      }
      if (e.name != "response.output_text.done") continue;
      EXPECT_EQ(e.data["logprobs"], tokens);
    }
    EXPECT_EQ(streamed, tokens);
  }
  EXPECT_TRUE(run(request(Dialect::kResponse, false), context(), "Hello.", ended())
                  .answer["output"][0]["content"][0]["logprobs"]
                  .empty());
}

TEST_F(Replies, CompletionStreamGivesTheWholeAnswer) {
  GenerationRequest r = request(Dialect::kCompletion, true);
  r.logprobs = true;
  const Transcript streamed =
      run(r, context(), "upon a time", {FinishReason::kLength, "", outcome()});
  r.stream = false;
  const Transcript whole = run(r, context(), "upon a time", {FinishReason::kLength, "", outcome()});
  expect_documented(whole.answer, "Completion");
  EXPECT_EQ(whole.stream, "");
  std::string text;
  Json logprobs = {{"tokens", Json::array()},
                   {"token_logprobs", Json::array()},
                   {"top_logprobs", Json::array()},
                   {"text_offset", Json::array()}};
  Json last;
  for (const Event& e : events(streamed.stream)) {
    if (e.data.is_string()) continue;
    last = e.data["choices"][0];
    text += last["text"].get<std::string>();
    for (const auto& item : last["logprobs"].items()) {
      for (const Json& x : item.value()) logprobs[item.key()].push_back(x);
    }
  }
  EXPECT_EQ(last["finish_reason"], "length");
  EXPECT_EQ(text, whole.answer["choices"][0]["text"]);
  EXPECT_EQ(logprobs, whole.answer["choices"][0]["logprobs"]);
  EXPECT_EQ(events(streamed.stream).back().data, "[DONE]");
}

TEST_F(Replies, MessagesStreamGivesTheWholeAnswer) {
  for (uint32_t seed = 0; seed < 10; seed++) {
    const Transcript whole =
        run(request(Dialect::kMessages, false), tools_context(), kCalls, ended(), seed);
    const Transcript streamed =
        run(request(Dialect::kMessages, true), tools_context(), kCalls, ended(), seed);
    expect_documented(whole.answer, "Message");
    Json message;
    std::string arguments;
    int open = -1;
    for (const Event& e : events(streamed.stream)) {
      EXPECT_EQ(e.name, e.data["type"]);
      if (e.name == "message_start") message = e.data["message"];
      if (e.name == "content_block_start") {
        EXPECT_EQ(open, -1) << "one block at a time";
        open = e.data["index"];
        EXPECT_EQ(static_cast<size_t>(open), message["content"].size());
        message["content"].push_back(e.data["content_block"]);
        arguments.clear();
      }
      if (e.name == "content_block_delta") {
        EXPECT_EQ(e.data["index"], open);
        Json& block = message["content"].back();
        const Json& delta = e.data["delta"];
        if (delta["type"] == "text_delta") {
          block["text"] = block["text"].get<std::string>() + delta["text"].get<std::string>();
        } else {
          EXPECT_EQ(delta["type"], "input_json_delta");
          arguments += delta["partial_json"].get<std::string>();
        }
      }
      if (e.name == "content_block_stop") {
        open = -1;
        if (!arguments.empty()) message["content"].back()["input"] = test::json(arguments);
      }
      if (e.name == "message_delta") {
        message.update(e.data["delta"]);
        for (const char* key : {"usage", "hcache"}) message[key] = e.data[key];
      }
    }
    EXPECT_EQ(open, -1);
    EXPECT_EQ(message, whole.answer);
    EXPECT_EQ(message["stop_reason"], "tool_use");
    ASSERT_EQ(message["content"].size(), 3U);
    EXPECT_EQ(message["content"][1]["input"], test::json(R"({"city":"Köln"})"));
    EXPECT_EQ(events(streamed.stream).back().name, "message_stop");
  }
}

TEST_F(Replies, MessagesCountTokensOnce) {
  Finish finish = {FinishReason::kStop, "###", outcome()};
  finish.outcome.saved = 15;
  const Json a = run(request(Dialect::kMessages, false), context(), "x", finish).answer;
  EXPECT_EQ(a["usage"], test::json(R"({"input_tokens":5,"cache_creation_input_tokens":15,
      "cache_read_input_tokens":80,"output_tokens":7})"));
  EXPECT_EQ(a["stop_reason"], "stop_sequence");
  EXPECT_EQ(a["stop_sequence"], "###");
  finish.reason = FinishReason::kLength;
  EXPECT_EQ(run(request(Dialect::kMessages, false), context(), "x", finish).answer["stop_reason"],
            "max_tokens");
}

TEST_F(Replies, MessagesSayThatNoEditWasMade) {
  for (const bool asked : {false, true}) {
    GenerationRequest r = request(Dialect::kMessages, true);
    r.edits_context = asked;
    const auto stream = events(run(r, context(), "x", ended()).stream);
    const Json last = stream.at(stream.size() - 2).data;
    EXPECT_EQ(last["type"], "message_delta");
    EXPECT_EQ(last.contains("context_management"), asked);
    r.stream = false;
    const Json answer = run(r, context(), "x", ended()).answer;
    ASSERT_EQ(answer.contains("context_management"), asked);
    if (asked) {
      EXPECT_EQ(answer["context_management"]["applied_edits"], Json::array());
      EXPECT_EQ(answer["context_management"], last["context_management"]);
    }
  }
}

TEST_F(Replies, ResponseStreamGivesTheWholeAnswer) {
  for (uint32_t seed = 0; seed < 10; seed++) {
    const Transcript whole =
        run(request(Dialect::kResponse, false), tools_context(), kCalls, ended(), seed);
    const Transcript streamed =
        run(request(Dialect::kResponse, true), tools_context(), kCalls, ended(), seed);
    expect_documented(whole.answer, "Response");
    const auto stream = events(streamed.stream);
    Json output = Json::array();
    std::string text;
    std::string arguments;
    for (size_t i = 0; i < stream.size(); i++) {
      const Event& e = stream[i];
      EXPECT_EQ(e.name, e.data["type"]);
      EXPECT_EQ(e.data["sequence_number"], i);
      if (e.name == "response.output_item.added") {
        EXPECT_EQ(e.data["output_index"], output.size());
        arguments.clear();
      }
      if (e.name == "response.output_text.delta") text += e.data["delta"].get<std::string>();
      if (e.name == "response.output_text.done") {
        EXPECT_EQ(e.data["text"], text);
      }
      if (e.name == "response.function_call_arguments.delta") {
        arguments += e.data["delta"].get<std::string>();
      }
      if (e.name == "response.function_call_arguments.done") {
        EXPECT_EQ(e.data["arguments"], arguments);
      }
      if (e.name == "response.output_item.done") output.push_back(e.data["item"]);
    }
    EXPECT_EQ(stream.front().name, "response.created");
    EXPECT_EQ(stream.back().name, "response.completed");
    EXPECT_EQ(stream.back().data["response"], whole.answer);
    EXPECT_EQ(output, whole.answer["output"]);
    EXPECT_EQ(output.size(), 3U);
  }
  const Json cut = run(request(Dialect::kResponse, false), context(), "x",
                       {FinishReason::kLength, "", outcome()})
                       .answer;
  EXPECT_EQ(cut["status"], "incomplete");
  EXPECT_EQ(cut["incomplete_details"]["reason"], "max_output_tokens");
}

TEST_F(Replies, LlamaStreamGivesTheWholeAnswer) {
  GenerationRequest r = request(Dialect::kLlama, true);
  r.return_tokens = true;
  r.logprobs = true;
  const Finish finish = {FinishReason::kStop, "END", outcome()};
  const auto stream = events(run(r, context(), "upon a\ntime", finish).stream);
  r.stream = false;
  const Json whole = run(r, context(), "upon a\ntime", finish).answer;
  expect_documented(whole, "LlamaCompletion");
  std::string content;
  Json tokens = Json::array();
  for (const Event& e : stream) {
    EXPECT_EQ(e.name, "");
    content += e.data["content"].get<std::string>();
    for (const Json& t : e.data["tokens"]) tokens.push_back(t);
    EXPECT_EQ(e.data["stop"], &e == &stream.back());
  }
  EXPECT_EQ(content, whole["content"]);
  EXPECT_EQ(tokens, whole["tokens"]);
  EXPECT_EQ(whole["stop_type"], "word");
  EXPECT_EQ(whole["stopping_word"], "END");
  EXPECT_EQ(whole["tokens_cached"], 80);
  EXPECT_EQ(whole["has_new_line"], true);
  EXPECT_EQ(whole["prompt"], "Once");
  EXPECT_EQ(whole["truncated"], false);
  EXPECT_EQ(stream.back().data["timings"], whole["timings"]);
  EXPECT_EQ(whole["completion_probabilities"].size(), tokens.size());
}

TEST_F(Replies, LlamaAnswersSeveralPrompts) {
  GenerationRequest r = request(Dialect::kLlama, false);
  r.prompts.emplace_back();
  const auto builder = ReplyBuilder::create(r, context());
  EXPECT_EQ(builder->begin({1, 0}), "");
  for (const int i : {0, 1}) {
    EXPECT_EQ(feed(builder.get(), i, std::to_string(i), 1), "");
    EXPECT_EQ(builder->finish(i, "", ended()), "");
  }
  EXPECT_EQ(builder->end(), "");
  const Json a = builder->answer();
  ASSERT_EQ(a.size(), 2U);
  EXPECT_EQ(a[1]["prompt"], "Twice");
  EXPECT_EQ(a[1]["content"], "1");
  EXPECT_EQ(a[1]["index"], 1);
}

TEST_F(Replies, StreamsFailInTheirOwnWords) {
  const Status status = unavailable("the device is gone");
  const auto fail = [&](Dialect dialect) {
    return events(ReplyBuilder::create(request(dialect, true), context())->fail(status)).at(0);
  };
  EXPECT_EQ(fail(Dialect::kChat).data["error"]["message"], "the device is gone");
  EXPECT_EQ(fail(Dialect::kMessages).name, "error");
  EXPECT_EQ(fail(Dialect::kMessages).data["error"]["type"], "overloaded_error");
  EXPECT_EQ(fail(Dialect::kResponse).data["response"]["status"], "failed");
}

TEST_F(Replies, PlainFormatsAreNotParsed) {
  EXPECT_TRUE(plain_->plain());
  EXPECT_FALSE(with_tools_->plain());
  ReplyContext c = context();
  c.format = plain_;
  EXPECT_EQ(run(request(Dialect::kChat, false), c, kCalls, ended()).message.content, kCalls);
}

TEST(Errors, HaveOneMapping) {
  const auto check = [](const Status& status, int openai, int anthropic, const char* type) {
    const ErrorAnswer a = render_error(status, ErrorStyle::kOpenAi);
    EXPECT_EQ(a.http_status, openai) << status.to_string();
    EXPECT_EQ(a.body["error"]["type"], type);
    expect_documented(a.body, "Error");
    const ErrorAnswer b = render_error(status, ErrorStyle::kAnthropic);
    EXPECT_EQ(b.http_status, anthropic) << status.to_string();
    EXPECT_EQ(b.body["type"], "error");
    EXPECT_EQ(b.body["error"]["message"], status.message());
    expect_documented(b.body, "AnthropicError");
  };
  check(invalid_argument("x"), 400, 400, "invalid_request_error");
  check(out_of_range("x"), 400, 400, "invalid_request_error");
  check(not_found("x"), 404, 404, "not_found_error");
  check(already_exists("x"), 409, 409, "invalid_request_error");
  check(permission_denied("x"), 403, 403, "permission_error");
  check(resource_exhausted("x"), 429, 429, "rate_limit_error");
  check(failed_precondition("x"), 409, 409, "invalid_request_error");
  check(unimplemented("x"), 501, 501, "not_supported_error");
  check(unavailable("x"), 503, 529, "unavailable_error");
  check(data_loss("x"), 500, 500, "server_error");
  check(internal_error("x"), 500, 500, "server_error");
  check(cancelled("x"), 499, 499, "invalid_request_error");
}

TEST(Errors, NameTheParameter) {
  const auto param = [](const Status& status) {
    return render_error(status, ErrorStyle::kOpenAi).body["error"]["param"];
  };
  EXPECT_EQ(param(invalid_argument("messages[2].content: missing")), "messages[2].content");
  EXPECT_TRUE(param(invalid_argument("The template refuses: x")).is_null());
  EXPECT_TRUE(param(internal_error("messages: x")).is_null());
  EXPECT_EQ(render_error(out_of_range("x"), ErrorStyle::kOpenAi).body["error"]["code"],
            "context_length_exceeded");
  EXPECT_EQ(error_body(401, "no key", ErrorStyle::kOpenAi)["error"]["type"],
            "authentication_error");
  EXPECT_EQ(error_body(413, "x", ErrorStyle::kAnthropic)["error"]["type"], "request_too_large");
}

TEST(Errors, StyleFollowsThePath) {
  EXPECT_EQ(error_style("/v1/messages"), ErrorStyle::kAnthropic);
  EXPECT_EQ(error_style("/v1/messages/count_tokens"), ErrorStyle::kAnthropic);
  EXPECT_EQ(error_style("/v1/messagesx"), ErrorStyle::kOpenAi);
  EXPECT_EQ(error_style("/v1/chat/completions"), ErrorStyle::kOpenAi);
}

TEST_F(Replies, RanksAreBestFirst) {
  RerankRequest request;
  request.documents = {"a", "b", "c", "d"};
  const std::vector<Rank> ranks = {{0.5, 3}, {2, 4}, {0.5, 5}, {-1, 6}};
  const Json jina = rerank_answer(request, "m", ranks);
  expect_documented(jina, "Ranks");
  EXPECT_EQ(jina["usage"]["total_tokens"], 18);
  EXPECT_EQ(jina["results"], Json::parse(R"([{"index": 1, "relevance_score": 2.0},
      {"index": 0, "relevance_score": 0.5}, {"index": 2, "relevance_score": 0.5},
      {"index": 3, "relevance_score": -1.0}])"));
  request.tei = true;
  request.return_text = true;
  request.top_n = 2;
  const Json tei = rerank_answer(request, "m", ranks);
  expect_documented(tei, "TextRanks");
  EXPECT_EQ(tei, Json::parse(R"([{"index": 1, "score": 2.0, "text": "b"},
      {"index": 0, "score": 0.5, "text": "a"}])"));
}

TEST_F(Replies, OtherAnswersAreDocumented) {
  ModelCard card;
  card.name = "m";
  card.aliases = {"m", "n"};
  EXPECT_EQ(model_answer(card)["aliases"], Json::array({"m", "n"}));
  expect_documented(model_answer(card), "Model");
  expect_documented(models_answer(std::vector<ModelCard>{card}), "Models");
  EmbeddingRequest embed;
  const std::vector<Embedding> vectors = {{{{1.0F, -2.0F}}, 3}, {{{0.0F}}, 4}};
  const Json floats = embeddings_answer(embed, "m", vectors, 0);
  expect_documented(floats, "Embeddings");
  EXPECT_EQ(floats["usage"]["total_tokens"], 7);
  EXPECT_EQ(floats["data"][0]["embedding"], Json::array({1.0, -2.0}));
  embed.base64 = true;
  const Json coded = embeddings_answer(embed, "m", vectors, 0);
  EXPECT_EQ(coded["data"][0]["embedding"], "AACAPwAAAMA=");
  EXPECT_EQ(coded["data"][1]["embedding"], "AAAAAA==");
  embed.form = EmbeddingForm::kOllama;
  const Json ollama = embeddings_answer(embed, "m", vectors, 9);
  expect_documented(ollama, "OllamaEmbedded");
  EXPECT_EQ(ollama["embeddings"], Json::parse("[[1.0, -2.0], [0.0]]"));
  EXPECT_EQ(ollama["prompt_eval_count"], 7);
  embed.form = EmbeddingForm::kOllamaOne;
  expect_documented(embeddings_answer(embed, "m", vectors, 9), "OllamaEmbedding");
  embed.form = EmbeddingForm::kLlama;
  const std::vector<Embedding> by_token = {{{{1.0F}, {2.0F}}, 2}};
  const Json llama = embeddings_answer(embed, "m", by_token, 9);
  expect_documented(llama, "LlamaEmbeddings");
  EXPECT_EQ(llama[0]["embedding"], Json::parse("[[1.0], [2.0]]"));
  expect_documented(count_tokens_answer(5), "TokenCount");
  expect_documented(input_tokens_answer(5), "InputTokens");
  expect_documented(detokenize_answer("x"), "Text");
  expect_documented(apply_template_answer("x"), "RenderedPrompt");
  expect_documented(props_answer({}), "Props");
  expect_documented(slots_answer(std::vector<SlotState>(2)), "Slots");

  TokenizeRequest tokenize;
  const auto tokens = tokenizer_->encode("Hi 🗼").value();
  expect_documented(tokenize_answer(tokenize, *tokenizer_, tokens), "Tokens");
  tokenize.with_pieces = true;
  const Json pieces = tokenize_answer(tokenize, *tokenizer_, tokens);
  expect_documented(pieces, "Tokens");
  EXPECT_EQ(pieces["tokens"][0]["piece"], "Hi");
  EXPECT_TRUE(pieces["tokens"].back()["piece"].is_array()) << "half a character";
}

}  // namespace
}  // namespace hcache::api
