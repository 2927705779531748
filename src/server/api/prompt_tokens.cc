#include "api/prompt_tokens.h"

#include <fmt/format.h>

#include <variant>

namespace hcache::api {
namespace {

// `options` are those of a text at the beginning; others get no BOS.
Result<std::vector<int32_t>> encode(const model::Tokenizer& tokenizer, const Prompt& prompt,
                                    const model::EncodeOptions& options) {
  if (!prompt.media.empty()) {
    return invalid_argument("multimodal_data: only prompts that are to be continued may have any");
  }
  std::vector<int32_t> tokens;
  for (const Prompt::Part& part : prompt.parts) {
    if (const auto* ids = std::get_if<std::vector<int32_t>>(&part)) {
      tokens.insert(tokens.end(), ids->begin(), ids->end());
      continue;
    }
    const model::EncodeOptions here = {.add_special = options.add_special && tokens.empty(),
                                       .parse_special = options.parse_special};
    HCACHE_ASSIGN_OR_RETURN(const std::vector<int32_t> added,
                            tokenizer.encode(std::get<std::string>(part), here));
    tokens.insert(tokens.end(), added.begin(), added.end());
  }
  return tokens;
}

}  // namespace

Result<std::vector<int32_t>> prompt_tokens(const model::Tokenizer& tokenizer,
                                           const Prompt& prompt) {
  HCACHE_ASSIGN_OR_RETURN(std::vector<int32_t> tokens,
                          encode(tokenizer, prompt, {.add_special = true, .parse_special = true}));
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
  return encode(tokenizer, request.content,
                {.add_special = request.add_special, .parse_special = request.parse_special});
}

}  // namespace hcache::api
