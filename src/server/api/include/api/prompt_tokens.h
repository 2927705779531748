// The tokens of a prompt as requests have them: texts and token ids in a row.
#pragma once

#include <cstdint>
#include <vector>

#include "api/request.h"
#include "base/status.h"
#include "model/tokenizer.h"

namespace hcache::api {

// The first part has what a text of this model begins with, if it is a text. kInvalidArgument: a
// token id that is not in the vocabulary.
[[nodiscard]] Result<std::vector<int32_t>> prompt_tokens(const model::Tokenizer& tokenizer,
                                                         const Prompt& prompt);

// Of /tokenize.
[[nodiscard]] Result<std::vector<int32_t>> prompt_tokens(const model::Tokenizer& tokenizer,
                                                         const TokenizeRequest& request);

}  // namespace hcache::api
