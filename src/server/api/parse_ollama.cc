// Ollama: /api/chat, /api/generate, /api/show.
#include <fmt/format.h>

#include <limits>
#include <utility>

#include "request_fields.h"

namespace hcache::api {
namespace {

using model::ChatInput;
using model::ChatMessage;

constexpr size_t kMaxModelName = 512;

// Pictures come before the text, as Ollama has them.
void put_markers_first(size_t n, std::string* text) {
  for (size_t i = 0; i < n; ++i) text->insert(0, model::kMediaMarker);
}

void images_field(Fields& f, std::vector<model::Medium>* media) {
  media_field(f, "images", "Pictures, in base64; for models with a projector.", media);
}

void ollama_message_fields(Fields& f, ChatMessage* m) {
  f.required().one_of("role", &m->role, {"system", "user", "assistant", "tool"}, {});
  f.text("content", &m->content, {});
  f.text("thinking", &m->reasoning, "What the assistant thought before it answered.");
  calls_field(f, m);
  f.text("tool_name", &m->name, "Of a tool's message: which one.");
  f.text("tool_call_id", &m->tool_call_id, "Of a tool's message: the call it answers.");
  images_field(f, &m->media);
  put_markers_first(m->media.size(), &m->content);
}

// "json", or a schema.
void ollama_format_field(Fields& f, std::string* schema) {
  f.value("format",
          {{"anyOf", Json::array({Json{{"type", "string"}, {"enum", {"json", ""}}},
                                  Json{{"type", "object"}}})}},
          "json: the answer is any JSON object; a JSON schema: one that follows it.",
          [&](const Json& value, const std::string& path) -> Status {
            if (value.is_object()) {
              *schema = to_text(value);
            } else if (value == "json") {
              *schema = R"({"type":"object"})";
            } else if (value != "") {
              return invalid_argument(fmt::format("{}: expected json or a JSON schema", path));
            }
            return {};
          });
}

// The variable says that the request has said so, whatever the server's default is.
void think_field(Fields& f, ChatInput* chat) {
  f.value(
      "think",
      {{"anyOf", Json::array({Json{{"type", "boolean"}},
                              Json{{"type", "string"}, {"enum", {"low", "medium", "high"}}}})}},
      "Whether the model thinks first, where it can; or how much.",
      [&](const Json& value, const std::string& path) -> Status {
        if (value.is_boolean()) {
          chat->thinking = value.get<bool>();
        } else if (value == "low" || value == "medium" || value == "high") {
          chat->thinking = true;
          chat->template_args["reasoning_effort"] = to_text(value);
        } else {
          return invalid_argument(fmt::format("{}: expected a boolean, low, medium or high", path));
        }
        chat->template_args["enable_thinking"] = chat->thinking ? "true" : "false";
        return {};
      });
}

// Ollama ignores options that it does not know; those of loading a model say nothing here.
void ollama_options_field(Fields& f, GenerationRequest* r) {
  f.object("options",
           "How the answer is chosen. Others of Ollama's options are ignored: the context, threads "
           "and devices are the server's.",
           [&](Fields& o) {
             int64_t limit = -1;
             o.integer("num_predict", &limit, {-2, std::numeric_limits<int32_t>::max()},
                       "At most so many tokens of answer; 0 and below: as many as there is room "
                       "for.");
             if (limit > 0) r->max_tokens = limit;
             stop_field(o, r, "stop");
             sampling_fields(o, r);
           });
}

// What both endpoints have beside the prompt.
void ollama_fields(Fields& f, GenerationRequest* r, ChatInput* chat) {
  think_field(f, chat);
  ollama_format_field(f, &chat->json_schema);
  ollama_options_field(f, r);
  const std::string schema = std::exchange(r->sampling.json_schema, {});
  if (chat->json_schema.empty()) chat->json_schema = schema;
  logprobs_fields(f, r);
  r->stream = true;
  f.flag("stream", &r->stream, "False: one object instead of a line for each piece of the answer.");
  cache_fields(f, r);
  bool truncate = false;
  f.flag("truncate", &truncate, "True: as truncation auto; false: as disabled.");
  if (f.has("truncate")) r->truncate = truncate;
}

}  // namespace

void ollama_chat_fields(Fields& f, GenerationRequest* r) {
  r->dialect = Dialect::kOllamaChat;
  ChatInput& chat = r->chat.emplace();
  model_field(f, r);
  f.objects("messages",
            "The conversation; the answer is its next message. Without any: the model is loaded.",
            [&](Fields& o) {
              ChatMessage message;
              ollama_message_fields(o, &message);
              chat.messages.push_back(std::move(message));
            });
  r->only_loads = chat.messages.empty();
  tools_field(f, &chat);
  ollama_fields(f, r, &chat);
  check_tools(f, *r);
}

void ollama_generate_fields(Fields& f, InfillRequest* r) {
  GenerationRequest& g = r->generation;
  g.dialect = Dialect::kOllamaGenerate;
  ChatInput chat;
  std::string system;
  std::string own_template;
  bool raw = false;
  model_field(f, &g);
  f.text("prompt", &r->prefix, "The user's message. Without any: the model is loaded.");
  f.text("suffix", &r->suffix,
         "The answer fills the gap between the prompt and this, where the model learned to.");
  f.text("system", &system, "Put before the prompt as the system's message.");
  f.text("template", &own_template, "Not supported; must be empty.");
  if (!own_template.empty()) {
    f.fail("template", "not supported; start the server with --chat-template");
  }
  f.flag("raw", &raw, "The prompt is all that the model sees, without a template.");
  if (!system.empty() && (raw || !r->suffix.empty())) {
    f.fail("system", "can't be combined with raw or a suffix");
  }
  f.value("context", {{"type", "array"}, {"items", token_schema()}, {"maxItems", 0}},
          "Not supported; must be empty.",
          [](const Json& value, const std::string& path) -> Status {
            if (!value.is_array()) return wrong_kind(path, "an array of token ids", value);
            if (value.empty()) return {};
            return invalid_argument(
                fmt::format("{}: not supported; send the conversation to /api/chat", path));
          });
  std::vector<model::Medium> media;
  images_field(f, &media);
  if (!media.empty() && !r->suffix.empty()) f.fail("images", "can't be combined with a suffix");
  put_markers_first(media.size(), &r->prefix);
  ollama_fields(f, &g, &chat);
  g.only_loads = r->prefix.empty() && r->suffix.empty();
  if (raw || !r->suffix.empty()) {
    g.sampling.json_schema = chat.json_schema;
    if (r->suffix.empty()) {
      g.prompts.push_back({{std::exchange(r->prefix, {})}, std::move(media)});
    }
    return;
  }
  if (!system.empty()) chat.messages.push_back({"system", std::move(system)});
  chat.messages.push_back({"user", std::exchange(r->prefix, {})});
  chat.messages.back().media = std::move(media);
  g.chat = std::move(chat);
  check_tools(f, g);
}

void ollama_show_fields(Fields& f, std::string* model) {
  f.text("name", model, "Another name: model.", kMaxModelName);
  f.text("model", model, "The model to describe.", kMaxModelName);
  if (model->empty()) f.fail("model", "missing");
}

Result<GenerationRequest> parse_ollama_chat(const Json& body, const Defaults& defaults) {
  return read_request(body, defaults, ollama_chat_fields);
}

Result<InfillRequest> parse_ollama_generate(const Json& body, const Defaults& defaults) {
  InfillRequest r;
  r.generation.sampling = defaults;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { ollama_generate_fields(f, &r); }));
  return r;
}

Result<std::string> parse_ollama_show(const Json& body) {
  std::string model;
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { ollama_show_fields(f, &model); }));
  return model;
}

}  // namespace hcache::api
