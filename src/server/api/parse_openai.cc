// OpenAI: /v1/chat/completions, /v1/completions.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "request_fields.h"

namespace hcache::api {
namespace {

using model::ChatInput;
using model::ChatMessage;
using model::ToolChoice;

const std::vector<std::string> kTextParts = {"text", "refusal"};

// `begun`: its content if the answer goes on with it; then parts are paragraphs, as llama.cpp has
// them.
void message_fields(Fields& f, ChatMessage* m, std::string* begun) {
  f.required().one_of("role", &m->role, {"system", "developer", "user", "assistant", "tool"}, {});
  f.value("content", message_content_schema(kTextParts),
          "Text, pictures and sounds; parts of text are joined by newlines.",
          [&](const Json& value, const std::string& path) {
            if (m->role == "assistant") {
              HCACHE_RETURN_IF_ERROR(read_content(value, path, kTextParts, begun, "\n\n"));
            }
            return read_message_content(value, path, kTextParts, m);
          });
  f.text("reasoning_content", &m->reasoning, "What the assistant thought before it answered.");
  f.text("name", &m->name, {});
  f.text("tool_call_id", &m->tool_call_id, "Of a tool's message: the call it answers.");
  calls_field(f, m);
  if (!f.has("content") && m->tool_calls.empty() && m->reasoning.empty()) {
    f.fail("content", "missing");
  }
}

Status read_choice(const Json& value, const std::string& path, ChatInput* chat) {
  if (value.is_object()) {
    std::string type;
    Fields f(value, path);
    f.required().one_of("type", &type, {"function"}, {});
    f.required().object("function", {},
                        [&](Fields& o) { o.required().text("name", &chat->only_tool, {}); });
    chat->tool_choice = ToolChoice::kRequired;
    return f.status();
  }
  if (value == "auto") {
    chat->tool_choice = ToolChoice::kAuto;
  } else if (value == "none") {
    chat->tool_choice = ToolChoice::kNone;
  } else if (value == "required") {
    chat->tool_choice = ToolChoice::kRequired;
  } else {
    return invalid_argument(
        fmt::format("{}: must be auto, none, required or an object that names a function", path));
  }
  return {};
}

Json choice_schema() {
  const Json name = {{"type", "object"},
                     {"properties", {{"name", {{"type", "string"}}}}},
                     {"required", Json::array({"name"})}};
  return {{"oneOf",
           Json::array({Json{{"type", "string"}, {"enum", {"auto", "none", "required"}}},
                        Json{{"type", "object"},
                             {"properties",
                              {{"type", {{"type", "string"}, {"enum", Json::array({"function"})}}},
                               {"function", name}}},
                             {"required", {"type", "function"}}}})}};
}

// vLLM's words for a last message that the answer goes on with. That follows from whose it is.
void ending_fields(Fields& f, ChatInput* input) {
  const ChatInput& chat = *input;
  bool begins = false;
  bool goes_on = false;
  f.flag("add_generation_prompt", &begins, "The answer is a message of its own.");
  if (f.has("add_generation_prompt")) input->begins_reply = begins;
  f.flag("continue_final_message", &goes_on,
         "The answer goes on with the last message, which is the assistant's.");
  if (begins && goes_on) f.fail("continue_final_message", "excludes add_generation_prompt");
  const size_t n = chat.messages.size();
  const bool assistant = n > 0 && chat.messages[n - 1].role == "assistant";
  if (goes_on && !assistant)
    f.fail("continue_final_message", "the last message is not the assistant's");
  if (assistant && n > 1 && chat.messages[n - 2].role == "assistant") {
    f.fail("messages", "two messages of the assistant's at the end: the answer can go on with one");
  }
}

void conversation_fields(Fields& f, ChatInput* chat) {
  std::string begun;
  f.required().objects("messages", "The conversation; the answer is its next message.",
                       [&](Fields& o) {
                         ChatMessage message;
                         begun.clear();
                         message_fields(o, &message, &begun);
                         chat->messages.push_back(std::move(message));
                       });
  if (chat->messages.empty()) {
    f.fail("messages", "empty");
  } else if (chat->messages.back().role == "assistant") {
    chat->messages.back().content = begun;
  }
  tools_field(f, chat);
  f.value(
      "tool_choice", choice_schema(), "Whether it may, must not or must; or which.",
      [&](const Json& value, const std::string& path) { return read_choice(value, path, chat); });
  f.flag("parallel_tool_calls", &chat->parallel_tool_calls, "Several calls in one answer.");
  effort_field(f, "reasoning_effort", chat);
  template_fields(f, chat);
  ending_fields(f, chat);
}

}  // namespace

void chat_completion_fields(Fields& f, GenerationRequest* r) {
  r->dialect = Dialect::kChat;
  ChatInput& chat = r->chat.emplace();
  model_field(f, r);
  conversation_fields(f, &chat);
  f.object("response_format", "What the answer must be.",
           [&](Fields& o) { format_fields(o, &chat.json_schema, false); });
  limit_field(f, r, "n_predict");
  limit_field(f, r, "max_tokens");
  limit_field(f, r, "max_completion_tokens");
  stop_field(f, r, "stop");
  f.integer("n", &r->n, {1, 128}, "How many answers.");
  logprobs_fields(f, r);
  f.flag("verbose", &r->verbose, "Give llama-server's own answer, with the prompt, in __verbose.");
  sampling_fields(f, r);
  if (chat.json_schema.empty()) chat.json_schema = std::exchange(r->sampling.json_schema, {});
  r->sampling.json_schema.clear();
  stream_fields(f, r);
  cache_fields(f, r);
  check_tools(f, *r);
}

void apply_template_fields(Fields& f, GenerationRequest* r) {
  conversation_fields(f, &r->chat.emplace());
  check_tools(f, *r);
}

void completion_fields(Fields& f, GenerationRequest* r) {
  r->dialect = Dialect::kCompletion;
  model_field(f, r);
  f.required().value("prompt", prompts_schema(), "Text or token ids, one prompt or several.",
                     [&](const Json& value, const std::string& path) {
                       return read_prompts(value, path, &r->prompts);
                     });
  limit_field(f, r, "n_predict");
  limit_field(f, r, "max_tokens");
  stop_field(f, r, "stop");
  f.integer("n", &r->n, {1, 128}, "How many answers to each prompt.");
  int logprobs = -1;
  f.integer("logprobs", &logprobs, {0, 20},
            "Give the log-probabilities of the tokens and of so many of the likeliest ones.");
  r->logprobs = logprobs >= 0;
  r->top_logprobs = std::max(logprobs, 0);
  bool echo = false;
  f.flag("echo", &echo, "Not supported; must be false.");
  if (echo) f.fail("echo", "giving the prompt back is not supported");
  std::string suffix;
  f.text("suffix", &suffix, "Not supported; must be empty.");
  if (!suffix.empty()) f.fail("suffix", "filling in is not supported");
  f.object("response_format", "What the answer must be.",
           [&](Fields& o) { format_fields(o, &r->sampling.json_schema, false); });
  sampling_fields(f, r);
  stream_fields(f, r);
  cache_fields(f, r);
}

Result<GenerationRequest> parse_chat_completion(const Json& body, const Defaults& defaults) {
  return read_request(body, defaults, chat_completion_fields);
}

Result<GenerationRequest> parse_completion(const Json& body, const Defaults& defaults) {
  return read_request(body, defaults, completion_fields);
}

Result<model::ChatInput> parse_apply_template(const Json& body) {
  GenerationRequest r;
  HCACHE_RETURN_IF_ERROR(read_prompt_body(body, [&](Fields& f) { apply_template_fields(f, &r); }));
  return *std::move(r.chat);
}

}  // namespace hcache::api
