#include "api/answers.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "reply_base.h"

namespace hcache::api {
namespace {

int http_status(Code code, ErrorStyle style) {
  switch (code) {
    case Code::kOk: return 200;
    case Code::kCancelled: return 499;
    case Code::kInvalidArgument:
    case Code::kOutOfRange: return 400;
    case Code::kNotFound: return 404;
    case Code::kAlreadyExists:
    case Code::kFailedPrecondition: return 409;
    case Code::kPermissionDenied: return 403;
    case Code::kResourceExhausted: return 429;
    case Code::kUnimplemented: return 501;
    case Code::kUnavailable: return style == ErrorStyle::kAnthropic ? 529 : 503;
    case Code::kDataLoss:
    case Code::kInternal: return 500;
  }
  return 500;
}

const char* error_type(int http_status, ErrorStyle style) {
  const bool anthropic = style == ErrorStyle::kAnthropic;
  switch (http_status) {
    case 401: return "authentication_error";
    case 403: return "permission_error";
    case 404: return "not_found_error";
    case 413: return anthropic ? "request_too_large" : "invalid_request_error";
    case 429: return "rate_limit_error";
    case 503:
    case 529: return anthropic ? "overloaded_error" : "unavailable_error";
    case 501: return anthropic ? "invalid_request_error" : "not_supported_error";
    default: break;
  }
  if (http_status < 500) return "invalid_request_error";
  return anthropic ? "api_error" : "server_error";
}

Json make_body(int http_status, std::string_view message, Json param, Json code, ErrorStyle style) {
  if (style == ErrorStyle::kOllama) return {{"error", message}};
  if (style == ErrorStyle::kAnthropic) {
    return {{"type", "error"},
            {"error", {{"type", error_type(http_status, style)}, {"message", message}}}};
  }
  return {{"error",
           {{"message", message},
            {"type", error_type(http_status, style)},
            {"param", std::move(param)},
            {"code", std::move(code)}}}};
}

// The field that a message of the parsers begins with; null when it begins with none.
Json param_of(const Status& status) {
  if (status.code() != Code::kInvalidArgument) return nullptr;
  const std::string& message = status.message();
  const size_t colon = message.find(": ");
  if (colon == std::string::npos || colon == 0) return nullptr;
  const auto in_path = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '[' ||
           c == ']';
  };
  const std::string path = message.substr(0, colon);
  return std::all_of(path.begin(), path.end(), in_path) ? Json(path) : Json(nullptr);
}

}  // namespace

ErrorStyle error_style(std::string_view path) {
  constexpr std::string_view kMessages = "/v1/messages";
  if (path.starts_with("/api/")) return ErrorStyle::kOllama;
  const bool anthropic = path.substr(0, kMessages.size()) == kMessages &&
                         (path.size() == kMessages.size() || path[kMessages.size()] == '/');
  return anthropic ? ErrorStyle::kAnthropic : ErrorStyle::kOpenAi;
}

ErrorStyle error_style(Dialect dialect) {
  switch (dialect) {
    case Dialect::kMessages: return ErrorStyle::kAnthropic;
    case Dialect::kOllamaChat:
    case Dialect::kOllamaGenerate: return ErrorStyle::kOllama;
    default: return ErrorStyle::kOpenAi;
  }
}

ErrorAnswer render_error(const Status& status, ErrorStyle style) {
  const int http = http_status(status.code(), style);
  // Clients look for this one to cut their conversations.
  const std::string code = status.code() == Code::kOutOfRange
                               ? "context_length_exceeded"
                               : std::string(code_name(status.code()));
  return {http, make_body(http, status.message(), param_of(status), code, style)};
}

void tell_context(int64_t prompt, int64_t context, ErrorStyle style, ErrorAnswer* answer) {
  if (style != ErrorStyle::kOpenAi) return;
  Json& error = answer->body["error"];
  error["type"] = "exceed_context_size_error";
  error["n_prompt_tokens"] = prompt;
  error["n_ctx"] = context;
}

Json error_body(int http_status, std::string_view message, ErrorStyle style) {
  return make_body(http_status, message, nullptr, nullptr, style);
}

Json model_answer(const ModelCard& model) {
  return {{"id", model.name},
          {"object", "model"},
          {"created", model.created_s},
          {"owned_by", "hcache"},
          {"aliases", model.aliases},
          {"tags", model.tags},
          {"meta",
           {{"n_ctx_train", model.context},
            {"n_vocab", model.vocabulary},
            {"n_embd", model.width},
            {"n_params", model.parameters},
            {"size", model.bytes}}}};
}

Json models_answer(std::span<const ModelCard> models) {
  Json data = Json::array();
  for (const ModelCard& model : models) data.push_back(model_answer(model));
  return {{"object", "list"}, {"data", std::move(data)}};
}

Json count_tokens_answer(int64_t tokens) { return {{"input_tokens", tokens}}; }
Json input_tokens_answer(int64_t tokens) {
  return {{"object", "response.input_tokens"}, {"input_tokens", tokens}};
}

Json tokenize_answer(const TokenizeRequest& request, const model::Tokenizer& tokenizer,
                     std::span<const int32_t> tokens) {
  Json list = Json::array();
  for (const int32_t token : tokens) {
    if (!request.with_pieces) {
      list.push_back(token);
      continue;
    }
    const std::string piece = tokenizer.piece(token, true);
    const bool whole = valid_text(piece) == piece;
    list.push_back({{"id", token}, {"piece", whole ? Json(piece) : bytes_json(piece)}});
  }
  return {{"tokens", std::move(list)}};
}

Json detokenize_answer(std::string_view content) { return {{"content", content}}; }

Json apply_template_answer(std::string_view prompt) { return {{"prompt", prompt}}; }

Json props_answer(const ServerProps& props) {
  Json params = sampling_json(props.defaults);
  params["seed"] = props.seed;
  return {
      {"default_generation_settings", {{"n_ctx", props.context}, {"params", std::move(params)}}},
      {"total_slots", props.slots},
      {"is_sleeping", false},  // one that sleeps is answered for by the router
      {"model_alias", props.model_name},
      {"model_path", props.model_path},
      {"modalities", {{"vision", props.pictures}, {"audio", props.sounds}}},
      {"media_marker", model::kMediaMarker},
      {"chat_template", props.chat_template},
      {"bos_token", props.bos_text},
      {"eos_token", props.eos_text},
      {"build_info", props.build},
      {"weights", props.weights},
      {"engine", props.engine}};
}

Json slots_answer(std::span<const SlotState> slots) {
  Json out = Json::array();
  for (const SlotState& slot : slots) {
    out.push_back({{"id", slot.id},
                   {"n_ctx", slot.context},
                   {"speculative", false},
                   {"is_processing", slot.processing},
                   {"n_prompt_tokens", slot.prompt_tokens},
                   {"n_prompt_tokens_cache", slot.cached_tokens},
                   {"next_token", Json::array({Json{{"has_next_token", slot.processing},
                                                    {"n_remain", slot.remaining_tokens},
                                                    {"n_decoded", slot.reply_tokens}}})}});
  }
  return out;
}

Json slot_saved_answer(const SlotTransfer& transfer) {
  return {{"id_slot", transfer.slot},
          {"filename", transfer.filename},
          {"n_saved", transfer.tokens},
          {"n_written", transfer.bytes},
          {"timings", {{"save_ms", transfer.ms}}}};
}

Json slot_restored_answer(const SlotTransfer& transfer) {
  return {{"id_slot", transfer.slot},
          {"filename", transfer.filename},
          {"n_restored", transfer.tokens},
          {"n_read", transfer.bytes},
          {"timings", {{"restore_ms", transfer.ms}}}};
}

Json slot_erased_answer(int slot, int64_t tokens) {
  return {{"id_slot", slot}, {"n_erased", tokens}};
}

}  // namespace hcache::api
