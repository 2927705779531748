// Ollama: /api/chat and /api/generate.
#include <cmath>
#include <utility>

#include "api/answers.h"
#include "api/ollama.h"
#include "reply_base.h"

namespace hcache::api {
namespace {

constexpr double kNsPerMs = 1e6;

int64_t ns_of(double ms) { return std::llround(ms * kNsPerMs); }

const char* done_reason(FinishReason reason) {
  switch (reason) {
    case FinishReason::kEnd:
    case FinishReason::kStop: return "stop";
    case FinishReason::kLength:
    case FinishReason::kCancelled: return "length";
  }
  return "stop";
}

// A line of an answer, or all of it, that is not the end.
Json said(Dialect dialect, std::string_view model, int64_t created_s,
          const model::ChatReply& reply) {
  const bool chat = dialect == Dialect::kOllamaChat;
  Json message = Json::object();
  if (chat) message["role"] = "assistant";
  message[chat ? "content" : "response"] = reply.content;
  if (!reply.reasoning.empty()) message["thinking"] = reply.reasoning;
  for (size_t i = 0; i < reply.tool_calls.size(); i++) {
    const model::ToolCall& call = reply.tool_calls[i];
    message["tool_calls"].push_back(
        {{"id", call.id},
         {"function", {{"index", i}, {"name", call.name}, {"arguments", arguments_json(call)}}}});
  }
  constexpr int64_t kNsPerSecond = 1'000'000'000;
  Json out = {{"model", model}, {"created_at", moment_text(created_s * kNsPerSecond)}};
  if (chat) {
    out["message"] = std::move(message);
  } else {
    out.update(message);
  }
  out["done"] = false;
  return out;
}

class OllamaReply : public ReplyBase {
 public:
  OllamaReply(const GenerationRequest& request, ReplyContext context)
      : ReplyBase(request, std::move(context), "call_") {}

  [[nodiscard]] std::string_view stream_type() const override { return "application/x-ndjson"; }

  [[nodiscard]] Json answer() const override {
    Json out = line(choice(0).reader.reply());
    add_logprobs(0, &out);
    add_end(&out);
    return out;
  }

  std::string fail(const Status& status) override {
    return ndjson(render_error(status, ErrorStyle::kOllama).body);
  }

 protected:
  void write_begin(const PromptCounts& /*counts*/, std::string* /*out*/) override {}

  // Calls are told when they are whole.
  void write_delta(int /*choice*/, const Delta& delta, std::string* out) override {
    if (delta.content.empty() && delta.reasoning.empty()) return;
    write({delta.content, delta.reasoning}, out);
  }

  void write_finish(int /*choice*/, std::string* out) override {
    const std::vector<model::ToolCall>& calls = choice(0).reader.reply().tool_calls;
    if (!calls.empty()) write({.tool_calls = calls}, out);
    Json last = line({});
    add_logprobs(choice(0).events_sent, &last);
    add_end(&last);
    *out += ndjson(last);
  }

  void write_end(std::string* /*out*/) override {}

 private:
  [[nodiscard]] Json line(const model::ChatReply& reply) const {
    return said(request_.dialect, context_.model_name, context_.created_s, reply);
  }

  // Tokens whose text was held back come with the next line.
  void write(const model::ChatReply& reply, std::string* out) {
    Json next = line(reply);
    add_logprobs(choice(0).events_sent, &next);
    choice(0).events_sent = choice(0).logprobs.size();
    *out += ndjson(next);
  }

  void add_logprobs(size_t from, Json* out) const {
    if (from < choice(0).logprobs.size()) {
      (*out)["logprobs"] = token_logprobs(choice(0).logprobs, from);
    }
  }

  void add_end(Json* out) const {
    const Outcome o = total();
    (*out)["done"] = true;
    (*out)["done_reason"] = done_reason(choice(0).finish.reason);
    (*out)["total_duration"] = ns_of(o.first_ms + o.reply_ms);
    (*out)["load_duration"] = ns_of(o.restore_ms);
    (*out)["prompt_eval_count"] = o.prompt_tokens;
    (*out)["prompt_eval_duration"] = ns_of(o.prompt_ms);
    (*out)["eval_count"] = o.reply_tokens;
    (*out)["eval_duration"] = ns_of(o.reply_ms);
    (*out)["hcache"] = outcome_json(o);
  }
};

}  // namespace

Json ollama_load_answer(const GenerationRequest& request, std::string_view model_name,
                        int64_t created_s) {
  Json out = said(request.dialect, model_name, created_s, {});
  out["done"] = true;
  out["done_reason"] = "load";
  return out;
}

std::unique_ptr<ReplyBuilder> make_ollama_reply(const GenerationRequest& request,
                                                ReplyContext context) {
  return std::make_unique<OllamaReply>(request, std::move(context));
}

}  // namespace hcache::api
