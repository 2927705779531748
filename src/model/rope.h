// RoPE's numbers of a model where they are not the file's.
#pragma once

#include "base/status.h"
#include "gguf_file.h"
#include "model/model.h"
#include "model/rope.h"

namespace hcache::model {

// What YaRN multiplies Q and K by, as ggml_rope_ext() takes it. log_factor: the file's multiplier
// of the logarithm; 0: none.
[[nodiscard]] float yarn_magnitude(float freq_scale, float log_factor);

// Changes what read_hparams() made of the file, by the arithmetic of libllama's context set-up.
// kInvalidArgument, kUnimplemented where the architecture leaves nothing to change.
Status override_rope(const GgufFile& file, const DecoderSpec& spec, const RopeOverride& rope,
                     HParams& h);

}  // namespace hcache::model
