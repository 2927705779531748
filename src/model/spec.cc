#include <array>
#include <string_view>

#include "model/model.h"

namespace hcache::model {
namespace {

// To add an architecture: add its row here (and a graph piece where it is really new); the loader,
// the generator of synthetic models and the oracle tests go by this table.
constexpr std::array kSpecs = {
    DecoderSpec{
        .arch = "llama",  // Llama 2 and 3, Mistral, SmolLM2
        .norm = Norm::kRms,
        .rope_mode = GGML_ROPE_TYPE_NORMAL,
        .activation = Activation::kSilu,
        .gated_ffn = true,
        .parallel_attention = false,
        .learned_positions = false,
        .qk_norm = false,
        .fused_qkv = false,
    },
    DecoderSpec{
        .arch = "qwen2",
        .norm = Norm::kRms,
        .rope_mode = GGML_ROPE_TYPE_NEOX,
        .activation = Activation::kSilu,
        .gated_ffn = true,
        .parallel_attention = false,
        .learned_positions = false,
        .qk_norm = false,
        .fused_qkv = false,
    },
    DecoderSpec{
        .arch = "qwen3",
        .norm = Norm::kRms,
        .rope_mode = GGML_ROPE_TYPE_NEOX,
        .activation = Activation::kSilu,
        .gated_ffn = true,
        .parallel_attention = false,
        .learned_positions = false,
        .qk_norm = true,
        .fused_qkv = false,
    },
    DecoderSpec{
        .arch = "falcon",  // 7B, 40B and 180B
        .norm = Norm::kLayer,
        .rope_mode = GGML_ROPE_TYPE_NEOX,
        .activation = Activation::kGelu,
        .gated_ffn = false,
        .parallel_attention = true,
        .learned_positions = false,
        .qk_norm = false,
        .fused_qkv = true,
    },
    DecoderSpec{
        .arch = "opt",  // our own GGUF convention: docs/howto/add-a-model.md
        .norm = Norm::kLayer,
        .rope_mode = -1,
        .activation = Activation::kRelu,
        .gated_ffn = false,
        .parallel_attention = false,
        .learned_positions = true,
        .qk_norm = false,
        .fused_qkv = false,
    },
};

}  // namespace

std::span<const DecoderSpec> decoder_specs() { return kSpecs; }

const DecoderSpec* find_decoder_spec(std::string_view arch) {
  for (const DecoderSpec& spec : kSpecs) {
    if (arch == spec.arch) return &spec;
  }
  return nullptr;
}

}  // namespace hcache::model
