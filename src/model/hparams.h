// From a GGUF file's metadata to the architecture and its numbers, checked.
#pragma once

#include "gguf_file.h"
#include "model/model.h"

namespace hcache::model {

// general.architecture's row of the spec table; kUnimplemented names the known ones.
Result<const DecoderSpec*> read_architecture(const GgufFile& file);

// Every number but n_vocab, which the embedding table tells. Errors name the file and the key.
Result<HParams> read_hparams(const GgufFile& file, const DecoderSpec& spec);

}  // namespace hcache::model
