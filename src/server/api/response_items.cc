#include "response_items.h"

#include <fmt/format.h>

#include <utility>
#include <vector>

#include "api/conversations.h"
#include "request_fields.h"

namespace hcache::api {
namespace {

using model::ChatInput;
using model::ChatMessage;
using model::ToolCall;

const std::vector<std::string> kTextParts = {"input_text", "output_text", "text", "refusal"};
const std::vector<std::string> kReasoningParts = {"reasoning_text", "text"};

// The assistant's turn may come as several items: thoughts, text, calls.
ChatMessage& assistant_turn(ChatInput* chat) {
  if (chat->messages.empty() || chat->messages.back().role != "assistant") {
    chat->messages.push_back({"assistant"});
  }
  return chat->messages.back();
}

void message_item(Fields& f, ChatInput* chat) {
  ChatMessage message;
  f.required().one_of("role", &message.role, {"system", "developer", "user", "assistant"}, {});
  f.required().value("content", message_content_schema(kTextParts), {},
                     [&](const Json& value, const std::string& path) {
                       return read_message_content(value, path, kTextParts, &message);
                     });
  const bool continues = message.role == "assistant" && !chat->messages.empty() &&
                         chat->messages.back().role == "assistant" &&
                         chat->messages.back().content.empty();
  if (continues) {
    chat->messages.back().content = std::move(message.content);
  } else {
    chat->messages.push_back(std::move(message));
  }
}

void call_item(Fields& f, ChatInput* chat) {
  ToolCall call;
  f.required().text("call_id", &call.id, {});
  f.required().text("name", &call.name, {});
  f.required().text("arguments", &call.arguments, {});
  assistant_turn(chat).tool_calls.push_back(std::move(call));
}

void result_item(Fields& f, ChatInput* chat) {
  ChatMessage message{"tool"};
  f.required().text("call_id", &message.tool_call_id, {});
  f.required().value("output", message_content_schema(kTextParts), {},
                     [&](const Json& value, const std::string& path) {
                       return read_message_content(value, path, kTextParts, &message);
                     });
  chat->messages.push_back(std::move(message));
}

void reasoning_item(Fields& f, ChatInput* chat) {
  ChatMessage& turn = assistant_turn(chat);
  f.value("content", content_schema(kReasoningParts), {},
          [&](const Json& value, const std::string& path) {
            return read_content(value, path, kReasoningParts, &turn.reasoning);
          });
}

Json schema_of(const char* type, void (*declare)(Fields&, ChatInput*)) {
  Json schema = describe_fields([&](Fields& f) {
    ChatInput chat;
    std::string name;
    f.required().one_of("type", &name, {type}, {});
    declare(f, &chat);
  });
  return schema;
}

// Null counts as absent.
std::string text_of(const Json& item, const char* name) {
  const auto found = item.find(name);
  return found == item.end() || !found->is_string() ? std::string() : found->get<std::string>();
}

// A text, or parts, as parts with what OpenAI's have.
Json kept_parts(const Json& content, const char* type_of_text) {
  Json parts = Json::array();
  const auto add = [&](const std::string& type, const std::string& text) {
    Json part = {{"type", type}, {type == "refusal" ? "refusal" : "text", text}};
    if (type == "output_text") part["annotations"] = Json::array();
    parts.push_back(std::move(part));
  };
  if (content.is_string()) add(type_of_text, content.get<std::string>());
  if (!content.is_array()) return parts;
  for (const Json& part : content) {
    const std::string type = text_of(part, "type");
    if (!part.contains(type == "refusal" ? "refusal" : "text")) {
      parts.push_back(part);  // a picture
      continue;
    }
    add(type, text_of(part, type == "refusal" ? "refusal" : "text"));
  }
  return parts;
}

struct Kind {
  const char* type;
  const char* id_prefix;
  void (*declare)(Fields&, ChatInput*);
};
constexpr Kind kKinds[] = {{"message", "msg_", message_item},
                           {"function_call", "fc_", call_item},
                           {"function_call_output", "fco_", result_item},
                           {"reasoning", "rs_", reasoning_item}};

const Kind& kind_of_item(const Json& item) {
  const std::string type = text_of(item, "type");
  for (const Kind& kind : kKinds) {
    if (type == kind.type) return kind;
  }
  return kKinds[0];
}

}  // namespace

Status read_item(const Json& value, const std::string& path, ChatInput* chat) {
  Fields f(value, path);
  std::string type = "message";
  f.one_of("type", &type, {"message", "function_call", "function_call_output", "reasoning"}, {});
  if (!f.ok()) return f.status();
  kind_of_item(value).declare(f, chat);
  return f.status();
}

Json item_schema() {
  Json kinds = Json::array();
  for (const Kind& kind : kKinds) kinds.push_back(schema_of(kind.type, kind.declare));
  return {{"oneOf", std::move(kinds)}};
}

std::string item_id(const Json& item, std::string_view unique) {
  return fmt::format("{}{}", kind_of_item(item).id_prefix, unique);
}

Json kept_item(const Json& item, std::string_view id) {
  const std::string_view type = kind_of_item(item).type;
  Json out = {{"type", type}, {"id", id}, {"status", "completed"}};
  const Json content = item.value("content", Json());
  if (type == "message") {
    out["role"] = text_of(item, "role");
    out["content"] = kept_parts(content, out["role"] == "assistant" ? "output_text" : "input_text");
  } else if (type == "function_call") {
    for (const char* name : {"call_id", "name", "arguments"}) out[name] = text_of(item, name);
  } else if (type == "function_call_output") {
    out["call_id"] = text_of(item, "call_id");
    const Json output = item.value("output", Json());
    out["output"] = output.is_string() ? output : kept_parts(output, "input_text");
  } else {
    out["summary"] = kept_parts(item.value("summary", Json()), "summary_text");
    out["content"] = kept_parts(content, "reasoning_text");
  }
  return out;
}

Result<std::vector<ChatMessage>> messages_of_items(std::span<const Json> items) {
  ChatInput chat;
  for (size_t i = 0; i < items.size(); ++i) {
    const Status status = read_item(items[i], fmt::format("items[{}]", i), &chat);
    if (!status.ok()) {
      return data_loss("items of the conversation can't be read: " + status.message());
    }
  }
  return std::move(chat.messages);
}

}  // namespace hcache::api
