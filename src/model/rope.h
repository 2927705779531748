// RoPE's numbers of a model where they are not the file's.
#pragma once

#include "base/status.h"
#include "gguf_file.h"
#include "model/model.h"
#include "model/rope.h"

namespace hcache::model {

// Changes what read_hparams() made of the file, by the arithmetic of libllama's context set-up.
// kInvalidArgument, kUnimplemented where the architecture leaves nothing to change.
Status override_rope(const GgufFile& file, const DecoderSpec& spec, const RopeOverride& rope,
                     HParams& h);

}  // namespace hcache::model
