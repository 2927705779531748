// Anthropic: /v1/messages.
#include <algorithm>
#include <utility>

#include "reply_base.h"

namespace hcache::api {
namespace {

class MessagesReply : public ReplyBase {
 public:
  MessagesReply(const GenerationRequest& request, ReplyContext context)
      : ReplyBase(request, std::move(context), "toolu_") {}

  [[nodiscard]] Json answer() const override {
    const model::ChatReply& reply = choice(0).reader.reply();
    Json content = Json::array();
    if (!reply.reasoning.empty()) {
      content.push_back({{"type", "thinking"}, {"thinking", reply.reasoning}, {"signature", ""}});
    }
    if (!reply.content.empty()) content.push_back({{"type", "text"}, {"text", reply.content}});
    for (const model::ToolCall& call : reply.tool_calls) {
      content.push_back({{"type", "tool_use"},
                         {"id", call.id},
                         {"name", call.name},
                         {"input", arguments_json(call)}});
    }
    Json out = head(std::move(content));
    add_stop(&out);
    out["usage"] = usage_json();
    add_outcome(&out);
    return out;
  }

 protected:
  void write_begin(const PromptCounts& counts, std::string* out) override {
    Json message = head(Json::array());
    message["stop_reason"] = nullptr;
    message["stop_sequence"] = nullptr;
    message["usage"] = usage_json(counts, 0);
    write("message_start", {{"message", std::move(message)}}, out);
  }

  void write_delta(int /*choice*/, const Delta& delta, std::string* out) override {
    if (!delta.reasoning.empty()) {
      open("thinking", {{"type", "thinking"}, {"thinking", ""}, {"signature", ""}}, out);
      write_part({{"type", "thinking_delta"}, {"thinking", delta.reasoning}}, out);
    }
    if (!delta.content.empty()) {
      open("text", {{"type", "text"}, {"text", ""}}, out);
      write_part({{"type", "text_delta"}, {"text", delta.content}}, out);
    }
    for (const CallDelta& call : delta.calls) {
      if (!call.name.empty()) {
        close(out);
        open(
            "tool_use",
            {{"type", "tool_use"}, {"id", call.id}, {"name", call.name}, {"input", Json::object()}},
            out);
      }
      if (call.arguments.empty()) continue;
      write_part({{"type", "input_json_delta"}, {"partial_json", call.arguments}}, out);
    }
  }

  void write_finish(int /*choice*/, std::string* out) override { close(out); }

  void write_end(std::string* out) override {
    Json delta = Json::object();
    add_stop(&delta);
    Json last = {{"delta", std::move(delta)}, {"usage", usage_json()}};
    add_outcome(&last);
    write("message_delta", std::move(last), out);
    write("message_stop", Json::object(), out);
  }

 private:
  [[nodiscard]] Json head(Json content) const {
    return {{"id", id("msg_")},
            {"type", "message"},
            {"role", "assistant"},
            {"model", context_.model_name},
            {"content", std::move(content)}};
  }

  void add_stop(Json* out) const {
    const Choice& c = choice(0);
    const Finish& finish = c.finish;
    std::string reason = "end_turn";
    if (finish.reason == FinishReason::kLength || finish.reason == FinishReason::kCancelled) {
      reason = "max_tokens";
    } else if (!c.reader.reply().tool_calls.empty()) {
      reason = "tool_use";
    } else if (finish.reason == FinishReason::kStop) {
      reason = "stop_sequence";
    }
    (*out)["stop_reason"] = reason;
    (*out)["stop_sequence"] =
        finish.reason == FinishReason::kStop ? Json(finish.stop_string) : Json(nullptr);
  }

  // Tokens are counted once: read from the cache, put into it, or neither, as at least the last
  // one.
  [[nodiscard]] Json usage_json() const {
    const Outcome o = total();
    return usage_json({.tokens = o.prompt_tokens, .cached = o.cached(), .saved = o.saved},
                      o.reply_tokens);
  }
  static Json usage_json(const PromptCounts& counts, int64_t reply_tokens) {
    const int64_t others = counts.tokens - counts.cached;
    const int64_t created = std::clamp<int64_t>(counts.saved, 0, std::max<int64_t>(others - 1, 0));
    return {{"input_tokens", others - created},
            {"cache_creation_input_tokens", created},
            {"cache_read_input_tokens", counts.cached},
            {"output_tokens", reply_tokens}};
  }

  void add_outcome(Json* out) const {
    const Outcome sum = total();
    (*out)["hcache"] = outcome_json(sum);
    if (request_.edits_context) {
      (*out)["context_management"] = {{"applied_edits", Json::array()}};  // none is made, we cut
    }
  }

  static void write(const char* type, Json data, std::string* out) {
    Json event = {{"type", type}};
    event.update(data);
    *out += sse(type, event);
  }

  void write_part(Json delta, std::string* out) {
    write("content_block_delta", {{"index", index_}, {"delta", std::move(delta)}}, out);
  }

  // Begins a block of this kind unless one is open.
  void open(const std::string& kind, Json block, std::string* out) {
    if (kind == open_) return;
    close(out);
    open_ = kind;
    write("content_block_start", {{"index", index_}, {"content_block", std::move(block)}}, out);
  }

  void close(std::string* out) {
    if (open_.empty()) return;
    if (open_ == "thinking") write_part({{"type", "signature_delta"}, {"signature", ""}}, out);
    write("content_block_stop", {{"index", index_}}, out);
    open_.clear();
    index_++;
  }

  std::string open_;  // the kind of the block that is open; empty: none
  int index_ = 0;     // of that block, or of the next one
};

}  // namespace

std::unique_ptr<ReplyBuilder> make_messages_reply(const GenerationRequest& request,
                                                  ReplyContext context) {
  return std::make_unique<MessagesReply>(request, std::move(context));
}

}  // namespace hcache::api
