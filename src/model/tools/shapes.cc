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
  const bool all_biases = is_any({"opt", "gpt2", "gptneox", "phi2", "starcoder2"});
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
          .tied_output = is_any({"opt", "gemma", "command-r"}),
          .qkv_bias = all_biases || is_any({"qwen2", "glm4", "seed_oss"}),
          .block_biases = all_biases,
          .output_bias = arch == "phi2",
          .two_blocks = n_head_kv < 4,
          .two_norms = arch == "falcon" && n_head_kv > 1,
          .n_rot = is_any({"phi2", "glm4", "stablelm", "gptneox"}) ? 32 : 0};
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
