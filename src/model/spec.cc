#include <array>
#include <string_view>

#include "model/model.h"

namespace hcache::model {
namespace {

constexpr int kNeox = GGML_ROPE_TYPE_NEOX;

// To add an architecture: add its row here (and a graph piece where it is really new); the loader,
// the generator of synthetic models and the oracle tests go by this table.
constexpr std::array kSpecs = {
    DecoderSpec{.arch = "llama",  // Llama 2 and 3, Mistral, Mixtral, SmolLM2
                .rope_freqs = true,
                .normalised_experts = true},
    DecoderSpec{.arch = "qwen2", .rope_mode = kNeox},
    DecoderSpec{.arch = "qwen3", .rope_mode = kNeox, .head_norm = HeadNorm::kHead},
    DecoderSpec{.arch = "qwen2moe", .rope_mode = kNeox, .shared_experts = SharedExperts::kWeighed},
    DecoderSpec{.arch = "qwen3moe",
                .rope_mode = kNeox,
                .head_norm = HeadNorm::kHead,
                .normalised_experts = true},
    DecoderSpec{.arch = "olmoe", .rope_mode = kNeox, .head_norm = HeadNorm::kRow},
    DecoderSpec{.arch = "deepseek",  // the first one, with heads of their own
                .shared_experts = SharedExperts::kByCount},
    DecoderSpec{.arch = "phimoe",
                .norm_biases = true,
                .rope_mode = kNeox,
                .long_rope = true,
                .normalised_experts = true},
    DecoderSpec{.arch = "gpt-oss",
                .ffn_norm = "post_attention_norm",
                .rope_mode = kNeox,
                .activation = Activation::kClampedSwiglu,
                .softmax_of_chosen = true,
                .window_period = 2,
                .sinks = true},
    DecoderSpec{.arch = "mistral3",  // Mistral Small 3, Ministral 3
                .rope_freqs = true,
                .normalised_experts = true,
                .temperature = true},
    DecoderSpec{.arch = "falcon",  // 7B, 40B and 180B
                .norm = Norm::kLayer,
                .norm_biases = true,
                .rope_mode = kNeox,
                .activation = Activation::kGelu,
                .gated_ffn = false,
                .parallel = Parallel::kAlways,
                .fused_qkv = true},
    DecoderSpec{.arch = "opt",  // our own GGUF convention: docs/howto/add-a-model.md
                .norm = Norm::kLayer,
                .norm_biases = true,
                .rope_mode = -1,
                .activation = Activation::kRelu,
                .gated_ffn = false,
                .learned_positions = true},
    DecoderSpec{.arch = "gemma",  // the first one; its norms' weights hold their 1
                .rope_mode = kNeox,
                .activation = Activation::kGelu,
                .embedding_by_width = true},
    DecoderSpec{.arch = "gemma2",
                .post_norm = true,
                .rope_mode = kNeox,
                .activation = Activation::kGelu,
                .embedding_by_width = true,
                .window_period = 2,
                .soft_caps = true,
                .logit_soft_cap = true,
                .width_scaled_layers = 46},
    DecoderSpec{.arch = "gemma3",
                .post_norm = true,
                .rope_mode = kNeox,
                .activation = Activation::kGelu,
                .head_norm = HeadNorm::kHead,
                .embedding_by_width = true,
                .window_period = 6,
                .window_rope = WindowRope::kOwnBase,
                .logit_soft_cap = true,
                .width_scaled_layers = 62},
    DecoderSpec{.arch = "phi2",
                .norm = Norm::kLayer,
                .norm_biases = true,
                .rope_mode = kNeox,
                .activation = Activation::kGelu,
                .gated_ffn = false,
                .parallel = Parallel::kAlways},
    DecoderSpec{.arch = "phi3",  // Phi-3, Phi-3.5 and Phi-4, mini included
                .rope_mode = kNeox,
                .long_rope = true,
                .fused_gate_up = true},
    DecoderSpec{.arch = "granite",
                .rope_freqs = true,
                .scales = true,
                .divides_logits = true,
                .normalised_experts = true,
                .shared_experts = SharedExperts::kByLength},
    DecoderSpec{.arch = "granitemoe",
                .rope_freqs = true,
                .scales = true,
                .divides_logits = true,
                .normalised_experts = true,
                .shared_experts = SharedExperts::kByLength},
    DecoderSpec{.arch = "olmo2",
                .pre_norm = false,
                .post_norm = true,
                .rope_mode = kNeox,
                .head_norm = HeadNorm::kRow,
                .window_period = 4,
                .window_rope = WindowRope::kUnscaled},
    DecoderSpec{.arch = "smollm3", .no_rope_step = 4},
    DecoderSpec{.arch = "glm4", .post_norm = true, .fused_gate_up = true},
    DecoderSpec{.arch = "seed_oss", .ffn_norm = "post_attention_norm", .rope_mode = kNeox},
    DecoderSpec{.arch = "command-r",  // and Aya 23
                .norm = Norm::kLayer,
                .parallel = Parallel::kAlways,
                .head_norm = HeadNorm::kEachHead,
                .scales = true},
    DecoderSpec{.arch = "cohere2",  // Command R7B and A
                .norm = Norm::kLayer,
                .parallel = Parallel::kAlways,
                .scales = true,
                .window_period = 4,
                .window_rope = WindowRope::kOnlyThere},
    DecoderSpec{.arch = "exaone4",
                .pre_norm = false,
                .post_norm = true,
                .rope_mode = kNeox,
                .rope_freqs = true,
                .head_norm = HeadNorm::kHead,
                .window_period = 4,
                .window_rope = WindowRope::kOnlyThere,
                .least_window_layers = 64},
    DecoderSpec{.arch = "starcoder2",
                .norm = Norm::kLayer,
                .norm_biases = true,
                .rope_mode = kNeox,
                .activation = Activation::kGelu,
                .gated_ffn = false},
    DecoderSpec{.arch = "stablelm",
                .norm = Norm::kLayer,
                .norm_biases = true,
                .rope_mode = kNeox,
                .parallel = Parallel::kWithoutFfnNorm,
                .head_norm = HeadNorm::kEachHead},
    DecoderSpec{.arch = "gptneox",  // Pythia, too
                .norm = Norm::kLayer,
                .norm_biases = true,
                .rope_mode = kNeox,
                .activation = Activation::kGelu,
                .gated_ffn = false,
                .parallel = Parallel::kByKey,
                .fused_qkv = true},
    DecoderSpec{.arch = "gpt2",
                .norm = Norm::kLayer,
                .norm_biases = true,
                .rope_mode = -1,
                .activation = Activation::kGelu,
                .gated_ffn = false,
                .learned_positions = true,
                .fused_qkv = true},
    DecoderSpec{.arch = "internlm2"},
    DecoderSpec{.arch = "orion", .norm = Norm::kLayer, .norm_biases = true, .rope_mode = kNeox},
    DecoderSpec{.arch = "nemotron",
                .norm = Norm::kLayer,
                .norm_biases = true,
                .rope_mode = kNeox,
                .activation = Activation::kSquaredRelu,
                .gated_ffn = false},
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
