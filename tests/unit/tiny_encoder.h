// Small BERT models with random weights and a vocabulary of letters and some words.
#pragma once

#include <ggml.h>
#include <gguf.h>

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace hcache::libllama::test {

struct TinyEncoder {
  int pooling = 1;  // as files have it: 1 mean, 2 the first row, 4 ranks
  int n_context = 64;
  uint32_t seed = 1;
};

// Special tokens, letters and digits at a word's beginning and within it, and words.
inline std::vector<std::string> tiny_encoder_tokens() {
  std::vector<std::string> tokens = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};
  const std::string begin = "\xE2\x96\x81";  // of a word
  for (const char c : std::string("abcdefghijklmnopqrstuvwxyz0123456789.,!?")) {
    tokens.push_back(begin + c);
    tokens.emplace_back(1, c);
  }
  for (const char* word : {"the", "sea", "light", "house", "keeper", "storm"}) {
    tokens.push_back(begin + word);
  }
  return tokens;
}

class TinyEncoderFile {
 public:
  explicit TinyEncoderFile(const TinyEncoder& options) : options_(options), random_(options.seed) {
    ggml_.reset(ggml_init({.mem_size = size_t{8} << 20, .mem_buffer = nullptr, .no_alloc = false}));
    write_metadata();
    write_vocabulary();
    write_weights();
  }
  [[nodiscard]] bool write(const std::string& path) const {
    return gguf_write_to_file(gguf_.get(), path.c_str(), /*only_meta=*/false);
  }

 private:
  static constexpr int kWidth = 32;
  static constexpr int kHidden = 64;
  static constexpr int kHeads = 2;
  static constexpr int kLayers = 2;

  void number(const char* key, uint32_t value) { gguf_set_val_u32(gguf_.get(), key, value); }

  void write_metadata() {
    gguf_context* g = gguf_.get();
    gguf_set_val_str(g, "general.architecture", "bert");
    number("bert.block_count", kLayers);
    number("bert.context_length", static_cast<uint32_t>(options_.n_context));
    number("bert.embedding_length", kWidth);
    number("bert.feed_forward_length", kHidden);
    number("bert.attention.head_count", kHeads);
    gguf_set_val_f32(g, "bert.attention.layer_norm_epsilon", 1e-6F);
    gguf_set_val_bool(g, "bert.attention.causal", false);
    number("bert.pooling_type", static_cast<uint32_t>(options_.pooling));
  }

  void write_vocabulary() {
    gguf_context* g = gguf_.get();
    std::vector<const char*> texts;
    for (const std::string& token : tokens_) texts.push_back(token.c_str());
    std::vector<int32_t> types(tokens_.size(), 1);
    for (size_t i = 0; i < 5; ++i) types[i] = 3;  // control
    gguf_set_val_str(g, "tokenizer.ggml.model", "bert");
    gguf_set_arr_str(g, "tokenizer.ggml.tokens", texts.data(), texts.size());
    gguf_set_arr_data(g, "tokenizer.ggml.token_type", GGUF_TYPE_INT32, types.data(), types.size());
    number("tokenizer.ggml.token_type_count", 2);
    const char* const keys[] = {"padding", "unknown", "cls", "seperator", "mask"};
    for (uint32_t i = 0; i < 5; ++i) {
      number(("tokenizer.ggml." + std::string(keys[i]) + "_token_id").c_str(), i);
    }
    number("tokenizer.ggml.bos_token_id", 2);
    number("tokenizer.ggml.eos_token_id", 3);
  }

  void tensor(const std::string& name, int columns, int rows, float around, float deviation) {
    ggml_tensor* t = rows == 0 ? ggml_new_tensor_1d(ggml_.get(), GGML_TYPE_F32, columns)
                               : ggml_new_tensor_2d(ggml_.get(), GGML_TYPE_F32, columns, rows);
    ggml_set_name(t, name.c_str());
    std::normal_distribution<float> weights(around, deviation);
    for (int64_t i = 0; i < ggml_nelements(t); ++i) ggml_get_data_f32(t)[i] = weights(random_);
    gguf_add_tensor(gguf_.get(), t);
  }
  void matrix(const std::string& name, int columns, int rows) {
    tensor(name + ".weight", columns, rows, 0, 0.1F);
    tensor(name + ".bias", rows, 0, 0, 0.1F);
  }
  void norm(const std::string& name) {
    tensor(name + ".weight", kWidth, 0, 1, 0.1F);
    tensor(name + ".bias", kWidth, 0, 0, 0.1F);
  }

  void write_weights() {
    tensor("token_embd.weight", kWidth, static_cast<int>(tokens_.size()), 0, 1);
    tensor("token_types.weight", kWidth, 2, 0, 1);
    tensor("position_embd.weight", kWidth, options_.n_context, 0, 1);
    norm("token_embd_norm");
    for (int i = 0; i < kLayers; ++i) {
      const std::string layer = "blk." + std::to_string(i) + ".";
      for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output"}) {
        matrix(layer + name, kWidth, kWidth);
      }
      matrix(layer + "ffn_up", kWidth, kHidden);
      matrix(layer + "ffn_down", kHidden, kWidth);
      norm(layer + "attn_output_norm");
      norm(layer + "layer_output_norm");
    }
    if (options_.pooling != 4) return;
    matrix("cls", kWidth, kWidth);
    matrix("cls.output", kWidth, 1);
  }

  struct GgmlFree {
    void operator()(ggml_context* context) const { ggml_free(context); }
  };
  struct GgufFree {
    void operator()(gguf_context* context) const { gguf_free(context); }
  };

  const TinyEncoder options_;
  const std::vector<std::string> tokens_ = tiny_encoder_tokens();
  std::mt19937 random_;
  std::unique_ptr<ggml_context, GgmlFree> ggml_;
  std::unique_ptr<gguf_context, GgufFree> gguf_{gguf_init_empty()};
};

}  // namespace hcache::libllama::test
