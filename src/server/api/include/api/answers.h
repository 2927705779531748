// Errors, and the answers that need no generation. Pure functions.
#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "api/json.h"
#include "api/request.h"
#include "base/status.h"
#include "model/tokenizer.h"

namespace hcache::api {

enum class ErrorStyle { kOpenAi, kAnthropic, kOllama };

// By the path of the endpoint: /v1/messages and below are Anthropic's, those below /api Ollama's.
[[nodiscard]] ErrorStyle error_style(std::string_view path);
[[nodiscard]] ErrorStyle error_style(Dialect dialect);

struct ErrorAnswer {
  int http_status = 500;
  Json body;
};
// The one place where a Code becomes an HTTP status. An invalid argument's place becomes OpenAI's
// `param`.
[[nodiscard]] ErrorAnswer render_error(const Status& status, ErrorStyle style);
// Of a prompt that is too long: what llama-server's clients cut it by. Tokens.
void tell_context(int64_t prompt, int64_t context, ErrorStyle style, ErrorAnswer* answer);
// For errors that the HTTP side finds itself (401, 404, 413, ...).
[[nodiscard]] Json error_body(int http_status, std::string_view message, ErrorStyle style);

struct ModelCard {
  std::string name;
  std::set<std::string> aliases;
  std::set<std::string> tags;
  int64_t created_s = 0;  // since 1970-01-01 UTC
  int64_t context = 0;    // tokens
  int64_t vocabulary = 0;
  int64_t parameters = 0;
  int64_t bytes = 0;
  int64_t width = 0;  // of the residual stream
};
// OpenAI's list of models, with llama-server's `meta`.
[[nodiscard]] Json models_answer(std::span<const ModelCard> models);
[[nodiscard]] Json model_answer(const ModelCard& model);

[[nodiscard]] Json count_tokens_answer(int64_t tokens);  // Anthropic's
[[nodiscard]] Json input_tokens_answer(int64_t tokens);  // OpenAI's
[[nodiscard]] Json tokenize_answer(const TokenizeRequest& request,
                                   const model::Tokenizer& tokenizer,
                                   std::span<const int32_t> tokens);
[[nodiscard]] Json detokenize_answer(std::string_view content);
[[nodiscard]] Json apply_template_answer(std::string_view prompt);

struct ServerProps {
  model::SamplingOptions defaults;
  int64_t seed = -1;    // -1: another one for each request
  int64_t context = 0;  // tokens that one sequence may have
  int slots = 0;        // sequences that may run at once
  std::string model_name;
  std::string model_path;
  std::string chat_template;
  std::string bos_text;
  std::string eos_text;
  std::string build;
  std::string weights;  // where they are
  std::string engine;   // "own", or "libllama: " and how state is kept
  bool pictures = false;
  bool sounds = false;
};
[[nodiscard]] Json props_answer(const ServerProps& props);

// One sequence in the arena, as a slot of llama-server's.
struct SlotState {
  int id = 0;
  int64_t context = 0;
  bool processing = false;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t reply_tokens = 0;
  int64_t remaining_tokens = -1;  // up to max_tokens; -1: no limit
};
[[nodiscard]] Json slots_answer(std::span<const SlotState> slots);

// What a slot action did.
struct SlotTransfer {
  int slot = 0;
  std::string filename;
  int64_t tokens = 0;
  uint64_t bytes = 0;
  double ms = 0;
};
[[nodiscard]] Json slot_saved_answer(const SlotTransfer& transfer);
[[nodiscard]] Json slot_restored_answer(const SlotTransfer& transfer);
[[nodiscard]] Json slot_erased_answer(int slot, int64_t tokens);

// The OpenAPI 3.1 document of all endpoints, as text.
[[nodiscard]] const std::string& openapi_document();

}  // namespace hcache::api
