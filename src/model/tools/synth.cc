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
#include "random_rows.h"
#include "weight_types.h"

namespace hcache::model {
namespace {

constexpr float kBias = 0.1F;

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
  // A matrix for each expert.
  void expert_matrices(const std::string& name, int64_t n_in, int64_t n_out, float gain) {
    writer_.add_tensor(name + ".weight", o_.type, n_in, n_out, s_.n_expert);
    inits_.push_back(standard_deviation(gain / std::sqrt(static_cast<float>(n_in))));
    if (!s_.expert_biases) return;
    writer_.add_tensor(name + ".bias", GGML_TYPE_F32, n_out, s_.n_expert);
    inits_.push_back({0.0F, kBias});
  }
  void ranking_metadata(const std::string& arch, bool with_vocabulary);
  void dense(const std::string& prefix, float residual_gain);
  void experts(const std::string& prefix, float residual_gain);
  void expert_metadata();
  void norm(const std::string& name, int64_t n) {
    constexpr float kSpread = 0.1F;
    vector(name + ".weight", n, {1.0F, kSpread});
    if (spec_.norm_biases) vector(name + ".bias", n, {0.0F, kSpread});
  }
  void head_norm(const std::string& name, int n_head) {
    constexpr Init kWeights = {1.0F, 0.1F};
    switch (spec_.head_norm) {
      case HeadNorm::kNone: return;
      case HeadNorm::kHead: return vector(name, s_.head_dim, kWeights);
      case HeadNorm::kRow: return vector(name, int64_t{n_head} * s_.head_dim, kWeights);
      case HeadNorm::kEachHead:
        if (!o_.head_norms) return;
        writer_.add_tensor(name, GGML_TYPE_F32, s_.head_dim, n_head);
        inits_.push_back(kWeights);
    }
  }
  void linear(const std::string& name, int64_t n_in, int64_t n_out, float gain, bool bias) {
    matrix(name + ".weight", n_in, n_out, gain / std::sqrt(static_cast<float>(n_in)));
    if (bias) vector(name + ".bias", n_out, {0.0F, kBias});
  }

  // Only our own convention has one.
  [[nodiscard]] int position_offset() const { return s_.arch == "opt" ? 2 : 0; }
  [[nodiscard]] bool has_ffn_norm() const {
    switch (spec_.parallel) {
      case Parallel::kAlways: return false;
      case Parallel::kWithoutFfnNorm: return s_.two_blocks;
      default: return true;
    }
  }

  const SynthOptions& o_;
  ModelShape s_;
  const DecoderSpec& spec_;
  GgufWriter writer_;
  std::vector<Init> inits_;
  std::map<float, BlockPool> pools_;  // by Init::width: pooled tensors are matrices of mean zero
};

void Synth::metadata(const GgufFile* vocab) {
  const std::string& a = o_.sectioned_arch.empty() ? s_.arch : o_.sectioned_arch;
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
    u32("rope.dimension_count", s_.n_rot > 0 ? s_.n_rot : s_.head_dim);
    writer_.set_f32(fmt::format("{}.rope.freq_base", a), s_.rope_freq_base);
  }
  if (!o_.sectioned_arch.empty()) {
    const int32_t part = s_.head_dim / 2 / 4;  // of the pairs that are rotated
    const std::array<int32_t, 4> sections = {2 * part, part, part, 0};
    writer_.copy(fmt::format("{}.rope.dimension_sections", a),
                 {GGUF_TYPE_ARRAY,
                  GGUF_TYPE_INT32,
                  sections.size(),
                  {reinterpret_cast<const uint8_t*>(sections.data()), sizeof sections}});
  }
  if (position_offset() > 0) u32("position_offset", position_offset());
  if (spec_.parallel == Parallel::kByKey) {
    writer_.set_bool(fmt::format("{}.use_parallel_residual", a), !s_.two_blocks);
  }
  if (spec_.scales) {
    constexpr float kEmbedding = 3.0F;
    constexpr float kResidual = 0.5F;
    constexpr float kLogits = 0.5F;
    writer_.set_f32(fmt::format("{}.logit_scale", a), spec_.divides_logits ? 1 / kLogits : kLogits);
    if (spec_.divides_logits) {
      writer_.set_f32(fmt::format("{}.embedding_scale", a), kEmbedding);
      writer_.set_f32(fmt::format("{}.residual_scale", a), kResidual);
    }
  }
  expert_metadata();
  if (s_.n_window > 0) u32("attention.sliding_window", s_.n_window);
  if (s_.window_period > 0) u32("attention.sliding_window_pattern", s_.window_period);
  for (const auto& [key, value] : o_.extra_numbers) writer_.set_f32(key, value);
  for (const auto& [key, value] : o_.extra_strings) writer_.set_string(key, value);
  for (const auto& [key, value] : o_.extra_integers) writer_.set_u32(key, value);
  if (o_.ranking_labels > 0) ranking_metadata(a, vocab != nullptr);
  if (vocab == nullptr) {
    writer_.set_string("tokenizer.ggml.model", "no_vocab");
    return;
  }
  for (const auto& [key, value] : vocab->values()) {
    if (key.starts_with("tokenizer.")) writer_.copy(key, value);
  }
}

void Synth::ranking_metadata(const std::string& arch, bool with_vocabulary) {
  constexpr uint32_t kRank = 4;  // llama.cpp's LLAMA_POOLING_TYPE_RANK
  writer_.set_u32(fmt::format("{}.pooling_type", arch), kRank);
  std::vector<uint8_t> labels;  // each a length of eight bytes and a letter
  for (int i = 0; i < o_.ranking_labels; i++) {
    labels.insert(labels.end(), {1, 0, 0, 0, 0, 0, 0, 0, static_cast<uint8_t>('a' + i)});
  }
  writer_.copy(
      fmt::format("{}.classifier.output_labels", arch),
      {GGUF_TYPE_ARRAY, GGUF_TYPE_STRING, static_cast<uint64_t>(o_.ranking_labels), labels});
  if (!with_vocabulary) return;
  writer_.set_string("tokenizer.chat_template.rerank",
                     "Does the document answer the query?\nQuery: {query}\nDocument: {document}\n");
}

void Synth::layer(int index) {
  const std::string p = fmt::format("blk.{}.", index);
  const int64_t n_embd = s_.n_embd;
  const int64_t n_q = int64_t{s_.n_head} * s_.head_dim;
  const int64_t n_kv = int64_t{s_.n_head_kv} * s_.head_dim;
  // What is added to the residual stream is kept small enough for any depth.
  const float residual_gain = 1.0F / std::sqrt(2.0F * static_cast<float>(s_.n_layer));
  if (spec_.pre_norm) {
    norm(p + "attn_norm", n_embd);
    if (has_ffn_norm()) norm(p + spec_.ffn_norm, n_embd);
    if (s_.two_norms) norm(p + "attn_norm_2", n_embd);
  }
  if (spec_.post_norm) {
    norm(p + "post_attention_norm", n_embd);
    norm(p + "post_ffw_norm", n_embd);
  }
  if (spec_.fused_qkv) {
    linear(p + "attn_qkv", n_embd, n_q + 2 * n_kv, 1.0F, s_.qkv_bias);
  } else {
    linear(p + "attn_q", n_embd, n_q, 1.0F, s_.qkv_bias);
    linear(p + "attn_k", n_embd, n_kv, 1.0F, s_.qkv_bias);
    linear(p + "attn_v", n_embd, n_kv, 1.0F, s_.qkv_bias);
  }
  head_norm(p + "attn_q_norm.weight", s_.n_head);
  head_norm(p + "attn_k_norm.weight", s_.n_head_kv);
  if (spec_.sinks) vector(p + "attn_sinks.weight", s_.n_head, {1.0F, 2.0F});
  linear(p + "attn_output", n_q, n_embd, residual_gain, s_.block_biases);
  const bool has_experts = s_.n_expert > 0 && index >= s_.n_dense_layers;
  has_experts ? experts(p, residual_gain) : dense(p, residual_gain);
}

void Synth::dense(const std::string& prefix, float residual_gain) {
  const int64_t n_embd = s_.n_embd;
  if (spec_.gated_ffn && !spec_.fused_gate_up) {
    linear(prefix + "ffn_gate", n_embd, s_.n_ff, 1.0F, false);
  }
  const int64_t n_up = spec_.fused_gate_up ? 2 * int64_t{s_.n_ff} : s_.n_ff;
  linear(prefix + "ffn_up", n_embd, n_up, 1.0F, s_.block_biases);
  linear(prefix + "ffn_down", s_.n_ff, n_embd, residual_gain, s_.block_biases);
}

void Synth::experts(const std::string& prefix, float residual_gain) {
  const int64_t n_embd = s_.n_embd;
  // Logits of the router with a standard deviation of two, as those of tokens.
  writer_.add_tensor(prefix + "ffn_gate_inp.weight", GGML_TYPE_F32, n_embd, s_.n_expert);
  inits_.push_back(standard_deviation(2.0F / std::sqrt(static_cast<float>(n_embd))));
  if (s_.expert_biases) vector(prefix + "ffn_gate_inp.bias", s_.n_expert, {0.0F, kBias});
  expert_matrices(prefix + "ffn_gate_exps", n_embd, s_.n_ff_expert, 1.0F);
  expert_matrices(prefix + "ffn_up_exps", n_embd, s_.n_ff_expert, 1.0F);
  expert_matrices(prefix + "ffn_down_exps", s_.n_ff_expert, n_embd, residual_gain);
  if (s_.n_ff_shared == 0) return;
  if (spec_.shared_experts == SharedExperts::kWeighed) {
    vector(prefix + "ffn_gate_inp_shexp.weight", n_embd,
           standard_deviation(1.0F / std::sqrt(static_cast<float>(n_embd))));
  }
  linear(prefix + "ffn_gate_shexp", n_embd, s_.n_ff_shared, 1.0F, false);
  linear(prefix + "ffn_up_shexp", n_embd, s_.n_ff_shared, 1.0F, false);
  linear(prefix + "ffn_down_shexp", s_.n_ff_shared, n_embd, residual_gain, false);
}

void Synth::expert_metadata() {
  if (s_.n_expert == 0) return;
  const auto u32 = [&](const char* key, int value) {
    writer_.set_u32(fmt::format("{}.{}", s_.arch, key), static_cast<uint32_t>(value));
  };
  u32("expert_count", s_.n_expert);
  u32("expert_used_count", s_.n_expert_used);
  if (s_.n_ff_expert != s_.n_ff) u32("expert_feed_forward_length", s_.n_ff_expert);
  if (s_.n_dense_layers > 0) u32("leading_dense_block_count", s_.n_dense_layers);
  if (spec_.shared_experts == SharedExperts::kByCount) {
    u32("expert_shared_count", s_.n_ff_shared / s_.n_ff_expert);
  } else if (s_.n_ff_shared > 0) {
    u32("expert_shared_feed_forward_length", s_.n_ff_shared);
  }
}

Status Synth::build(const GgufFile* vocab) {
  constexpr int kMostLabels = 26;
  if (o_.ranking_labels < 0 || o_.ranking_labels > kMostLabels) {
    return invalid_argument(
        fmt::format("labels: {} is not from 0 to {}", o_.ranking_labels, kMostLabels));
  }
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
    matrix("position_embd.weight", s_.n_embd, s_.n_ctx + position_offset(), output_sigma);
  }
  norm("output_norm", s_.n_embd);
  if (!s_.tied_output) matrix("output.weight", s_.n_embd, s_.n_vocab, output_sigma);
  if (s_.output_bias) vector("output.bias", s_.n_vocab, {0.0F, 1.0F});
  if (o_.ranking_labels > 0) {
    writer_.add_tensor("cls.output.weight", GGML_TYPE_F32, s_.n_embd, o_.ranking_labels);
    inits_.push_back(standard_deviation(output_sigma / 2));
  }
  constexpr Init kFactors = {4.0F, 3.0F};
  if (o_.rope_factors) vector("rope_freqs.weight", s_.head_dim / 2, kFactors);
  if (o_.long_rope) {
    vector("rope_factors_long.weight", s_.head_dim / 2, kFactors);
    vector("rope_factors_short.weight", s_.head_dim / 2, {1.5F, 0.5F});
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
