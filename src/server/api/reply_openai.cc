// OpenAI: /v1/chat/completions and /v1/completions.
#include <fmt/format.h>

#include <utility>

#include "reply_base.h"

namespace hcache::api {
namespace {

Json usage_json(const Outcome& o) {
  return {{"prompt_tokens", o.prompt_tokens},
          {"completion_tokens", o.reply_tokens},
          {"total_tokens", o.prompt_tokens + o.reply_tokens},
          {"prompt_tokens_details", {{"cached_tokens", o.cached()}}}};
}

std::string finish_reason(const Choice& c) {
  switch (c.finish.reason) {
    case FinishReason::kEnd:
    case FinishReason::kStop: return c.reader.reply().tool_calls.empty() ? "stop" : "tool_calls";
    case FinishReason::kLength:
    case FinishReason::kCancelled: return "length";
  }
  return "stop";
}

// What both endpoints' answers and chunks begin with.
class OpenAiReply : public ReplyBase {
 protected:
  OpenAiReply(const GenerationRequest& request, ReplyContext context, const char* id_prefix,
              const char* object, const char* object_of_chunks)
      : ReplyBase(request, std::move(context), "call_"),
        id_prefix_(id_prefix),
        object_(object),
        object_of_chunks_(object_of_chunks) {}

  [[nodiscard]] Json head(const std::string& object) const {
    return {{"id", id(id_prefix_)},
            {"object", object},
            {"created", context_.created_s},
            {"model", context_.model_name},
            {"system_fingerprint", context_.fingerprint}};
  }

  [[nodiscard]] Json whole(Json choices) const {
    Json out = head(object_);
    const Outcome sum = total();
    out["choices"] = std::move(choices);
    out["usage"] = usage_json(sum);
    out["timings"] = timings_json(sum);
    out["hcache"] = outcome_json(sum);
    if (request_.verbose) out["__verbose"] = llama_json(0, choice(0).reader.reply().content);
    return out;
  }

  std::string progress(const PromptProgress& progress) override {
    Json out = chunk(object_of_chunks_, {{"index", 0},
                                         {"delta", Json::object()},
                                         {"logprobs", nullptr},
                                         {"finish_reason", nullptr}});
    out["prompt_progress"] = progress_json(progress);
    if (request_.timings_per_token) out["timings"] = progress_timings_json(progress);
    return sse(out);
  }

  [[nodiscard]] Json chunk(const std::string& object, Json choice_json) const {
    Json out = head(object);
    out["choices"] = Json::array({std::move(choice_json)});
    if (request_.include_usage) out["usage"] = nullptr;
    return out;
  }

  void write_last_chunk(const std::string& object, int index, Json choice_json, std::string* out) {
    Json last = chunk(object, std::move(choice_json));
    last["timings"] = timings_json(choice(index).finish.outcome);
    last["hcache"] = outcome_json(choice(index).finish.outcome);
    if (request_.verbose) last["__verbose"] = llama_json(index, "");
    *out += sse(last);
  }

  void write_usage(const std::string& object, std::string* out) {
    if (request_.include_usage) {
      Json last = head(object);
      last["choices"] = Json::array();
      const Outcome sum = total();
      last["usage"] = usage_json(sum);
      last["timings"] = timings_json(sum);
      *out += sse(last);
    }
    *out += "data: [DONE]\n\n";
  }

  const char* id_prefix_;
  const char* object_;
  const char* object_of_chunks_;
};

class ChatReplyBuilder : public OpenAiReply {
 public:
  ChatReplyBuilder(const GenerationRequest& request, ReplyContext context)
      : OpenAiReply(request, std::move(context), "chatcmpl-", "chat.completion", kChunk) {}

  [[nodiscard]] Json answer() const override {
    Json choices = Json::array();
    for (int i = 0; i < count(); i++) {
      const Choice& c = choice(i);
      choices.push_back({{"index", i},
                         {"message", message_json(c.reader.reply())},
                         {"logprobs", logprobs_json(c, 0)},
                         {"finish_reason", finish_reason(c)}});
    }
    return whole(std::move(choices));
  }

 protected:
  void write_begin(const PromptCounts& /*counts*/, std::string* out) override {
    for (int i = 0; i < count(); i++) {
      *out += sse(chunk(kChunk, choice_json(i, {{"role", "assistant"}, {"content", nullptr}})));
    }
  }

  void write_delta(int i, const Delta& delta, std::string* out) override {
    if (!delta.reasoning.empty()) write(i, {{"reasoning_content", delta.reasoning}}, out);
    if (!delta.content.empty()) write(i, {{"content", delta.content}}, out);
    for (const CallDelta& call : delta.calls) {
      Json part = {{"index", call.index}};
      if (!call.name.empty()) {
        part["id"] = call.id;
        part["type"] = "function";
        part["function"]["name"] = call.name;
      }
      part["function"]["arguments"] = call.arguments;
      write(i, {{"tool_calls", Json::array({part})}}, out);
    }
  }

  void write_finish(int i, std::string* out) override {
    Json last = choice_json(i, Json::object());
    last["finish_reason"] = finish_reason(choice(i));
    write_last_chunk(kChunk, i, std::move(last), out);
  }

  void write_end(std::string* out) override { write_usage(kChunk, out); }

 private:
  static constexpr const char* kChunk = "chat.completion.chunk";

  static Json message_json(const model::ChatReply& reply) {
    Json out = {{"role", "assistant"}, {"content", reply.content}};
    if (!reply.reasoning.empty()) out["reasoning_content"] = reply.reasoning;
    if (reply.tool_calls.empty()) return out;
    if (reply.content.empty()) out["content"] = nullptr;
    for (const model::ToolCall& call : reply.tool_calls) {
      out["tool_calls"].push_back(
          {{"id", call.id},
           {"type", "function"},
           {"function", {{"name", call.name}, {"arguments", call.arguments}}}});
    }
    return out;
  }

  [[nodiscard]] Json logprobs_json(const Choice& c, size_t from) const {
    if (!request_.logprobs) return nullptr;
    return {{"content", token_logprobs(c.logprobs, from)}, {"refusal", nullptr}};
  }

  // Tokens whose text was held back come with the next chunk.
  Json choice_json(int i, Json delta) {
    Choice& c = choice(i);
    Json logprobs = logprobs_json(c, c.events_sent);
    c.events_sent = c.logprobs.size();
    return {{"index", i},
            {"delta", std::move(delta)},
            {"logprobs", std::move(logprobs)},
            {"finish_reason", nullptr}};
  }

  void write(int i, Json delta, std::string* out) {
    Json event = chunk(kChunk, choice_json(i, std::move(delta)));
    if (request_.timings_per_token) event["timings"] = timings_so_far(choice(i));
    *out += sse(event);
  }
};

class CompletionReplyBuilder : public OpenAiReply {
 public:
  CompletionReplyBuilder(const GenerationRequest& request, ReplyContext context)
      : OpenAiReply(request, std::move(context), "cmpl-", "text_completion", "text_completion"),
        offsets_(static_cast<size_t>(count()), 0) {}

  [[nodiscard]] Json answer() const override {
    Json choices = Json::array();
    for (int i = 0; i < count(); i++) {
      size_t offset = 0;
      choices.push_back({{"index", i},
                         {"text", choice(i).reader.reply().content},
                         {"logprobs", logprobs_json(choice(i), 0, &offset)},
                         {"finish_reason", finish_reason(choice(i))}});
    }
    return whole(std::move(choices));
  }

 protected:
  void write_begin(const PromptCounts& /*counts*/, std::string* /*out*/) override {}

  void write_delta(int i, const Delta& delta, std::string* out) override {
    Json event = chunk(object_, choice_json(i, delta.content));
    if (request_.timings_per_token) event["timings"] = timings_so_far(choice(i));
    *out += sse(event);
  }

  void write_finish(int i, std::string* out) override {
    Json last = choice_json(i, "");
    last["finish_reason"] = finish_reason(choice(i));
    write_last_chunk(object_, i, std::move(last), out);
  }

  void write_end(std::string* out) override { write_usage(object_, out); }

 private:
  // `offset`: of the next token in the text, in bytes.
  [[nodiscard]] Json logprobs_json(const Choice& c, size_t from, size_t* offset) const {
    if (!request_.logprobs) return nullptr;
    Json out = {{"tokens", Json::array()},
                {"token_logprobs", Json::array()},
                {"top_logprobs", Json::array()},
                {"text_offset", Json::array()}};
    for (size_t t = from; t < c.logprobs.size(); t++) {
      const TokenEvent& event = c.logprobs[t];
      out["tokens"].push_back(valid_text(event.chosen.bytes));
      out["token_logprobs"].push_back(finite(event.chosen.logprob));
      Json top = Json::object();
      for (const TokenInfo& info : event.top) top[valid_text(info.bytes)] = finite(info.logprob);
      out["top_logprobs"].push_back(std::move(top));
      out["text_offset"].push_back(*offset);
      *offset += event.chosen.bytes.size();
    }
    return out;
  }

  Json choice_json(int i, std::string text) {
    Choice& c = choice(i);
    Json logprobs = logprobs_json(c, c.events_sent, &offsets_[static_cast<size_t>(i)]);
    c.events_sent = c.logprobs.size();
    return {{"index", i},
            {"text", std::move(text)},
            {"logprobs", std::move(logprobs)},
            {"finish_reason", nullptr}};
  }

  std::vector<size_t> offsets_;
};

}  // namespace

std::unique_ptr<ReplyBuilder> make_chat_reply(const GenerationRequest& request,
                                              ReplyContext context) {
  return std::make_unique<ChatReplyBuilder>(request, std::move(context));
}

std::unique_ptr<ReplyBuilder> make_completion_reply(const GenerationRequest& request,
                                                    ReplyContext context) {
  return std::make_unique<CompletionReplyBuilder>(request, std::move(context));
}

}  // namespace hcache::api
