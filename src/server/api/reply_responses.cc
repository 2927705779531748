// OpenAI: /v1/responses.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "reply_base.h"

namespace hcache::api {
namespace {

Json text_part(const std::string& text, Json logprobs) {
  return {{"type", "output_text"},
          {"text", text},
          {"annotations", Json::array()},
          {"logprobs", std::move(logprobs)}};
}

// The tokens that the answer's text is made of: not the model's thoughts, tool calls or markers.
Json text_logprobs(const Choice& c) {
  std::string all;
  for (const TokenEvent& event : c.logprobs) all += event.chosen.bytes;
  const std::string& text = c.reader.reply().content;
  const size_t begin = std::min(all.rfind(text), all.size());
  const size_t end = begin + text.size();
  std::vector<TokenEvent> events;
  size_t at = 0;
  for (const TokenEvent& event : c.logprobs) {
    const size_t next = at + event.chosen.bytes.size();
    if (at < end && next > begin) events.push_back(event);
    at = next;
  }
  return token_logprobs(events, 0);
}

class ResponseReply : public ReplyBase {
 public:
  ResponseReply(const GenerationRequest& request, ReplyContext context)
      : ReplyBase(request, std::move(context), "call_") {}

  [[nodiscard]] Json answer() const override {
    const bool cut = choice(0).finish.reason == FinishReason::kLength ||
                     choice(0).finish.reason == FinishReason::kCancelled;
    Json out = head(cut ? "incomplete" : "completed");
    if (cut) out["incomplete_details"] = {{"reason", "max_output_tokens"}};
    out["output"] = output_json();
    const Outcome sum = total();
    out["usage"] = {{"input_tokens", sum.prompt_tokens},
                    {"input_tokens_details", {{"cached_tokens", sum.cached()}}},
                    {"output_tokens", sum.reply_tokens},
                    {"output_tokens_details", {{"reasoning_tokens", 0}}},
                    {"total_tokens", sum.prompt_tokens + sum.reply_tokens}};
    out["timings"] = timings_json(sum);
    out["hcache"] = outcome_json(sum);
    return out;
  }

  std::string progress(const PromptProgress& progress) override {
    std::string out;
    write("response.in_progress",
          {{"response", head("in_progress")}, {"prompt_progress", progress_json(progress)}}, &out);
    return out;
  }

  std::string fail(const Status& status) override {
    Json response = head("failed");
    response["error"] = {{"code", "server_error"}, {"message", status.message()}};
    std::string out;
    write("response.failed", {{"response", std::move(response)}}, &out);
    return out;
  }

 protected:
  void write_begin(const PromptCounts& /*counts*/, std::string* out) override {
    write("response.created", {{"response", head("in_progress")}}, out);
    write("response.in_progress", {{"response", head("in_progress")}}, out);
  }

  void write_delta(int /*choice*/, const Delta& delta, std::string* out) override {
    Choice& c = choice(0);
    // Tokens whose text was held back come with the next piece of text.
    const size_t from = std::exchange(c.events_sent, c.logprobs.size());
    if (!delta.reasoning.empty()) {
      open(Kind::kReasoning, 0, out);
      write_part("response.reasoning_text.delta", {{"delta", delta.reasoning}}, out);
    }
    if (!delta.content.empty()) {
      open(Kind::kMessage, 0, out);
      Json part = {{"delta", delta.content}, {"logprobs", token_logprobs(c.logprobs, from)}};
      if (request_.timings_per_token) part["timings"] = timings_so_far(c);
      write_part("response.output_text.delta", std::move(part), out);
    }
    for (const CallDelta& call : delta.calls) {
      open(Kind::kCall, call.index, out);
      if (call.arguments.empty()) continue;
      write(
          "response.function_call_arguments.delta",
          {{"item_id", item_id(kind_, call_)}, {"output_index", index_}, {"delta", call.arguments}},
          out);
    }
  }

  void write_finish(int /*choice*/, std::string* out) override { close(out); }

  void write_end(std::string* out) override {
    Json response = answer();
    const std::string status = response["status"];
    Json timings = response["timings"];
    write(fmt::format("response.{}", status),
          {{"response", std::move(response)}, {"timings", std::move(timings)}}, out);
  }

 private:
  enum class Kind { kNone, kReasoning, kMessage, kCall };

  [[nodiscard]] Json head(const std::string& status) const {
    Json tools = Json::array();
    for (const model::ChatTool& tool : request_.chat->tools) {
      Json parameters = Json::parse(tool.parameters, nullptr, /*allow_exceptions=*/false);
      if (!parameters.is_object()) parameters = Json::object();
      tools.push_back({{"type", "function"},
                       {"name", tool.name},
                       {"description", tool.description},
                       {"parameters", std::move(parameters)},
                       {"strict", true}});
    }
    const auto& previous = request_.previous_response_id;
    const auto& conversation = request_.conversation_id;
    return {
        {"id", id("resp_")},
        {"object", "response"},
        {"created_at", context_.created_s},
        {"status", status},
        {"error", nullptr},
        {"incomplete_details", nullptr},
        {"model", context_.model_name},
        {"output", Json::array()},
        {"previous_response_id", previous.empty() ? Json(nullptr) : Json(previous)},
        {"conversation", conversation.empty() ? Json(nullptr) : Json{{"id", conversation}}},
        {"store", request_.store},
        {"prompt_cache_key", request_.cache_key.empty() ? Json(nullptr) : Json(request_.cache_key)},
        {"prompt_cache_retention", retention_name()},
        {"top_logprobs", request_.top_logprobs},
        {"parallel_tool_calls", request_.chat->parallel_tool_calls},
        {"tool_choice", choice_name()},
        {"tools", std::move(tools)}};
  }

  [[nodiscard]] Json retention_name() const {
    switch (request_.retention) {
      case Retention::kDefault: return nullptr;
      case Retention::kMemory: return "in_memory";
      case Retention::kDay: return "24h";
    }
    return nullptr;
  }

  [[nodiscard]] std::string choice_name() const {
    switch (request_.chat->tool_choice) {
      case model::ToolChoice::kAuto: return "auto";
      case model::ToolChoice::kNone: return "none";
      case model::ToolChoice::kRequired: return "required";
    }
    return "auto";
  }

  [[nodiscard]] std::string item_id(Kind kind, size_t call) const {
    switch (kind) {
      case Kind::kReasoning: return id("rs_");
      case Kind::kCall: return fmt::format("{}_{}", id("fc_"), call);
      case Kind::kNone:
      case Kind::kMessage: break;
    }
    return id("msg_");
  }

  // An item of the output as it stands in the reply so far.
  [[nodiscard]] Json item_json(Kind kind, size_t call, const char* status) const {
    const model::ChatReply& reply = choice(0).reader.reply();
    Json out = {{"id", item_id(kind, call)}, {"status", status}};
    const bool begun = std::string_view(status) == "in_progress";
    if (kind == Kind::kReasoning) {
      out["type"] = "reasoning";
      out["summary"] = Json::array();
      out["content"] = Json::array();
      if (!begun) out["content"].push_back({{"type", "reasoning_text"}, {"text", reply.reasoning}});
    } else if (kind == Kind::kMessage) {
      out["type"] = "message";
      out["role"] = "assistant";
      out["content"] = Json::array();
      if (!begun) out["content"].push_back(text_part(reply.content, text_logprobs(choice(0))));
    } else {
      const model::ToolCall& tool_call = reply.tool_calls.at(call);
      out["type"] = "function_call";
      out["call_id"] = tool_call.id;
      out["name"] = tool_call.name;
      out["arguments"] = begun ? std::string() : tool_call.arguments;
    }
    return out;
  }

  [[nodiscard]] Json output_json() const {
    const model::ChatReply& reply = choice(0).reader.reply();
    Json out = Json::array();
    if (!reply.reasoning.empty()) out.push_back(item_json(Kind::kReasoning, 0, "completed"));
    if (!reply.content.empty()) out.push_back(item_json(Kind::kMessage, 0, "completed"));
    for (size_t i = 0; i < reply.tool_calls.size(); i++) {
      out.push_back(item_json(Kind::kCall, i, "completed"));
    }
    return out;
  }

  void write(const std::string& type, Json data, std::string* out) {
    Json event = {{"type", type}, {"sequence_number", sequence_++}};
    event.update(data);
    *out += sse(type, event);
  }

  // Of the open item's only part.
  void write_part(const char* type, Json data, std::string* out) {
    Json event = {
        {"item_id", item_id(kind_, call_)}, {"output_index", index_}, {"content_index", 0}};
    event.update(data);
    write(type, std::move(event), out);
  }

  void open(Kind kind, size_t call, std::string* out) {
    if (kind_ == kind && call_ == call) return;
    close(out);
    kind_ = kind;
    call_ = call;
    write("response.output_item.added",
          {{"output_index", index_}, {"item", item_json(kind, call, "in_progress")}}, out);
    if (kind == Kind::kMessage) {
      write_part("response.content_part.added", {{"part", text_part("", Json::array())}}, out);
    }
  }

  void close(std::string* out) {
    if (kind_ == Kind::kNone) return;
    const model::ChatReply& reply = choice(0).reader.reply();
    if (kind_ == Kind::kReasoning) {
      write_part("response.reasoning_text.done", {{"text", reply.reasoning}}, out);
    } else if (kind_ == Kind::kMessage) {
      write_part("response.output_text.done",
                 {{"text", reply.content}, {"logprobs", text_logprobs(choice(0))}}, out);
      write_part("response.content_part.done",
                 {{"part", text_part(reply.content, text_logprobs(choice(0)))}}, out);
    } else {
      write("response.function_call_arguments.done",
            {{"item_id", item_id(kind_, call_)},
             {"output_index", index_},
             {"arguments", reply.tool_calls.at(call_).arguments}},
            out);
    }
    write("response.output_item.done",
          {{"output_index", index_}, {"item", item_json(kind_, call_, "completed")}}, out);
    kind_ = Kind::kNone;
    index_++;
  }

  Kind kind_ = Kind::kNone;  // of the item that is open
  size_t call_ = 0;          // which call, when it is one
  int index_ = 0;            // of that item in the output, or of the next one
  int sequence_ = 0;         // of the next event
};

}  // namespace

std::unique_ptr<ReplyBuilder> make_response_reply(const GenerationRequest& request,
                                                  ReplyContext context) {
  return std::make_unique<ResponseReply>(request, std::move(context));
}

}  // namespace hcache::api
