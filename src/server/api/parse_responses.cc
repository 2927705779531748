// OpenAI: /v1/responses.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "request_fields.h"
#include "response_items.h"

namespace hcache::api {
namespace {

using model::ChatInput;
using model::ToolChoice;

constexpr const char* kLogprobs = "message.output_text.logprobs";

Status read_input(const Json& value, const std::string& path, GenerationRequest* r) {
  ChatInput& chat = *r->chat;
  const bool kept = !r->conversation_id.empty();
  if (value.is_string()) {
    chat.messages.push_back({"user", value.get<std::string>()});
    if (kept) r->input_items.push_back({{"role", "user"}, {"content", value}});
    return {};
  }
  if (!value.is_array()) return wrong_kind(path, "a string or an array of items", value);
  for (size_t i = 0; i < value.size(); i++) {
    HCACHE_RETURN_IF_ERROR(read_item(value[i], fmt::format("{}[{}]", path, i), &chat));
    if (kept) r->input_items.push_back(value[i]);
  }
  return {};
}

Json input_schema() {
  return {
      {"oneOf", Json::array({Json{{"type", "string"}},
                             Json{{"type", "array"}, {"items", item_schema()}, {"minItems", 1}}})}};
}

// Its id, or an object that has it.
Status read_conversation(const Json& value, const std::string& path, std::string* id) {
  if (value.is_object()) {
    Fields f(value, path);
    f.required().text("id", id, {});
    HCACHE_RETURN_IF_ERROR(f.status());
  } else if (value.is_string()) {
    *id = value.get<std::string>();
  } else {
    return wrong_kind(path, "a string or an object with an id", value);
  }
  return id->empty() ? invalid_argument(path + ": empty") : Status();
}

Json conversation_schema() {
  return {{"oneOf", Json::array({Json{{"type", "string"}, {"minLength", 1}},
                                 Json{{"type", "object"},
                                      {"properties", {{"id", {{"type", "string"}}}}},
                                      {"required", Json::array({"id"})}}})}};
}

// What is said before the request's own input, and that.
void input_fields(Fields& f, GenerationRequest* r) {
  ChatInput& chat = *r->chat;
  f.text("previous_response_id", &r->previous_response_id,
         "The answer after which the conversation goes on.");
  f.value("conversation", conversation_schema(),
          "The conversation that goes on: its items come before the input; those of the input and "
          "of the answer are added to it. Not together with previous_response_id or session_id.",
          [&](const Json& value, const std::string& path) {
            return read_conversation(value, path, &r->conversation_id);
          });
  const bool goes_on = !r->conversation_id.empty();
  for (const char* other : {"previous_response_id", "session_id"}) {
    if (goes_on && f.has(other)) f.fail("conversation", fmt::format("excludes {}", other));
  }
  f.value("input", input_schema(),
          "The user's message, or items of a conversation. It may be left out where `conversation` "
          "names one that has items.",
          [&](const Json& value, const std::string& path) { return read_input(value, path, r); });
  if (goes_on) return;
  if (f.reading() && !f.has("input")) f.fail("input", "missing");
  if (f.ok() && chat.messages.empty()) f.fail("input", "empty");
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
  r->instructed = !instructions.empty();
  if (r->instructed) chat.messages.push_back({"system", std::move(instructions)});
  input_fields(f, r);
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
