// Reads the vocabulary's keys out of a GGUF file that was not checked yet.
#pragma once

#include <gguf.h>

#include <memory>
#include <string>

#include "base/status.h"

namespace hcache::model {

struct GgufDeleter {
  void operator()(gguf_context* ctx) const { gguf_free(ctx); }
};
using GgufPtr = std::unique_ptr<gguf_context, GgufDeleter>;

// A tensor-free GGUF context that holds `general.name` and the `tokenizer.*` keys of the file, with
// general.architecture set to "llama": llama.cpp's vocabulary code does not depend on the
// architecture of a decoder, but it refuses names it does not know (opt).
//
// Everything in which llama.cpp trusts a file (and would abort, or read beyond an array) is checked
// here. Errors as Tokenizer::load.
Result<GgufPtr> read_vocab_metadata(const std::string& path);

}  // namespace hcache::model
