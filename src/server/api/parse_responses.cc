// OpenAI: /v1/responses.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "request_fields.h"

namespace hcache::api {
namespace {

using model::ChatInput;
using model::ChatMessage;
using model::ToolCall;
using model::ToolChoice;

const std::vector<std::string> kTextParts = {"input_text", "output_text", "text", "refusal"};
constexpr const char* kLogprobs = "message.output_text.logprobs";
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
  f.required().value("content", content_schema(kTextParts), {},
                     [&](const Json& value, const std::string& path) {
                       return read_content(value, path, kTextParts, &message.content);
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
  f.required().value("output", content_schema(kTextParts), {},
                     [&](const Json& value, const std::string& path) {
                       return read_content(value, path, kTextParts, &message.content);
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

Status read_item(const Json& value, const std::string& path, ChatInput* chat) {
  Fields f(value, path);
  std::string type = "message";
  f.one_of("type", &type, {"message", "function_call", "function_call_output", "reasoning"}, {});
  if (!f.ok()) return f.status();
  if (type == "message") {
    message_item(f, chat);
  } else if (type == "function_call") {
    call_item(f, chat);
  } else if (type == "function_call_output") {
    result_item(f, chat);
  } else {
    reasoning_item(f, chat);
  }
  return f.status();
}

Status read_input(const Json& value, const std::string& path, ChatInput* chat) {
  if (value.is_string()) {
    chat->messages.push_back({"user", value.get<std::string>()});
    return {};
  }
  if (!value.is_array()) return wrong_kind(path, "a string or an array of items", value);
  for (size_t i = 0; i < value.size(); i++) {
    HCACHE_RETURN_IF_ERROR(read_item(value[i], fmt::format("{}[{}]", path, i), chat));
  }
  return {};
}

Json item_schema(const char* type, void (*declare)(Fields&, ChatInput*)) {
  Json schema = describe_fields([&](Fields& f) {
    ChatInput chat;
    std::string name;
    f.required().one_of("type", &name, {type}, {});
    declare(f, &chat);
  });
  return schema;
}

Json input_schema() {
  const Json items = {{"oneOf", Json::array({item_schema("message", message_item),
                                             item_schema("function_call", call_item),
                                             item_schema("function_call_output", result_item),
                                             item_schema("reasoning", reasoning_item)})}};
  return {{"oneOf", Json::array({Json{{"type", "string"}},
                                 Json{{"type", "array"}, {"items", items}, {"minItems", 1}}})}};
}

Status read_choice(const Json& value, const std::string& path, ChatInput* chat) {
  if (value.is_object()) {
    std::string type;
    Fields f(value, path);
    f.required().one_of("type", &type, {"function"}, {});
    f.required().text("name", &chat->only_tool, {});
    chat->tool_choice = ToolChoice::kRequired;
    return f.status();
  }
  if (value == "none") {
    chat->tool_choice = ToolChoice::kNone;
  } else if (value == "required") {
    chat->tool_choice = ToolChoice::kRequired;
  } else if (value != "auto") {
    return invalid_argument(
        fmt::format("{}: must be auto, none, required or an object that names a function", path));
  }
  return {};
}

Json choice_schema() {
  return {{"oneOf",
           Json::array({Json{{"type", "string"}, {"enum", {"auto", "none", "required"}}},
                        Json{{"type", "object"},
                             {"properties",
                              {{"type", {{"type", "string"}, {"enum", Json::array({"function"})}}},
                               {"name", {{"type", "string"}}}}},
                             {"required", {"type", "name"}}}})}};
}

}  // namespace

void response_fields(Fields& f, GenerationRequest* r) {
  r->dialect = Dialect::kResponse;
  r->include_usage = true;
  ChatInput& chat = r->chat.emplace();
  model_field(f, r);
  std::string instructions;
  f.text("instructions", &instructions, "Put before the conversation as the system's message.");
  if (!instructions.empty()) chat.messages.push_back({"system", std::move(instructions)});
  f.required().value(
      "input", input_schema(), "The user's message, or items of a conversation.",
      [&](const Json& value, const std::string& path) { return read_input(value, path, &chat); });
  if (f.ok() && chat.messages.empty()) f.fail("input", "empty");
  f.text("previous_response_id", &r->previous_response_id,
         "The answer after which the conversation goes on.");
  f.flag("store", &r->store, "Whether later requests may go on from this answer.");
  f.objects("tools", "What the model may call.", [&](Fields& o) {
    std::string type;
    model::ChatTool tool;
    o.required().one_of("type", &type, {"function"}, {});
    function_fields(o, &tool, "parameters");
    chat.tools.push_back(std::move(tool));
  });
  f.value(
      "tool_choice", choice_schema(), "Whether it may, must not or must; or which.",
      [&](const Json& value, const std::string& path) { return read_choice(value, path, &chat); });
  f.flag("parallel_tool_calls", &chat.parallel_tool_calls, "Several calls in one answer.");
  f.object("text", "What the answer must be.", [&](Fields& o) {
    o.object("format", {}, [&](Fields& format) { format_fields(format, &chat.json_schema, true); });
  });
  f.object("reasoning", "Of models that think.",
           [&](Fields& o) { effort_field(o, "effort", &chat); });
  template_fields(f, &chat);
  limit_field(f, r, "max_output_tokens");
  stop_field(f, r, "stop");
  f.integer("top_logprobs", &r->top_logprobs, {0, 20},
            "Give the log-probabilities of the tokens and of so many of the likeliest ones.");
  bool included = false;
  f.value("include", {{"type", "array"}, {"items", {{"type", "string"}}}},
          "message.output_text.logprobs: give the log-probabilities of the tokens.",
          [&](const Json& value, const std::string& path) -> Status {
            if (!value.is_array()) return wrong_kind(path, "an array of strings", value);
            included = std::find(value.begin(), value.end(), kLogprobs) != value.end();
            return {};
          });
  r->logprobs = included || r->top_logprobs > 0;
  sampling_fields(f, r);
  if (chat.json_schema.empty()) chat.json_schema = std::exchange(r->sampling.json_schema, {});
  r->sampling.json_schema.clear();
  stream_fields(f, r);
  cache_fields(f, r);
  check_tools(f, *r);
}

Result<GenerationRequest> parse_response(const Json& body, const Defaults& defaults) {
  return read_request(body, defaults, response_fields);
}

}  // namespace hcache::api
