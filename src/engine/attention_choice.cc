#include "attention_choice.h"

#include <fmt/format.h>

#include "engine/attention.h"

namespace hcache::engine {

Result<bool> choose_attention(const model::Model& model, const model::Device& device,
                              const EngineOptions& options) {
  const model::HParams& hp = model.hparams();
  const AttentionShape shape = {.n_head = hp.n_head,
                                .n_head_kv = hp.n_head_kv,
                                .head_dim_k = hp.head_dim,
                                .head_dim_v = hp.head_dim,
                                .scale = hp.attention_scale};
  const bool applies =
      device.is_cpu() && options.kv_type == GGML_TYPE_F16 && attention_supports(shape);
  if (options.attention == AttentionKind::kOurs && !applies) {
    return unimplemented(
        fmt::format("our attention kernel needs the CPU and "
                    "an F16 KV cache (device {}, KV type "
                    "{}); use --attention auto",
                    device.name(), ggml_type_name(options.kv_type)));
  }
  return applies && options.attention != AttentionKind::kGgml &&
         options.attention != AttentionKind::kScores;
}

Status check_kv_type(const model::Model& model, ggml_type type) {
  const model::HParams& hp = model.hparams();
  switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16: break;
    case GGML_TYPE_Q8_0:
      if (hp.head_dim % ggml_blck_size(GGML_TYPE_Q8_0) != 0) {
        return unimplemented(
            fmt::format("a Q8_0 KV cache needs heads divisible "
                        "by 32, this model's have {}; use f16",
                        hp.head_dim));
      }
      break;
    default:
      return unimplemented(fmt::format("KV type {} is not supported; use f16, f32, bf16 or q8_0",
                                       ggml_type_name(type)));
  }
  return {};
}

}  // namespace hcache::engine
