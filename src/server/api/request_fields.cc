#include "request_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "policy/compression.h"
#include "volatile_text.h"

namespace hcache::api {
namespace {

constexpr double kMaxTokenId = std::numeric_limits<int32_t>::max();
constexpr int kMaxBias = 1000;
constexpr size_t kMaxPrompts = 2048;
constexpr size_t kMaxStops = 64;
constexpr size_t kMaxStopBytes = 1024;
constexpr size_t kMaxNameBytes = 512;
constexpr size_t kMaxToolName = 128;
constexpr int kMaxRecentTokens = 65536;  // the sampler keeps them in memory
constexpr int kMaxAdapterId = 1023;
constexpr float kMaxAdapterScale = 1000;
constexpr float kSmallestTopP = 1e-6F;
constexpr size_t kMaxPairs = 16;  // of metadata, as OpenAI limits it
constexpr size_t kMaxKeyBytes = 64;
constexpr size_t kMaxValueBytes = 512;

Status read_token(const Json& value, const std::string& path, int32_t* out) {
  if (!value.is_number_integer()) return wrong_kind(path, "a token id", value);
  const auto number = value.get<double>();
  if (number < 0 || number > kMaxTokenId) {
    return invalid_argument(fmt::format("{}: {} is no token id", path, value.dump()));
  }
  *out = value.get<int32_t>();
  return {};
}

bool all_tokens(const Json& array) {
  return std::all_of(array.begin(), array.end(),
                     [](const Json& x) { return x.is_number_integer(); });
}

// An array of prompts rather than the parts of one: it holds strings only, or an array.
bool several_prompts(const Json& value) {
  if (!value.is_array() || value.empty()) return false;
  return std::any_of(value.begin(), value.end(), [](const Json& x) { return x.is_structured(); }) ||
         std::all_of(value.begin(), value.end(), [](const Json& x) { return x.is_string(); });
}

// libmtmd's own marker, which clients know that don't look into /props.
void use_own_marker(std::string* text) {
  constexpr std::string_view kCommon = "<__media__>";
  for (size_t at = text->find(kCommon); at != std::string::npos; at = text->find(kCommon, at)) {
    text->replace(at, kCommon.size(), model::kMediaMarker);
    at += model::kMediaMarker.size();
  }
}

// llama-server's {"prompt_string": "...", "multimodal_data": [...]}.
Status read_prompt_object(const Json& value, const std::string& path, Prompt* out) {
  Fields f(value, path);
  std::string text;
  f.required().text("prompt_string", &text, {});
  media_field(f, "multimodal_data",
              "Pictures and sounds, one for each marker in the text (media_marker in /props).",
              &out->media);
  if (!out->media.empty()) use_own_marker(&text);
  out->parts.emplace_back(std::move(text));
  return f.status();
}

Status read_bias(const Json& value, const std::string& path, float* out) {
  if (value.is_boolean() && !value.get<bool>()) {
    *out = -std::numeric_limits<float>::infinity();
    return {};
  }
  if (!value.is_number()) return wrong_kind(path, "a number or false", value);
  const auto bias = value.get<double>();
  if (!(std::abs(bias) <= kMaxBias)) {
    return invalid_argument(fmt::format("{}: {} is out of range, it must be between {} and {}",
                                        path, bias, -kMaxBias, kMaxBias));
  }
  *out = static_cast<float>(bias);
  return {};
}

// A token's id in digits; other keys are texts.
bool is_token_id(const std::string& key) {
  return !key.empty() && key.size() < 10 &&
         std::all_of(key.begin(), key.end(), [](char c) { return c >= '0' && c <= '9'; });
}

// {"15043": 1.5, "2": false} or [[15043, 1.5], [2, false]]; a text instead of an id stands for all
// tokens of it.
Status read_biases(const Json& value, const std::string& path, GenerationRequest* r) {
  if (!value.is_object() && !value.is_array()) return wrong_kind(path, "an object", value);
  const auto add = [&](const Json& key, const std::string& key_place, const Json& bias,
                       const std::string& bias_place) -> Status {
    float number = 0;
    HCACHE_RETURN_IF_ERROR(read_bias(bias, bias_place, &number));
    if (key.is_string()) {
      const std::string& text = key.get_ref<const std::string&>();
      if (value.is_object() && is_token_id(text)) {
        r->sampling.logit_bias.emplace_back(std::stoi(text), number);
      } else {
        r->text_bias.emplace_back(text, number);
      }
      return {};
    }
    int32_t token = 0;
    HCACHE_RETURN_IF_ERROR(read_token(key, key_place, &token));
    r->sampling.logit_bias.emplace_back(token, number);
    return {};
  };
  for (const auto& item : value.items()) {
    if (value.is_object()) {
      HCACHE_RETURN_IF_ERROR(add(item.key(), path, item.value(),
                                 fmt::format("{}.{}", path, item.key().substr(0, 64))));
      continue;
    }
    const std::string place = fmt::format("{}[{}]", path, item.key());
    if (!item.value().is_array() || item.value().size() != 2) {
      return invalid_argument(fmt::format("{}: expected [token, bias]", place));
    }
    HCACHE_RETURN_IF_ERROR(add(item.value()[0], place + "[0]", item.value()[1], place + "[1]"));
  }
  return {};
}

Json bias_schema() {
  const Json bias = {
      {"anyOf",
       Json::array({Json{{"type", "number"}, {"minimum", -kMaxBias}, {"maximum", kMaxBias}},
                    Json{{"type", "boolean"}, {"enum", Json::array({false})}}})}};
  const Json pair = {
      {"type", "array"},
      {"prefixItems",
       Json::array(
           {Json{{"anyOf", Json::array({token_schema(), Json{{"type", "string"}}})}}, bias})},
      {"minItems", 2},
      {"maxItems", 2}};
  return {{"anyOf", Json::array({Json{{"type", "object"}, {"additionalProperties", bias}},
                                 Json{{"type", "array"}, {"items", pair}}})}};
}

Status read_stops(const Json& value, const std::string& path, std::vector<std::string>* out) {
  std::vector<std::string> stops;
  const auto add = [&](const Json& stop, const std::string& place) -> Status {
    if (!stop.is_string()) return wrong_kind(place, "a string", stop);
    const auto& text = stop.get_ref<const std::string&>();
    if (text.size() > kMaxStopBytes) {
      return invalid_argument(fmt::format("{}: longer than {} bytes", place, kMaxStopBytes));
    }
    if (!text.empty()) stops.push_back(text);
    return {};
  };
  if (!value.is_array()) {
    if (!value.is_string()) return wrong_kind(path, "a string or an array of strings", value);
    HCACHE_RETURN_IF_ERROR(add(value, path));
  } else {
    if (value.size() > kMaxStops) {
      return invalid_argument(fmt::format("{}: more than {} strings", path, kMaxStops));
    }
    for (size_t i = 0; i < value.size(); i++) {
      HCACHE_RETURN_IF_ERROR(add(value[i], fmt::format("{}[{}]", path, i)));
    }
  }
  *out = std::move(stops);
  return {};
}

void call_fields(Fields& f, model::ToolCall* call) {
  std::string type = "function";
  f.text("id", &call->id, "As the answer gave it.");
  f.one_of("type", &type, {"function"}, {});
  f.required().object("function", {}, [&](Fields& o) {
    o.required().text("name", &call->name, {});
    o.value(
        "arguments", {{"anyOf", Json::array({Json{{"type", "string"}}, Json{{"type", "object"}}})}},
        "JSON, as a text or as it is.", [&](const Json& value, const std::string& path) -> Status {
          if (!value.is_string() && !value.is_object()) {
            return wrong_kind(path, "a string", value);
          }
          call->arguments = value.is_string() ? value.get<std::string>() : to_text(value);
          return {};
        });
  });
}

Status read_metadata(const Json& value, const std::string& path, Json* metadata) {
  if (!value.is_object()) return wrong_kind(path, "an object", value);
  if (value.size() > kMaxPairs) {
    return invalid_argument(fmt::format("{}: at most {} pairs are allowed", path, kMaxPairs));
  }
  for (const auto& [key, text] : value.items()) {
    if (key.size() > kMaxKeyBytes || !text.is_string() ||
        text.get_ref<const std::string&>().size() > kMaxValueBytes) {
      return invalid_argument(
          fmt::format("{}: expected keys of at most {} bytes and texts of at most {}", path,
                      kMaxKeyBytes, kMaxValueBytes));
    }
  }
  *metadata = value;
  return {};
}

bool tool_name_ok(const std::string& name) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_-.:/").find(c) != std::string_view::npos;
  };
  return !name.empty() && name.size() <= kMaxToolName &&
         std::all_of(name.begin(), name.end(), allowed);
}

}  // namespace

Json token_schema() {
  return {{"type", "integer"}, {"minimum", 0}, {"maximum", static_cast<int64_t>(kMaxTokenId)}};
}

Result<GenerationRequest> read_request(const Json& body, const Defaults& defaults,
                                       void (*declare)(Fields& f, GenerationRequest* r)) {
  GenerationRequest r;
  r.sampling = defaults;
  HCACHE_RETURN_IF_ERROR(read_prompt_body(body, [&](Fields& f) { declare(f, &r); }));
  return r;
}

Status read_prompt_body(const Json& body, const Fields::Declare& declare) {
  const std::optional<Json> moved = with_volatile_text_last(body);
  return read_fields(moved ? *moved : body, declare);
}

Json prompt_schema() {
  const Json part = {{"anyOf", Json::array({Json{{"type", "string"}}, token_schema()})}};
  const Json object = {{"type", "object"},
                       {"properties",
                        {{"prompt_string", {{"type", "string"}}},
                         {"multimodal_data", {{"type", "array"}, {"items", medium_schema()}}}}},
                       {"required", Json::array({"prompt_string"})}};
  return {{"anyOf", Json::array({Json{{"type", "string"}}, object,
                                 Json{{"type", "array"}, {"items", part}, {"minItems", 1}}})}};
}

Json prompts_schema() {
  const Json tokens = {{"type", "array"}, {"items", token_schema()}, {"minItems", 1}};
  Json schema = prompt_schema();
  schema["anyOf"].push_back(
      {{"type", "array"}, {"items", tokens}, {"minItems", 1}, {"maxItems", kMaxPrompts}});
  return schema;
}

Status read_tokens(const Json& value, const std::string& path, std::vector<int32_t>* out) {
  if (!value.is_array()) return wrong_kind(path, "an array of token ids", value);
  out->reserve(value.size());
  for (size_t i = 0; i < value.size(); i++) {
    int32_t token = 0;
    HCACHE_RETURN_IF_ERROR(read_token(value[i], fmt::format("{}[{}]", path, i), &token));
    out->push_back(token);
  }
  return {};
}

Status read_prompt(const Json& value, const std::string& path, Prompt* out) {
  if (value.is_string()) {
    out->parts.emplace_back(value.get<std::string>());
    return {};
  }
  if (value.is_object()) return read_prompt_object(value, path, out);
  if (!value.is_array()) return wrong_kind(path, "a string or an array of token ids", value);
  if (value.empty()) return invalid_argument(fmt::format("{}: empty", path));
  if (all_tokens(value)) {
    std::vector<int32_t> tokens;
    HCACHE_RETURN_IF_ERROR(read_tokens(value, path, &tokens));
    out->parts.emplace_back(std::move(tokens));
    return {};
  }
  for (size_t i = 0; i < value.size(); i++) {
    if (value[i].is_string()) {
      out->parts.emplace_back(value[i].get<std::string>());
      continue;
    }
    int32_t token = 0;
    HCACHE_RETURN_IF_ERROR(read_token(value[i], fmt::format("{}[{}]", path, i), &token));
    out->parts.emplace_back(std::vector<int32_t>{token});
  }
  return {};
}

Status read_prompts(const Json& value, const std::string& path, std::vector<Prompt>* out) {
  if (!several_prompts(value)) {
    out->emplace_back();
    return read_prompt(value, path, &out->back());
  }
  if (value.size() > kMaxPrompts) {
    return invalid_argument(fmt::format("{}: more than {} prompts", path, kMaxPrompts));
  }
  for (size_t i = 0; i < value.size(); i++) {
    out->emplace_back();
    HCACHE_RETURN_IF_ERROR(read_prompt(value[i], fmt::format("{}[{}]", path, i), &out->back()));
  }
  return {};
}

Status read_strings(const Json& value, const std::string& path, std::vector<std::string>* out) {
  if (!value.is_array()) return wrong_kind(path, "an array of strings", value);
  for (size_t i = 0; i < value.size(); i++) {
    if (!value[i].is_string()) {
      return wrong_kind(fmt::format("{}[{}]", path, i), "a string", value[i]);
    }
    out->push_back(value[i].get<std::string>());
  }
  return {};
}

Json cache_control_schema() {
  return {{"type", "object"},
          {"properties", {{"type", {{"type", "string"}}}}},
          {"description",
           "volatile: the text differs from request to request; the model reads it at the end of "
           "the last turn, so that what is before that turn can be restored. Others do nothing."}};
}

Json content_schema(const std::vector<std::string>& types) {
  const Json part = {{"type", "object"},
                     {"properties",
                      {{"type", {{"type", "string"}, {"enum", types}}},
                       {"text", {{"type", "string"}}},
                       {"cache_control", cache_control_schema()}}},
                     {"required", {"type", "text"}}};
  return {
      {"oneOf", Json::array({Json{{"type", "string"}}, Json{{"type", "array"}, {"items", part}}})}};
}

Status read_content(const Json& value, const std::string& path,
                    const std::vector<std::string>& types, std::string* out,
                    std::string_view separator) {
  if (value.is_string()) {
    *out = value.get<std::string>();
    return {};
  }
  if (!value.is_array()) return wrong_kind(path, "a string or an array of parts", value);
  std::string joined;
  for (size_t i = 0; i < value.size(); i++) {
    std::string text;
    HCACHE_RETURN_IF_ERROR(read_text_part(value[i], fmt::format("{}[{}]", path, i), types, &text));
    if (!joined.empty()) joined += separator;
    joined += text;
  }
  *out = std::move(joined);
  return {};
}

Status read_text_part(const Json& value, const std::string& path,
                      const std::vector<std::string>& types, std::string* text) {
  Fields part(value, path);
  std::string type;
  part.required().text("type", &type, {});
  if (part.ok() && std::find(types.begin(), types.end(), type) == types.end()) {
    part.fail("type", fmt::format("parts of type '{}' are not supported here", type.substr(0, 64)));
  }
  part.required().text(type == "refusal" ? "refusal" : "text", text, {});
  return part.status();
}

void metadata_field(Fields& f, Json* metadata, std::string_view doc) {
  f.value("metadata", {{"type", "object"}, {"additionalProperties", {{"type", "string"}}}}, doc,
          [&](const Json& value, const std::string& path) {
            return read_metadata(value, path, metadata);
          });
}

void model_field(Fields& f, GenerationRequest* r) {
  f.text("model", &r->model_name, "The model; it must be the one that is served.", kMaxNameBytes);
}

void sampling_fields(Fields& f, GenerationRequest* r) {
  model::SamplingOptions& s = r->sampling;
  f.number("temperature", &s.temperature, {0, 100}, "Higher is more random; 0 is greedy.");
  int top_k = s.top_k;
  f.integer("top_k", &top_k, {-1, Range().max},
            "Choose among the k most likely tokens; 0 and -1: among all.");
  s.top_k = std::max(top_k, 0);
  float top_p = s.top_p;
  f.number("top_p", &top_p, {0, 1},
           "Choose among the smallest set of tokens that has this probability.");
  s.top_p = std::max(top_p, kSmallestTopP);
  f.number("min_p", &s.min_p, {0, 1},
           "Leave out tokens below this share of the best one's probability.");
  f.number("frequency_penalty", &s.frequency_penalty, {-2, 2},
           "Subtracted from a token's logit for each time it came.");
  f.number("presence_penalty", &s.presence_penalty, {-2, 2},
           "Subtracted once from the logits of tokens that came.");
  f.number("repeat_penalty", &s.repeat_penalty, {0.01, 100},
           "Divides the logits of tokens that came; 1: off.");
  f.number("repetition_penalty", &s.repeat_penalty, {0.01, 100}, "Another name: repeat_penalty.");
  int recent = s.penalty_last_n;
  f.integer("repeat_last_n", &recent, {-1, kMaxRecentTokens},
            "How many of the last tokens the penalties count; -1: as many as possible.");
  s.penalty_last_n = recent < 0 ? kMaxRecentTokens : recent;
  int64_t seed = -1;
  f.integer("seed", &seed, Range(), "The same seed gives the same answer; -1: a random one.");
  const auto bits = static_cast<uint64_t>(seed);
  if (seed != -1) r->seed = static_cast<uint32_t>(bits ^ (bits >> 32U));
  r->draw_seed = seed == -1 && f.has("seed");
  f.value("logit_bias", bias_schema(),
          "Token ids, or texts that stand for all of their tokens, and what is added to their "
          "logits; false instead of a number forbids one.",
          [&](const Json& value, const std::string& path) { return read_biases(value, path, r); });
  f.text("grammar", &s.grammar, "A GBNF grammar that the answer must follow.");
  f.schema("json_schema", &s.json_schema, "A JSON schema that the answer must follow.");
  if (!s.grammar.empty() && !s.json_schema.empty()) {
    f.fail("grammar", "can't be combined with json_schema");
  }
  f.flag("ignore_eos", &r->ignore_eos, "Go on to max_tokens whatever the model wants.");
}

void limit_field(Fields& f, GenerationRequest* r, std::string_view name) {
  f.integer(name, &r->max_tokens, {-1, std::numeric_limits<int32_t>::max()},
            "At most so many tokens of answer; -1: as many as there is room for.");
}

void stop_field(Fields& f, GenerationRequest* r, std::string_view name) {
  const Json text = {{"type", "string"}, {"maxLength", kMaxStopBytes}};
  f.value(
      name,
      {{"oneOf",
        Json::array({text, Json{{"type", "array"}, {"items", text}, {"maxItems", kMaxStops}}})}},
      "Strings that end the answer; they are no part of it.",
      [&](const Json& value, const std::string& path) {
        return read_stops(value, path, &r->stop);
      });
}

void stream_fields(Fields& f, GenerationRequest* r) {
  f.flag("stream", &r->stream, "Send the answer as server-sent events while it is written.");
  f.flag("timings_per_token", &r->timings_per_token, "Every event of a stream has timings.");
  f.flag("return_progress", &r->return_progress,
         "A stream tells how much of the prompt is computed, in prompt_progress.");
  f.object("stream_options", "Of a stream.", [&](Fields& o) {
    o.flag("include_usage", &r->include_usage, "End with a chunk that holds the usage.");
  });
}

void cache_fields(Fields& f, GenerationRequest* r) {
  f.text("session_id", &r->session_id,
         "A name under which the conversation's state can be listed, pinned and deleted.",
         kMaxNameBytes);
  f.text("cache_salt", &r->cache_salt, "Requests with different salts never share state.",
         kMaxNameBytes);
  f.text("prompt_cache_key", &r->cache_key,
         "Requests with the same key are likely to begin alike: one of them renews the time to "
         "live of the conversations of all.",
         kMaxNameBytes);
  std::string retention;
  f.one_of("prompt_cache_retention", &retention, {"in_memory", "in-memory", "24h"},
           "24h: the conversation's state is not evicted for a day. in_memory: it stays in the KV "
           "cache and is not written to disk.");
  if (retention == "24h") r->retention = Retention::kDay;
  if (retention.rfind("in", 0) == 0) r->retention = Retention::kMemory;
  std::string truncation;
  f.one_of("truncation", &truncation, {"auto", "disabled"},
           "auto: when the conversation outgrows the context, what is oldest leaves it, and the "
           "answer goes on. disabled: a prompt that is too long is refused, and an answer ends "
           "with the context. Default: as the server was started.");
  if (!truncation.empty()) r->truncate = truncation == "auto";
  f.flag("cache_prompt", &r->use_cache, "False: compute everything anew.");
  adapters_field(f, &r->adapters);
  float budget = 1;
  f.number("kv_budget", &budget, {policy::kLeastKvBudget, 1},
           "When the conversation is restored, so much of its KV cache is enough, which comes "
           "earlier and changes answers a little: the rows that attention falls on. 1: exact. "
           "Default: as the server was started (--kv-budget).");
  if (f.has("kv_budget")) r->kv_budget = budget;
  f.text("user", &r->user, "Who asks.", kMaxNameBytes);
  f.integer("priority", &r->priority, {-100, 100}, "Higher is served first.");
  f.integer("speculative.n_max", &r->max_draft, {0, 512},
            "Tokens of the answer that are guessed for a step at most, where the server guesses "
            "any (--draft-max); the answer does not depend on it.");
}

void adapters_field(Fields& f, std::optional<std::vector<AdapterScale>>* adapters) {
  if (f.has("lora")) adapters->emplace();
  f.objects(
      "lora", "By how much each adapter of the server's counts; those left out don't.",
      [&](Fields& o) {
        AdapterScale scale;
        o.required().integer("id", &scale.id, {0, kMaxAdapterId}, "As /lora-adapters has it.");
        o.required().number("scale", &scale.scale, {-kMaxAdapterScale, kMaxAdapterScale}, {});
        if (o.reading()) (*adapters)->push_back(scale);
      });
}

Result<std::vector<AdapterScale>> parse_adapters(const Json& body) {
  if (!body.is_array()) return invalid_argument("expected an array of {id, scale}");
  std::optional<std::vector<AdapterScale>> adapters;
  const Json object = {{"lora", body}};
  HCACHE_RETURN_IF_ERROR(read_fields(object, [&](Fields& f) { adapters_field(f, &adapters); }));
  return std::move(*adapters);
}

void format_fields(Fields& f, std::string* schema, bool flat) {
  std::string type = "text";
  std::string wanted;
  f.required().one_of("type", &type, {"text", "json_object", "json_schema"},
                      "Plain text, any JSON object, or one that follows the schema.");
  const auto schema_fields = [&](Fields& o) {
    std::string name;
    bool strict = true;
    o.text("name", &name, "For the client's own use.");
    o.flag("strict", &strict, "The schema is always enforced.");
    o.schema("schema", &wanted, "The JSON schema.");
  };
  if (flat) {
    schema_fields(f);
  } else {
    f.object("json_schema", "With type json_schema.", schema_fields);
    f.schema("schema", &wanted, "The schema, for clients that put it here.");
  }
  if (type != "text") *schema = wanted.empty() ? R"({"type":"object"})" : wanted;
}

void function_fields(Fields& f, model::ChatTool* tool, std::string_view schema_name) {
  f.required().text("name", &tool->name, "Letters, digits and any of _-.:/, at most 128 of them.");
  if (f.reading() && f.ok() && !tool_name_ok(tool->name)) {
    f.fail("name", "must be 1 to 128 letters, digits or any of _-.:/");
  }
  f.text("description", &tool->description, "What it does, for the model.");
  f.schema(schema_name, &tool->parameters, "A JSON schema of its arguments.");
}

void tools_field(Fields& f, model::ChatInput* chat) {
  f.objects("tools", "What the model may call.", [&](Fields& o) {
    std::string type = "function";
    model::ChatTool tool;
    o.one_of("type", &type, {"function"}, {});
    o.required().object("function", {},
                        [&](Fields& fn) { function_fields(fn, &tool, "parameters"); });
    chat->tools.push_back(std::move(tool));
  });
}

void calls_field(Fields& f, model::ChatMessage* message) {
  f.objects("tool_calls", "Of the assistant's.", [&](Fields& o) {
    model::ToolCall call;
    call_fields(o, &call);
    message->tool_calls.push_back(std::move(call));
  });
  if (message->role != "assistant" && !message->tool_calls.empty()) {
    f.fail("tool_calls", "only the assistant calls tools");
  }
}

void logprobs_fields(Fields& f, GenerationRequest* r) {
  f.flag("logprobs", &r->logprobs, "Give the log-probability of every token.");
  f.integer("top_logprobs", &r->top_logprobs, {0, 20}, "And those of the likeliest ones.");
  if (r->top_logprobs > 0 && !r->logprobs) f.fail("top_logprobs", "needs logprobs: true");
}

void effort_field(Fields& f, std::string_view name, model::ChatInput* chat) {
  std::string effort;
  f.one_of(name, &effort, {"none", "minimal", "low", "medium", "high", "xhigh"},
           "How much the model should think first, where it can; none: not at all.");
  if (effort == "none") {
    chat->thinking = false;
  } else if (!effort.empty()) {
    chat->template_args["reasoning_effort"] = to_text(effort);
  }
}

void template_fields(Fields& f, model::ChatInput* chat) {
  f.value("chat_template_kwargs", {{"type", "object"}},
          "Variables for the chat template; enable_thinking is one that many know.",
          [&](const Json& value, const std::string& path) -> Status {
            if (!value.is_object()) return wrong_kind(path, "an object", value);
            for (const auto& item : value.items()) {
              if (item.key() == "enable_thinking") {
                if (!item.value().is_boolean()) {
                  return wrong_kind(path + ".enable_thinking", "a boolean", item.value());
                }
                chat->thinking = item.value().get<bool>();
              }
              chat->template_args[item.key()] = to_text(item.value());
            }
            return {};
          });
}

Result<model::ChatInput> parse_template_args(const std::string& text) {
  model::ChatInput chat;
  HCACHE_ASSIGN_OR_RETURN(Json args, parse_body(text));
  const Json body = {{"chat_template_kwargs", std::move(args)}};
  HCACHE_RETURN_IF_ERROR(read_fields(body, [&](Fields& f) { template_fields(f, &chat); }));
  return chat;
}

void apply_template_args(const model::ChatInput& defaults, model::ChatInput* chat) {
  constexpr const char* kThinking = "enable_thinking";
  const bool said = !chat->thinking || chat->template_args.contains(kThinking);
  if (!said && defaults.template_args.contains(kThinking)) chat->thinking = defaults.thinking;
  for (const auto& [name, value] : defaults.template_args) {
    if (name != kThinking || !said) chat->template_args.try_emplace(name, value);
  }
}

void check_tools(Fields& f, const GenerationRequest& r) {
  if (!f.reading() || !f.ok() || !r.chat) return;
  const model::ChatInput& chat = *r.chat;
  if (chat.tool_choice == model::ToolChoice::kRequired && chat.tools.empty()) {
    return f.fail("tool_choice", "requires a tool, but there are no tools");
  }
  const auto named = [&](const model::ChatTool& tool) { return tool.name == chat.only_tool; };
  if (!chat.only_tool.empty() && std::none_of(chat.tools.begin(), chat.tools.end(), named)) {
    return f.fail("tool_choice",
                  fmt::format("there is no tool '{}'", chat.only_tool.substr(0, 64)));
  }
  const bool may_call = !chat.tools.empty() && chat.tool_choice != model::ToolChoice::kNone;
  if (!r.sampling.grammar.empty() && (may_call || !chat.json_schema.empty())) {
    f.fail("grammar", "can't be combined with tools or a JSON schema");
  }
}

void apply_prompt(const model::ChatPrompt& prompt, GenerationRequest* request) {
  if (!prompt.grammar.empty()) {
    request->sampling.grammar = prompt.grammar;
    request->sampling.grammar_scope = prompt.grammar_scope;
  }
  request->stop.insert(request->stop.end(), prompt.stops.begin(), prompt.stops.end());
}

}  // namespace hcache::api
