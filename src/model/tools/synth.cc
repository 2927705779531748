#include <fmt/format.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>

#include "base/xxh3.h"
#include "gguf_file.h"
#include "gguf_writer.h"
#include "model/tools.h"
#include "quantise.h"
#include "weight_types.h"

namespace hcache::model {
namespace {

// Uniform values in mean +- width.
struct Init {
  float mean;
  float width;
};

Init standard_deviation(float sigma) { return {0.0F, std::sqrt(3.0F) * sigma}; }

// SplitMix64: a hash of a counter, so that any element can be made on its own.
uint64_t mix(uint64_t z) {
  z += 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

void fill_uniform(uint64_t stream, int64_t row, int64_t n, Init init, float* out) {
  const uint64_t base = mix(stream ^ static_cast<uint64_t>(row));
  constexpr float kUnit = 1.0F / 16777216.0F;  // 24 bits
  for (int64_t i = 0; i < n; i++) {
    const uint64_t bits = mix(base + static_cast<uint64_t>(i));
    const float u = static_cast<float>(bits >> 40) * kUnit;  // [0, 1)
    out[i] = init.mean + init.width * (2.0F * u - 1.0F);
  }
}

// Quantising is slow (ten million K-quant weights a second on one core), so large quantised tensors
// are composed of blocks that were quantised once: block b of row r is one of kPoolWeights / block
// size, chosen by a hash of (r, b).
constexpr int64_t kPoolWeights = 1 << 18;
constexpr int64_t kPooledFrom = 1 << 22;  // weights of a tensor

bool is_pooled(const GgufTensor& t) {
  return ggml_is_quantized(t.type) && t.n_elements() >= kPooledFrom;
}

class BlockPool {
 public:
  BlockPool(ggml_type type, Init init, uint64_t seed)
      : n_blocks_(static_cast<uint64_t>(kPoolWeights / ggml_blck_size(type))),
        block_bytes_(ggml_type_size(type)),
        bytes_(n_blocks_ * block_bytes_) {
    std::vector<float> values(static_cast<size_t>(kPoolWeights));
    fill_uniform(seed, 0, kPoolWeights, init, values.data());
    quantise_rows(type, values.data(), 1, kPoolWeights, bytes_.data());
  }
  void compose(uint64_t stream, int64_t row, size_t n_bytes, uint8_t* out) const {
    const uint64_t base = mix(stream ^ static_cast<uint64_t>(row));
    for (size_t at = 0; at < n_bytes; at += block_bytes_) {
      const uint64_t block = mix(base + at) % n_blocks_;
      memcpy(out + at, bytes_.data() + block * block_bytes_, block_bytes_);
    }
  }

 private:
  uint64_t n_blocks_;
  size_t block_bytes_;
  std::vector<uint8_t> bytes_;
};

// The tensors of one synthetic model and how each is drawn.
class Synth {
 public:
  Synth(const SynthOptions& options, const DecoderSpec& spec)
      : o_(options), s_(options.shape), spec_(spec) {}

  Status build(const GgufFile* vocab);
  Status write(const std::string& out) const;

 private:
  void metadata(const GgufFile* vocab);
  void layer(int index);
  void vector(const std::string& name, int64_t n, Init init) {
    writer_.add_tensor(name, GGML_TYPE_F32, n);
    inits_.push_back(init);
  }
  void matrix(const std::string& name, int64_t n_in, int64_t n_out, float sigma) {
    writer_.add_tensor(name, o_.type, n_in, n_out);
    inits_.push_back(standard_deviation(sigma));
  }
  void norm(const std::string& name, int64_t n) {
    constexpr float kSpread = 0.1F;
    vector(name + ".weight", n, {1.0F, kSpread});
    if (spec_.norm == Norm::kLayer) vector(name + ".bias", n, {0.0F, kSpread});
  }
  void linear(const std::string& name, int64_t n_in, int64_t n_out, float gain, bool bias) {
    matrix(name + ".weight", n_in, n_out, gain / std::sqrt(static_cast<float>(n_in)));
    constexpr float kBias = 0.1F;
    if (bias) vector(name + ".bias", n_out, {0.0F, kBias});
  }

  const SynthOptions& o_;
  ModelShape s_;
  const DecoderSpec& spec_;
  GgufWriter writer_;
  std::vector<Init> inits_;
  std::map<float, BlockPool> pools_;  // by Init::width: pooled tensors are matrices of mean zero
};

void Synth::metadata(const GgufFile* vocab) {
  const std::string& a = s_.arch;
  const auto u32 = [&](const char* key, int value) {
    writer_.set_u32(fmt::format("{}.{}", a, key), static_cast<uint32_t>(value));
  };
  writer_.set_string("general.architecture", a);
  writer_.set_string("general.name", fmt::format("{} (random weights)", s_.name));
  u32("context_length", s_.n_ctx);
  u32("embedding_length", s_.n_embd);
  u32("block_count", s_.n_layer);
  u32("feed_forward_length", s_.n_ff);
  u32("attention.head_count", s_.n_head);
  u32("attention.head_count_kv", s_.n_head_kv);
  u32("attention.key_length", s_.head_dim);
  u32("attention.value_length", s_.head_dim);
  u32("vocab_size", s_.n_vocab);
  writer_.set_f32(fmt::format("{}.{}", a,
                              spec_.norm == Norm::kRms ? "attention.layer_norm_rms_epsilon"
                                                       : "attention.layer_norm_epsilon"),
                  s_.norm_eps);
  if (spec_.rope_mode >= 0) {
    u32("rope.dimension_count", s_.head_dim);
    writer_.set_f32(fmt::format("{}.rope.freq_base", a), s_.rope_freq_base);
  }
  if (spec_.learned_positions) u32("position_offset", 2);
  for (const auto& [key, value] : o_.extra_numbers) writer_.set_f32(key, value);
  for (const auto& [key, value] : o_.extra_strings) writer_.set_string(key, value);
  if (vocab == nullptr) {
    writer_.set_string("tokenizer.ggml.model", "no_vocab");
    return;
  }
  for (const auto& [key, value] : vocab->values()) {
    if (key.starts_with("tokenizer.")) writer_.copy(key, value);
  }
}

void Synth::layer(int index) {
  const std::string p = fmt::format("blk.{}.", index);
  const int64_t n_embd = s_.n_embd;
  const int64_t n_q = int64_t{s_.n_head} * s_.head_dim;
  const int64_t n_kv = int64_t{s_.n_head_kv} * s_.head_dim;
  const bool ffn_bias = spec_.learned_positions;
  // What is added to the residual stream is kept small enough for any depth.
  const float residual_gain = 1.0F / std::sqrt(2.0F * static_cast<float>(s_.n_layer));
  norm(p + "attn_norm", n_embd);
  if (!spec_.parallel_attention) norm(p + "ffn_norm", n_embd);
  if (s_.two_norms) norm(p + "attn_norm_2", n_embd);
  if (spec_.fused_qkv) {
    linear(p + "attn_qkv", n_embd, n_q + 2 * n_kv, 1.0F, s_.qkv_bias);
  } else {
    linear(p + "attn_q", n_embd, n_q, 1.0F, s_.qkv_bias);
    linear(p + "attn_k", n_embd, n_kv, 1.0F, s_.qkv_bias);
    linear(p + "attn_v", n_embd, n_kv, 1.0F, s_.qkv_bias);
  }
  if (spec_.qk_norm) {
    norm(p + "attn_q_norm", s_.head_dim);
    norm(p + "attn_k_norm", s_.head_dim);
  }
  linear(p + "attn_output", n_q, n_embd, residual_gain, ffn_bias);
  if (spec_.gated_ffn) linear(p + "ffn_gate", n_embd, s_.n_ff, 1.0F, false);
  linear(p + "ffn_up", n_embd, s_.n_ff, 1.0F, ffn_bias);
  linear(p + "ffn_down", s_.n_ff, n_embd, residual_gain, ffn_bias);
}

Status Synth::build(const GgufFile* vocab) {
  if (o_.n_layer < 0) return invalid_argument(fmt::format("layers: {} is negative", o_.n_layer));
  if (o_.n_layer > 0) s_.n_layer = o_.n_layer;
  if (vocab != nullptr) {
    const GgufValue* tokens = vocab->find("tokenizer.ggml.tokens");
    if (tokens == nullptr) {
      return not_found(fmt::format("{}: no vocabulary in it", vocab->path()));
    }
    s_.n_vocab = static_cast<int>(tokens->count);
  }
  metadata(vocab);
  // Logits with a standard deviation of about two: peaked enough for greedy tokens to be stable.
  const float output_sigma = 2.0F / std::sqrt(static_cast<float>(s_.n_embd));
  matrix("token_embd.weight", s_.n_embd, s_.n_vocab, s_.tied_output ? output_sigma : 1.0F);
  if (spec_.learned_positions) {
    constexpr int kOffset = 2;
    matrix("position_embd.weight", s_.n_embd, s_.n_ctx + kOffset, output_sigma);
  }
  norm("output_norm", s_.n_embd);
  if (!s_.tied_output) matrix("output.weight", s_.n_embd, s_.n_vocab, output_sigma);
  if (o_.rope_factors) {
    constexpr Init kFactors = {4.0F, 3.0F};
    vector("rope_freqs.weight", s_.head_dim / 2, kFactors);
  }
  for (int i = 0; i < s_.n_layer; i++) layer(i);
  for (size_t i = 0; i < writer_.tensors().size(); i++) {
    const GgufTensor& t = writer_.tensors()[i];
    if (!row_fits(t.type, t.ne[0])) {
      return invalid_argument(fmt::format(
          "{} of shape {} has rows of {}, no multiple of {}'s block of {}; take another type",
          t.name, s_.name, t.ne[0], ggml_type_name(t.type), ggml_blck_size(t.type)));
    }
    if (is_pooled(t)) pools_.try_emplace(inits_[i].width, t.type, inits_[i], o_.seed);
  }
  return {};
}

Status Synth::write(const std::string& out) const {
  const auto fill = [this](size_t index, int64_t first_row, int64_t n_rows, uint8_t* data) {
    const GgufTensor& t = writer_.tensors()[index];
    const uint64_t stream = XXH3_64bits_withSeed(t.name.data(), t.name.size(), o_.seed);
    if (is_pooled(t)) {
      const BlockPool& pool = pools_.at(inits_[index].width);
      for (int64_t r = 0; r < n_rows; r++, data += t.row_bytes()) {
        pool.compose(stream, first_row + r, t.row_bytes(), data);
      }
      return Status();
    }
    std::vector<float> row(static_cast<size_t>(t.ne[0]));
    for (int64_t r = 0; r < n_rows; r++) {
      fill_uniform(stream, first_row + r, t.ne[0], inits_[index], row.data());
      quantise_rows(t.type, row.data(), 1, t.ne[0], data + static_cast<size_t>(r) * t.row_bytes());
    }
    return Status();
  };
  return writer_.write(out, fill, o_.n_threads, o_.progress);
}

}  // namespace

Status synthesise_model(const SynthOptions& options, const std::string& out) {
  const DecoderSpec* spec = find_decoder_spec(options.shape.arch);
  if (spec == nullptr) {
    return unimplemented(fmt::format("architecture {} is not supported", options.shape.arch));
  }
  if (find_weight_type(options.type) == nullptr) {
    return invalid_argument(fmt::format("{} is no weight type", ggml_type_name(options.type)));
  }
  std::unique_ptr<GgufFile> vocab;
  if (!options.vocab_from.empty()) {
    HCACHE_ASSIGN_OR_RETURN(vocab, GgufFile::open(options.vocab_from));
  }
  Synth synth(options, *spec);
  HCACHE_RETURN_IF_ERROR(synth.build(vocab.get()));
  return synth.write(out);
}

}  // namespace hcache::model
