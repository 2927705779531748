// Anthropic: /v1/messages and /v1/messages/count_tokens.
#include <fmt/format.h>

#include <utility>

#include "request_fields.h"

namespace hcache::api {
namespace {

using model::ChatInput;
using model::ChatMessage;
using model::ToolCall;
using model::ToolChoice;

const std::vector<std::string> kTextParts = {"text"};

void append(std::string* text, const std::string& more) {
  const bool behind_text = !text->empty() && !text->ends_with(model::kMediaMarker);
  if (behind_text && !more.empty()) *text += "\n";
  *text += more;
}

// A message as it is collected from its blocks. Results of tools become messages of their own.
struct Turn {
  ChatMessage message;
  std::vector<ChatMessage> results;
};

// Others than volatile_text.h's do nothing.
void cache_control_field(Fields& f) {
  f.value("cache_control", cache_control_schema(), {},
          [](const Json& /*value*/, const std::string& /*path*/) { return Status(); });
}

void text_block(Fields& f, Turn* turn) {
  std::string text;
  f.required().text("text", &text, {});
  cache_control_field(f);
  append(&turn->message.content, text);
}

void image_block(Fields& f, Turn* turn) {
  model::Medium medium;
  image_source_field(f, &medium);
  cache_control_field(f);
  append_medium(std::move(medium), &turn->message);
}

void thinking_block(Fields& f, Turn* turn) {
  std::string text;
  f.required().text("thinking", &text, {});
  append(&turn->message.reasoning, text);
}

void redacted_block(Fields& /*f*/, Turn* /*turn*/) {}  // nobody can read it

void call_block(Fields& f, Turn* turn) {
  ToolCall call;
  f.required().text("id", &call.id, {});
  f.required().text("name", &call.name, {});
  f.required().schema("input", &call.arguments, "The arguments.");
  turn->message.tool_calls.push_back(std::move(call));
}

void result_block(Fields& f, Turn* turn) {
  ChatMessage result{"tool"};
  f.required().text("tool_use_id", &result.tool_call_id, {});
  f.value("content", message_content_schema(kTextParts), {},
          [&](const Json& value, const std::string& path) {
            return read_message_content(value, path, kTextParts, &result);
          });
  bool failed = false;
  f.flag("is_error", &failed, {});
  if (failed) result.content = "Error: " + result.content;
  turn->results.push_back(std::move(result));
}

struct Block {
  const char* type;
  void (*declare)(Fields&, Turn*);
};
constexpr Block kBlocks[] = {{"text", text_block},         {"image", image_block},
                             {"thinking", thinking_block}, {"redacted_thinking", redacted_block},
                             {"tool_use", call_block},     {"tool_result", result_block}};

Status read_block(const Json& value, const std::string& path, Turn* turn) {
  Fields f(value, path);
  std::string type;
  f.required().text("type", &type, {});
  if (!f.ok()) return f.status();
  for (const Block& block : kBlocks) {
    if (type != block.type) continue;
    block.declare(f, turn);
    return f.status();
  }
  f.fail("type", fmt::format("blocks of type '{}' are not supported", type.substr(0, 64)));
  return f.status();
}

Status read_blocks(const Json& value, const std::string& path, Turn* turn) {
  if (value.is_string()) {
    turn->message.content = value.get<std::string>();
    return {};
  }
  if (!value.is_array()) return wrong_kind(path, "a string or an array of blocks", value);
  for (size_t i = 0; i < value.size(); i++) {
    HCACHE_RETURN_IF_ERROR(read_block(value[i], fmt::format("{}[{}]", path, i), turn));
  }
  return {};
}

Json blocks_schema() {
  Json kinds = Json::array();
  for (const Block& block : kBlocks) {
    kinds.push_back(describe_fields([&](Fields& f) {
      Turn turn;
      std::string type;
      f.required().one_of("type", &type, {block.type}, {});
      block.declare(f, &turn);
    }));
  }
  return {
      {"oneOf", Json::array({Json{{"type", "string"}},
                             Json{{"type", "array"}, {"items", {{"oneOf", std::move(kinds)}}}}})}};
}

void message_fields(Fields& f, ChatInput* chat) {
  Turn turn;
  f.required().one_of("role", &turn.message.role, {"user", "assistant", "system"}, {});
  f.required().value(
      "content", blocks_schema(), "Text, or blocks; cache_control is accepted.",
      [&](const Json& value, const std::string& path) { return read_blocks(value, path, &turn); });
  const bool only_results = turn.message.content.empty() && !turn.results.empty();
  for (ChatMessage& result : turn.results) chat->messages.push_back(std::move(result));
  if (!only_results) chat->messages.push_back(std::move(turn.message));
}

void choice_fields(Fields& f, ChatInput* chat) {
  std::string type;
  f.required().one_of("type", &type, {"auto", "any", "tool", "none"}, {});
  f.text("name", &chat->only_tool, "With type tool: which.");
  bool single = false;
  f.flag("disable_parallel_tool_use", &single, {});
  chat->parallel_tool_calls = !single;
  if (type == "tool" && chat->only_tool.empty()) f.fail("name", "missing");
  if (type != "tool") chat->only_tool.clear();
  if (type == "none") chat->tool_choice = ToolChoice::kNone;
  if (type == "any" || type == "tool") chat->tool_choice = ToolChoice::kRequired;
}

void conversation_fields(Fields& f, GenerationRequest* r) {
  r->dialect = Dialect::kMessages;
  ChatInput& chat = r->chat.emplace();
  model_field(f, r);
  std::string system;
  f.value("system", content_schema(kTextParts), "Text, or blocks of it.",
          [&](const Json& value, const std::string& path) {
            return read_content(value, path, kTextParts, &system);
          });
  if (!system.empty()) chat.messages.push_back({"system", std::move(system)});
  const size_t before = chat.messages.size();
  f.required().objects("messages", "The conversation; the answer is its next message.",
                       [&](Fields& o) { message_fields(o, &chat); });
  if (f.ok() && chat.messages.size() == before) f.fail("messages", "empty");
  f.objects("tools", "What the model may call.", [&](Fields& o) {
    std::string type = "custom";
    model::ChatTool tool;
    o.one_of("type", &type, {"custom"}, "Tools that run on the server are not supported.");
    function_fields(o, &tool, "input_schema");
    chat.tools.push_back(std::move(tool));
  });
  f.object("tool_choice", "Whether it may, must not or must; or which.",
           [&](Fields& o) { choice_fields(o, &chat); });
  f.object("thinking", "Whether the model thinks first, where it can.", [&](Fields& o) {
    std::string type;
    o.required().one_of("type", &type, {"enabled", "disabled", "adaptive"}, {});
    int64_t budget = 0;
    o.integer("budget_tokens", &budget, {0, Range().max}, "Accepted, but not enforced.");
    chat.thinking = type != "disabled";
  });
  template_fields(f, &chat);
}

}  // namespace

void count_tokens_fields(Fields& f, GenerationRequest* r) {
  conversation_fields(f, r);
  check_tools(f, *r);
}

// Whoever lets a conversation be shortened would rather have it cut than refused.
void context_fields(Fields& f, GenerationRequest* r) {
  f.object("context_management",
           "Where it names an edit, truncation is auto, unless the request says otherwise. Nothing "
           "is cleared before the context is full.",
           [&](Fields& context) {
             context.objects("edits", "How the conversation may be shortened.", [&](Fields& edit) {
               std::string type;
               edit.required().text("type", &type, "Of the edit; any.");
               r->edits_context = true;
             });
           });
  if (r->edits_context && !r->truncate) r->truncate = true;
}

void messages_fields(Fields& f, GenerationRequest* r) {
  conversation_fields(f, r);
  r->include_usage = true;
  limit_field(f, r, "max_tokens");
  stop_field(f, r, "stop_sequences");
  f.object("metadata", "Of the request.",
           [&](Fields& o) { o.text("user_id", &r->user, "Who asks.", size_t{512}); });
  sampling_fields(f, r);
  model::ChatInput& chat = *r->chat;
  chat.json_schema = std::exchange(r->sampling.json_schema, {});
  stream_fields(f, r);
  cache_fields(f, r);
  context_fields(f, r);
  check_tools(f, *r);
}

Result<GenerationRequest> parse_messages(const Json& body, const Defaults& defaults) {
  return read_request(body, defaults, messages_fields);
}

Result<model::ChatInput> parse_count_tokens(const Json& body) {
  GenerationRequest r;
  HCACHE_RETURN_IF_ERROR(read_prompt_body(body, [&](Fields& f) { count_tokens_fields(f, &r); }));
  return *std::move(r.chat);
}

}  // namespace hcache::api
