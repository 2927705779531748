#include "api/prompt_tokens.h"

#include <fmt/format.h>

#include <variant>

namespace hcache::api {

Result<std::vector<int32_t>> prompt_tokens(const model::Tokenizer& tokenizer,
                                           const Prompt& prompt) {
  if (!prompt.media.empty()) {
    return invalid_argument("multimodal_data: only prompts that are to be continued may have any");
  }
  std::vector<int32_t> tokens;
  for (const Prompt::Part& part : prompt.parts) {
    if (const auto* ids = std::get_if<std::vector<int32_t>>(&part)) {
      tokens.insert(tokens.end(), ids->begin(), ids->end());
      continue;
    }
    const model::EncodeOptions options = {.add_special = tokens.empty(), .parse_special = true};
    HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> added,
                            tokenizer.encode(std::get<std::string>(part), options));
    tokens.insert(tokens.end(), added.begin(), added.end());
  }
  for (const int32_t token : tokens) {
    if (token < 0 || token >= tokenizer.n_vocab()) {
      return invalid_argument(fmt::format("prompt: token {} is not in the vocabulary of {} tokens",
                                          token, tokenizer.n_vocab()));
    }
  }
  return tokens;
}

Result<std::vector<int32_t>> prompt_tokens(const model::Tokenizer& tokenizer,
                                           const TokenizeRequest& request) {
  if (!request.content.media.empty()) {
    return invalid_argument("multimodal_data: only prompts that are to be continued may have any");
  }
  std::vector<int32_t> tokens;
  for (const Prompt::Part& part : request.content.parts) {
    if (const auto* ids = std::get_if<std::vector<int32_t>>(&part)) {
      tokens.insert(tokens.end(), ids->begin(), ids->end());
      continue;
    }
    const model::EncodeOptions options = {.add_special = request.add_special && tokens.empty(),
                                          .parse_special = request.parse_special};
    HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> added,
                            tokenizer.encode(std::get<std::string>(part), options));
    tokens.insert(tokens.end(), added.begin(), added.end());
  }
  return tokens;
}

}  // namespace hcache::api
