#include <fmt/format.h>

#include <algorithm>
#include <cctype>

#include "model/tools.h"
#include "weight_types.h"

namespace hcache::model {
namespace {

ModelShape llama(std::string name, int n_layer, int n_embd, int n_head, int n_head_kv, int n_ff,
                 int n_vocab, int n_ctx, float base = 10000.0F) {
  return {.name = std::move(name),
          .arch = "llama",
          .n_layer = n_layer,
          .n_embd = n_embd,
          .n_head = n_head,
          .n_head_kv = n_head_kv,
          .head_dim = n_embd / n_head,
          .n_ff = n_ff,
          .n_vocab = n_vocab,
          .n_ctx = n_ctx,
          .rope_freq_base = base};
}

ModelShape opt(std::string name, int n_layer, int n_embd, int n_head) {
  return {.name = std::move(name),
          .arch = "opt",
          .n_layer = n_layer,
          .n_embd = n_embd,
          .n_head = n_head,
          .n_head_kv = n_head,
          .head_dim = n_embd / n_head,
          .n_ff = 4 * n_embd,
          .n_vocab = 50272,
          .n_ctx = 2048,
          .tied_output = true,
          .qkv_bias = true,
          .block_biases = true};
}

ModelShape qwen2(std::string name, int n_layer, int n_embd, int n_head, int n_head_kv, int n_ff,
                 int n_vocab, bool tied) {
  return {.name = std::move(name),
          .arch = "qwen2",
          .n_layer = n_layer,
          .n_embd = n_embd,
          .n_head = n_head,
          .n_head_kv = n_head_kv,
          .head_dim = n_embd / n_head,
          .n_ff = n_ff,
          .n_vocab = n_vocab,
          .n_ctx = 32768,
          .rope_freq_base = 1e6F,
          .norm_eps = 1e-6F,
          .tied_output = tied,
          .qkv_bias = true};
}

ModelShape qwen3(std::string name, int n_layer, int n_embd, int n_head, int n_ff, bool tied) {
  return {.name = std::move(name),
          .arch = "qwen3",
          .n_layer = n_layer,
          .n_embd = n_embd,
          .n_head = n_head,
          .n_head_kv = 8,
          .head_dim = 128,
          .n_ff = n_ff,
          .n_vocab = 151936,
          .n_ctx = 40960,
          .rope_freq_base = 1e6F,
          .norm_eps = 1e-6F,
          .tied_output = tied};
}

ModelShape qwen3_30b_a3b() {
  ModelShape shape = qwen3("qwen3-30b-a3b", 48, 2048, 32, 6144, false);
  shape.n_head_kv = 4;
  return shape;
}

ModelShape falcon(std::string name, int n_layer, int n_embd, int n_head, int n_head_kv,
                  bool two_norms) {
  return {.name = std::move(name),
          .arch = "falcon",
          .n_layer = n_layer,
          .n_embd = n_embd,
          .n_head = n_head,
          .n_head_kv = n_head_kv,
          .head_dim = 64,
          .n_ff = 4 * n_embd,
          .n_vocab = 65024,
          .n_ctx = 2048,
          .two_norms = two_norms};
}

ModelShape with_experts(ModelShape shape, int n_expert, int n_used, int n_ff_expert) {
  shape.n_expert = n_expert;
  shape.n_expert_used = n_used;
  shape.n_ff_expert = n_ff_expert;
  return shape;
}

// Of another architecture: where nothing else is set, one that differs from Llama in its spec's row
// alone.
ModelShape as(std::string arch, ModelShape shape) {
  shape.arch = std::move(arch);
  return shape;
}

// Experts that every token goes through are one block, as wide as all of them together; the first
// layer has a dense one.
ModelShape deepseek_moe_16b() {
  ModelShape shape =
      as("deepseek", llama("deepseek-moe-16b", 28, 2048, 16, 16, 10944, 102400, 4096));
  shape.norm_eps = 1e-6F;
  shape.n_ff_shared = 2 * 1408;
  shape.n_dense_layers = 1;
  return with_experts(std::move(shape), 64, 6, 1408);
}

ModelShape gptneox(std::string name, int n_layer, int n_embd, int n_head, int n_vocab) {
  ModelShape shape = as("gptneox", llama(std::move(name), n_layer, n_embd, n_head, n_head,
                                         4 * n_embd, n_vocab, 2048));
  shape.qkv_bias = true;
  shape.block_biases = true;
  shape.two_blocks = false;
  shape.n_rot = shape.head_dim / 4;
  return shape;
}

ModelShape gemma(std::string name, int n_layer, int n_embd, int n_head, int n_head_kv, int n_ff) {
  return {.name = std::move(name),
          .arch = "gemma",
          .n_layer = n_layer,
          .n_embd = n_embd,
          .n_head = n_head,
          .n_head_kv = n_head_kv,
          .head_dim = 256,
          .n_ff = n_ff,
          .n_vocab = 256000,
          .n_ctx = 8192,
          .norm_eps = 1e-6F,
          .tied_output = true};
}

ModelShape gemma3_12b() {
  ModelShape shape = gemma("gemma3-12b", 48, 3840, 16, 8, 15360);
  shape.arch = "gemma3";
  shape.n_vocab = 262208;
  shape.n_ctx = 131072;
  shape.rope_freq_base = 1e6F;
  shape.n_window = 1024;
  shape.window_period = 6;
  return shape;
}

ModelShape gpt_oss(std::string name, int n_layer, int n_expert) {
  return {.name = std::move(name),
          .arch = "gpt-oss",
          .n_layer = n_layer,
          .n_embd = 2880,
          .n_head = 64,
          .n_head_kv = 8,
          .head_dim = 64,
          .n_ff = 2880,
          .n_vocab = 201088,
          .n_ctx = 131072,
          .rope_freq_base = 1.5e5F,
          .qkv_bias = true,
          .block_biases = true,
          .n_expert = n_expert,
          .n_expert_used = 4,
          .n_ff_expert = 2880,
          .expert_biases = true,
          .n_window = 128,
          .window_period = 2};
}

ModelShape tied(ModelShape shape) {
  shape.tied_output = true;
  return shape;
}

// From the models' published configurations.
const std::vector<ModelShape>& shapes() {
  static const std::vector<ModelShape> table = {
      llama("llama-30b", 60, 6656, 52, 52, 17920, 32000, 2048),
      llama("llama2-7b", 32, 4096, 32, 32, 11008, 32000, 4096),
      llama("llama2-13b", 40, 5120, 40, 40, 13824, 32000, 4096),
      llama("llama2-70b", 80, 8192, 64, 8, 28672, 32000, 4096),
      llama("llama3-8b", 32, 4096, 32, 8, 14336, 128256, 8192, 5e5F),
      llama("llama3-70b", 80, 8192, 64, 8, 28672, 128256, 8192, 5e5F),
      llama("mistral-7b", 32, 4096, 32, 8, 14336, 32000, 32768, 1e6F),
      llama("tinyllama-1.1b", 22, 2048, 32, 4, 5632, 32000, 2048),
      tied(llama("smollm2-135m", 30, 576, 9, 3, 1536, 49152, 8192, 1e5F)),
      tied(llama("smollm2-360m", 32, 960, 15, 5, 2560, 49152, 8192, 1e5F)),
      tied(llama("smollm2-1.7b", 24, 2048, 32, 32, 8192, 49152, 8192, 1.3e5F)),
      opt("opt-125m", 12, 768, 12),
      opt("opt-1.3b", 24, 2048, 32),
      opt("opt-6.7b", 32, 4096, 32),
      opt("opt-13b", 40, 5120, 40),
      opt("opt-30b", 48, 7168, 56),
      opt("opt-66b", 64, 9216, 72),
      qwen2("qwen2.5-0.5b", 24, 896, 14, 2, 4864, 151936, true),
      qwen2("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151936, true),
      qwen2("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, false),
      qwen3("qwen3-0.6b", 28, 1024, 16, 3072, true),
      qwen3("qwen3-4b", 36, 2560, 32, 9728, true),
      qwen3("qwen3-8b", 36, 4096, 32, 12288, false),
      with_experts(llama("mixtral-8x7b", 32, 4096, 32, 8, 14336, 32000, 32768, 1e6F), 8, 2, 14336),
      with_experts(as("olmoe", llama("olmoe-1b-7b", 16, 2048, 16, 16, 1024, 50304, 4096)), 64, 8,
                   1024),
      with_experts(as("qwen3moe", qwen3_30b_a3b()), 128, 8, 768),
      deepseek_moe_16b(),
      gptneox("pythia-1.4b", 24, 2048, 16, 50304),
      gptneox("pythia-6.9b", 32, 4096, 32, 50432),
      gptneox("gpt-neox-20b", 44, 6144, 64, 50432),
      as("phi3", llama("phi3-mini", 32, 3072, 32, 32, 8192, 32064, 4096)),
      gemma("gemma-2b", 18, 2048, 8, 1, 16384),
      gemma("gemma-7b", 28, 3072, 16, 16, 24576),
      gemma3_12b(),
      gpt_oss("gpt-oss-20b", 24, 32),
      gpt_oss("gpt-oss-120b", 36, 128),
      falcon("falcon-7b", 32, 4544, 71, 1, false),
      falcon("falcon-40b", 60, 8192, 128, 8, true),
  };
  return table;
}

std::string upper(std::string_view text) {
  std::string out(text);
  for (char& c : out) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  return out;
}

}  // namespace

std::span<const ModelShape> published_shapes() { return shapes(); }

Result<ModelShape> find_shape(std::string_view name) {
  std::string known;
  for (const ModelShape& shape : shapes()) {
    if (shape.name == name) return shape;
    known += (known.empty() ? "" : ", ") + shape.name;
  }
  return not_found(fmt::format("shape {} is unknown; there are: {}", name, known));
}

ModelShape tiny_shape(const DecoderSpec& spec, int n_head_kv) {
  const std::string_view arch = spec.arch;
  const auto is_any = [&](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), arch) != names.end();
  };
  const bool all_biases =
      is_any({"opt", "gpt2", "gptneox", "phi2", "starcoder2", "phimoe", "gpt-oss"});
  // As wide as a dense block where llama.cpp reads no width of experts.
  const bool has_experts =
      is_any({"qwen2moe", "qwen3moe", "olmoe", "deepseek", "phimoe", "granitemoe", "gpt-oss"});
  const bool own_width = is_any({"qwen2moe", "qwen3moe", "deepseek", "gpt-oss"});
  const int n_ff_expert = !has_experts ? 0 : own_width ? 256 : 512;
  const bool windows = is_any({"gemma2", "gemma3", "cohere2", "gpt-oss"});
  const bool shares = is_any({"qwen2moe", "deepseek", "granitemoe"});
  return {.name = fmt::format("tiny-{}-{}", arch, n_head_kv),
          .arch = spec.arch,
          .n_layer = 3,
          .n_embd = 256,
          .n_head = 4,
          .n_head_kv = n_head_kv,
          .head_dim = 64,
          .n_ff = 512,
          .n_vocab = 320,
          .n_ctx = 2048,
          .norm_eps = 1e-5F,
          .tied_output = is_any({"opt", "gemma", "gemma2", "gemma3", "command-r", "cohere2"}),
          .qkv_bias = all_biases || is_any({"qwen2", "glm4", "seed_oss"}),
          .block_biases = all_biases,
          .output_bias = is_any({"phi2", "phimoe"}),
          .two_blocks = n_head_kv < 4,
          .two_norms = arch == "falcon" && n_head_kv > 1,
          .n_rot = is_any({"phi2", "glm4", "stablelm", "gptneox"}) ? 32 : 0,
          .n_expert = has_experts ? 8 : 0,
          .n_expert_used = has_experts ? 3 : 0,
          .n_ff_expert = n_ff_expert,
          .n_ff_shared = shares ? 512 : 0,
          .n_dense_layers = arch == "deepseek" ? 1 : 0,
          .expert_biases = arch == "gpt-oss",
          .n_window = windows ? 40 : 0,
          .window_period = windows ? 3 : 0};
}

Result<ggml_type> parse_weight_type(std::string_view name) {
  std::string known;
  for (const WeightType& t : weight_types()) {
    const std::string own = upper(ggml_type_name(t.type));
    if (own == upper(name)) return t.type;
    known += (known.empty() ? "" : ", ") + own;
  }
  return invalid_argument(fmt::format("weight type {} is unknown; there are: {}", name, known));
}

}  // namespace hcache::model
