#include "hparams.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <limits>

#include "base/log.h"
#include "rope.h"

namespace hcache::model {
namespace {

constexpr int64_t kMaxDimension = 1 << 24;

// Typed reads of "<arch>.<key>".
class Keys {
 public:
  Keys(const GgufFile& file, std::string arch) : file_(file), arch_(std::move(arch)) {}

  [[nodiscard]] std::string full(std::string_view key) const {
    return fmt::format("{}.{}", arch_, key);
  }

  [[nodiscard]] Status bad(std::string_view key, std::string_view why) const {
    return data_loss(fmt::format("{}: key {} {}", file_.path(), full(key), why));
  }

  // An integer in [min, max]; `fallback` when absent, or kNotFound without one.
  [[nodiscard]] Result<int64_t> integer(std::string_view key, int64_t min, int64_t max,
                                        std::optional<int64_t> fallback = {}) const {
    HCACHE_ASSIGN_OR_RETURN(const auto value, file_.integer(full(key)));
    return in_range(key, value, min, max, fallback);
  }
  // The same for keys that may be an array with one item per layer.
  [[nodiscard]] Result<int64_t> per_layer(std::string_view key, int64_t n_layer, int64_t min,
                                          int64_t max, std::optional<int64_t> fallback = {}) const {
    HCACHE_ASSIGN_OR_RETURN(const auto value,
                            file_.uniform_integer(full(key), static_cast<uint64_t>(n_layer)));
    return in_range(key, value, min, max, fallback);
  }
  [[nodiscard]] Result<float> number(std::string_view key,
                                     std::optional<float> fallback = {}) const {
    HCACHE_ASSIGN_OR_RETURN(const auto value, file_.number(full(key)));
    if (!value.has_value()) {
      if (!fallback.has_value()) return missing(key);
      return *fallback;
    }
    const auto narrow = static_cast<float>(*value);
    if (!std::isfinite(narrow)) return bad(key, "is not finite");
    return narrow;
  }

 private:
  [[nodiscard]] Status missing(std::string_view key) const {
    return not_found(fmt::format("{}: key {} is missing", file_.path(), full(key)));
  }
  [[nodiscard]] Result<int64_t> in_range(std::string_view key, std::optional<int64_t> value,
                                         int64_t min, int64_t max,
                                         std::optional<int64_t> fallback) const {
    if (!value.has_value() && !fallback.has_value()) return missing(key);
    const int64_t v = value.has_value() ? *value : *fallback;
    if (v < min || v > max) return bad(key, fmt::format("is {}, outside [{}, {}]", v, min, max));
    return v;
  }

  const GgufFile& file_;
  std::string arch_;
};

// Features of other models that would silently change the result if they were ignored.
Status refuse_unsupported(const GgufFile& file, const Keys& keys) {
  const auto refuse = [&](std::string_view key, std::string_view feature) {
    return unimplemented(
        fmt::format("{}: key {}: {} is not supported", file.path(), keys.full(key), feature));
  };
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  HCACHE_ASSIGN_OR_RETURN(const auto causal, file.boolean(keys.full("attention.causal")));
  if (!causal.value_or(true)) return refuse("attention.causal", "attention without a causal mask");
  HCACHE_ASSIGN_OR_RETURN(const auto pre_norm, file.boolean(keys.full("do_layer_norm_before")));
  if (!pre_norm.value_or(true)) {
    return refuse("do_layer_norm_before", "normalisation after the blocks (OPT-350m)");
  }
  HCACHE_ASSIGN_OR_RETURN(const int64_t more_layers,
                          keys.integer("nextn_predict_layers", 0, kMax, 0));
  if (more_layers > 0) {
    return refuse("nextn_predict_layers", "a file with layers that predict further tokens");
  }
  return {};
}

// What no model of this kind computes with, whatever its file says: llama.cpp, for which these
// files are made, does not read it either.
Status tell_ignored(const GgufFile& file, const Keys& keys, const DecoderSpec& spec) {
  struct Neutral {
    const char* key;
    float value;
    bool read = false;
  };
  const std::array neutral = {
      Neutral{"attention.max_alibi_bias", 0},
      Neutral{"attention.clamp_kqv", 0},
      Neutral{"attn_logit_softcapping", 0, spec.soft_caps},
      Neutral{"final_logit_softcapping", 0, spec.logit_soft_cap},
      Neutral{"logit_scale", 1, spec.scales},
      Neutral{"residual_scale", 1, spec.scales},
      Neutral{"embedding_scale", 1, spec.scales},
      Neutral{"rope.scaling.alpha", 0},
      Neutral{"attention.sliding_window", 0, spec.window_period > 0},
  };
  for (const Neutral& n : neutral) {
    HCACHE_ASSIGN_OR_RETURN(const float value, keys.number(n.key, n.value));
    if (n.read || value == n.value || value == 0) continue;
    log::warn("{}: key {} is ignored: {} models know nothing of it", file.path(), keys.full(n.key),
              spec.arch);
  }
  return {};
}

// The same arithmetic, in F32, as libllama's load_hparams and context set-up, so that the angles
// agree bit for bit.
Status read_rope(const GgufFile& file, const Keys& keys, const DecoderSpec& spec, HParams& h) {
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_rot,
                          keys.integer("rope.dimension_count", 0, kMaxDimension, h.head_dim));
  if (n_rot < 2 || n_rot % 2 != 0 || n_rot > h.head_dim) {
    return keys.bad(
        "rope.dimension_count",
        fmt::format("is {}, not an even number up to the head size {}", n_rot, h.head_dim));
  }
  h.n_rot = static_cast<int>(n_rot);
  HCACHE_ASSIGN_OR_RETURN(h.rope_freq_base, keys.number("rope.freq_base", 10000.0F));
  if (h.rope_freq_base <= 0) return keys.bad("rope.freq_base", "is not positive");
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_ctx_orig,
                          keys.integer("rope.scaling.original_context_length", 1,
                                       std::numeric_limits<int32_t>::max(), h.n_ctx_train));
  h.rope_n_ctx_orig = static_cast<int>(n_ctx_orig);

  HCACHE_ASSIGN_OR_RETURN(const auto type, file.string(keys.full("rope.scaling.type")));
  const std::string scaling = type.value_or("linear");
  h.long_rope = scaling == "longrope";
  if (scaling != "none" && scaling != "linear" && scaling != "yarn" && !h.long_rope) {
    return unimplemented(fmt::format("{}: key {}: RoPE scaling \"{}\" is not supported",
                                     file.path(), keys.full("rope.scaling.type"),
                                     scaling.substr(0, 32)));
  }
  HCACHE_ASSIGN_OR_RETURN(const float old_factor, keys.number("rope.scale_linear", 0.0F));
  HCACHE_ASSIGN_OR_RETURN(const float factor, keys.number("rope.scaling.factor", old_factor));
  if (factor < 0) return keys.bad("rope.scaling.factor", "is negative");
  h.rope_freq_scale = factor == 0.0F || scaling == "none" ? 1.0F : 1.0F / factor;
  if (!std::isfinite(h.rope_freq_scale)) return keys.bad("rope.scaling.factor", "is too small");

  h.rope_attn_factor = 1.0F;
  if (scaling == "yarn") {
    h.rope_ext_factor = 1.0F;
    float log_factor = 0;
    if (spec.temperature) {
      HCACHE_ASSIGN_OR_RETURN(log_factor, keys.number("rope.scaling.yarn_log_multiplier", 0.0F));
      HCACHE_ASSIGN_OR_RETURN(h.rope_beta_fast,
                              keys.number("rope.scaling.yarn_beta_fast", h.rope_beta_fast));
      HCACHE_ASSIGN_OR_RETURN(h.rope_beta_slow,
                              keys.number("rope.scaling.yarn_beta_slow", h.rope_beta_slow));
    }
    h.rope_attn_factor = yarn_magnitude(h.rope_freq_scale, log_factor);
  }
  HCACHE_ASSIGN_OR_RETURN(const float attn_factor, keys.number("rope.scaling.attn_factor", 1.0F));
  h.rope_attn_factor *= attn_factor;
  if (!std::isfinite(h.rope_attn_factor)) return keys.bad("rope.scaling.factor", "is too small");
  if (!spec.temperature) return {};
  HCACHE_ASSIGN_OR_RETURN(h.attention_temperature,
                          keys.number("attention.temperature_scale", 0.0F));
  return {};
}

// Which layers have a window: a period, or a flag for each layer.
Status read_window_layers(const GgufFile& file, const Keys& keys, const DecoderSpec& spec,
                          HParams& h) {
  constexpr const char* kKey = "attention.sliding_window_pattern";
  const auto n_layer = static_cast<size_t>(h.n_layer);
  const GgufValue* value = file.find(keys.full(kKey));
  if (value != nullptr && value->type == GGUF_TYPE_ARRAY) {
    if (value->item_type != GGUF_TYPE_BOOL || value->count != n_layer) {
      return keys.bad(kKey, fmt::format("is no flag for each of {} layers", n_layer));
    }
    for (size_t i = 0; i < n_layer; ++i) h.windowed.push_back(value->bytes[i] != 0 ? 1 : 0);
    return {};
  }
  HCACHE_ASSIGN_OR_RETURN(const int64_t period,
                          keys.integer(kKey, 0, kMaxDimension, spec.window_period));
  for (int i = 0; i < h.n_layer; ++i) {
    h.windowed.push_back(period == 0 || i % period < period - 1 ? 1 : 0);
  }
  return {};
}

Status read_windows(const GgufFile& file, const Keys& keys, const DecoderSpec& spec, HParams& h) {
  if (spec.soft_caps) {
    constexpr float kGemmas = 50.0F;
    HCACHE_ASSIGN_OR_RETURN(h.attention_soft_cap, keys.number("attn_logit_softcapping", kGemmas));
  }
  if (spec.logit_soft_cap) {
    const float otherwise = spec.soft_caps ? 30.0F : 0.0F;
    HCACHE_ASSIGN_OR_RETURN(h.logit_soft_cap, keys.number("final_logit_softcapping", otherwise));
  }
  if (h.attention_soft_cap < 0 || h.logit_soft_cap < 0) {
    return keys.bad("attn_logit_softcapping", "or final_logit_softcapping is negative");
  }
  if (spec.window_period == 0 || h.n_layer < spec.least_window_layers) return {};
  HCACHE_ASSIGN_OR_RETURN(
      const int64_t window,
      keys.integer("attention.sliding_window", 0, std::numeric_limits<int32_t>::max(), 0));
  if (window == 0) return {};
  h.n_window = static_cast<int>(window);
  HCACHE_RETURN_IF_ERROR(read_window_layers(file, keys, spec, h));
  const float base = spec.window_rope == WindowRope::kOwnBase ? 10000.0F : h.rope_freq_base;
  HCACHE_ASSIGN_OR_RETURN(h.window_freq_base, keys.number("rope.freq_base_swa", base));
  if (h.window_freq_base <= 0) return keys.bad("rope.freq_base_swa", "is not positive");
  return {};
}

Status read_experts(const Keys& keys, const DecoderSpec& spec, HParams& h) {
  constexpr int64_t kMaxExperts = 4096;
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_expert, keys.integer("expert_count", 0, kMaxExperts, 0));
  if (n_expert == 0) return {};
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_used, keys.integer("expert_used_count", 1, n_expert));
  HCACHE_ASSIGN_OR_RETURN(
      const int64_t n_dense,
      keys.integer("leading_dense_block_count", 0, std::numeric_limits<int32_t>::max(), 0));
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_ff, keys.per_layer("expert_feed_forward_length",
                                                             h.n_layer, 0, kMaxDimension, 0));
  HCACHE_ASSIGN_OR_RETURN(const float scale, keys.number("expert_weights_scale", 0.0F));
  h.n_expert = static_cast<int>(n_expert);
  h.n_expert_used = static_cast<int>(n_used);
  h.n_dense_layers = static_cast<int>(n_dense);
  h.n_ff_expert = n_ff > 0 ? static_cast<int>(n_ff) : h.n_ff;
  if (scale != 0) h.expert_scale = scale;
  if (spec.shared_experts == SharedExperts::kNone) return {};
  if (spec.shared_experts == SharedExperts::kByCount) {
    HCACHE_ASSIGN_OR_RETURN(const int64_t n_shared,
                            keys.integer("expert_shared_count", 1, kMaxExperts));
    if (n_shared * h.n_ff_expert > kMaxDimension) {
      return keys.bad("expert_shared_count", fmt::format("is {}, too large", n_shared));
    }
    h.n_ff_shared = static_cast<int>(n_shared) * h.n_ff_expert;
    return {};
  }
  const bool always = spec.shared_experts == SharedExperts::kWeighed;
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_ff_shared,
                          keys.integer("expert_shared_feed_forward_length", 0, kMaxDimension, 0));
  h.n_ff_shared = n_ff_shared > 0 || !always ? static_cast<int>(n_ff_shared) : h.n_ff;
  return {};
}

// 0 and absent keys scale nothing.
Status read_scales(const Keys& keys, const DecoderSpec& spec, HParams& h) {
  if (spec.embedding_by_width) h.embedding_scale = sqrtf(static_cast<float>(h.n_embd));
  if (!spec.scales) return {};
  const auto read = [&](const char* key, float& scale) -> Status {
    HCACHE_ASSIGN_OR_RETURN(const float value, keys.number(key, 0.0F));
    if (value != 0) scale = value;
    return {};
  };
  HCACHE_RETURN_IF_ERROR(read("embedding_scale", h.embedding_scale));
  HCACHE_RETURN_IF_ERROR(read("residual_scale", h.residual_scale));
  HCACHE_RETURN_IF_ERROR(read("logit_scale", h.logit_scale));
  if (spec.divides_logits) h.logit_scale = 1.0F / h.logit_scale;
  return {};
}

Result<bool> is_parallel(const GgufFile& file, const Keys& keys, const DecoderSpec& spec) {
  switch (spec.parallel) {
    case Parallel::kNever: return false;
    case Parallel::kAlways: return true;
    case Parallel::kByKey: {
      HCACHE_ASSIGN_OR_RETURN(const auto parallel,
                              file.boolean(keys.full("use_parallel_residual")));
      return parallel.value_or(true);
    }
    case Parallel::kWithoutFfnNorm:
      return file.tensor(fmt::format("blk.0.{}.weight", spec.ffn_norm)) == nullptr;
  }
  return false;
}

}  // namespace

Result<HParams> read_hparams(const GgufFile& file, const DecoderSpec& spec) {
  const Keys keys(file, spec.arch);
  HParams h;
  h.arch = spec.arch;
  HCACHE_ASSIGN_OR_RETURN(const auto name, file.string("general.name"));
  h.name = name.value_or("");

  constexpr int64_t kMaxInt = std::numeric_limits<int32_t>::max();
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_ctx, keys.integer("context_length", 1, kMaxInt));
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_embd, keys.integer("embedding_length", 1, kMaxDimension));
  // Each layer has several tensors, so the file itself bounds the count.
  const auto n_tensors = static_cast<int64_t>(file.tensors().size());
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_layer, keys.integer("block_count", 1, n_tensors));
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_ff,
                          keys.per_layer("feed_forward_length", n_layer, 1, kMaxDimension));
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_head,
                          keys.per_layer("attention.head_count", n_layer, 1, n_embd));
  HCACHE_ASSIGN_OR_RETURN(const int64_t n_head_kv,
                          keys.per_layer("attention.head_count_kv", n_layer, 1, n_head, n_head));
  if (n_head % n_head_kv != 0) {
    return keys.bad("attention.head_count_kv",
                    fmt::format("is {}, which does not divide {} heads", n_head_kv, n_head));
  }
  if (file.find(keys.full("attention.key_length")) == nullptr && n_embd % n_head != 0) {
    return keys.bad("attention.head_count",
                    fmt::format("is {}, which does not divide the width {}", n_head, n_embd));
  }
  HCACHE_ASSIGN_OR_RETURN(const int64_t head_dim,
                          keys.integer("attention.key_length", 1, n_embd, n_embd / n_head));
  HCACHE_ASSIGN_OR_RETURN(const int64_t value_dim,
                          keys.integer("attention.value_length", 1, n_embd, n_embd / n_head));
  if (value_dim != head_dim) {
    return unimplemented(fmt::format("{}: heads of K ({}) and V ({}) differ in size; not supported",
                                     file.path(), head_dim, value_dim));
  }
  if (head_dim * n_head > kMaxDimension) {
    return keys.bad("attention.key_length",
                    fmt::format("is {}, too large for {} heads", head_dim, n_head));
  }
  h.n_ctx_train = static_cast<int>(n_ctx);
  h.n_embd = static_cast<int>(n_embd);
  h.n_layer = static_cast<int>(n_layer);
  h.n_ff = static_cast<int>(n_ff);
  h.n_head = static_cast<int>(n_head);
  h.n_head_kv = static_cast<int>(n_head_kv);
  h.head_dim = static_cast<int>(head_dim);

  HCACHE_RETURN_IF_ERROR(refuse_unsupported(file, keys));
  HCACHE_RETURN_IF_ERROR(tell_ignored(file, keys, spec));
  HCACHE_RETURN_IF_ERROR(read_scales(keys, spec, h));
  HCACHE_RETURN_IF_ERROR(read_experts(keys, spec, h));
  HCACHE_ASSIGN_OR_RETURN(h.parallel, is_parallel(file, keys, spec));

  const char* eps_key =
      spec.norm == Norm::kRms ? "attention.layer_norm_rms_epsilon" : "attention.layer_norm_epsilon";
  HCACHE_ASSIGN_OR_RETURN(h.norm_eps, keys.number(eps_key));
  if (h.norm_eps < 0) return keys.bad(eps_key, "is negative");
  HCACHE_ASSIGN_OR_RETURN(const float scale, keys.number("attention.scale", 0.0F));
  h.attention_scale = scale == 0.0F ? 1.0F / sqrtf(static_cast<float>(head_dim)) : scale;
  if (spec.width_scaled_layers > 0 && n_layer == spec.width_scaled_layers) {
    const int64_t width = n_embd / n_head;
    h.attention_scale = 1.0F / sqrtf(static_cast<float>(width));
  }

  if (spec.rope_mode >= 0) {
    HCACHE_RETURN_IF_ERROR(read_rope(file, keys, spec, h));
  }
  HCACHE_RETURN_IF_ERROR(read_windows(file, keys, spec, h));
  if (spec.learned_positions) {
    HCACHE_ASSIGN_OR_RETURN(const int64_t offset,
                            keys.integer("position_offset", 0, kMaxDimension, 0));
    h.position_offset = static_cast<int>(offset);
  }
  return h;
}

Result<const DecoderSpec*> read_architecture(const GgufFile& file) {
  HCACHE_ASSIGN_OR_RETURN(const auto arch, file.string("general.architecture"));
  if (!arch.has_value()) {
    return not_found(fmt::format("{}: key general.architecture is missing", file.path()));
  }
  const DecoderSpec* spec = find_decoder_spec(*arch);
  if (spec != nullptr) return spec;
  std::string known;
  for (const DecoderSpec& s : decoder_specs())
    known += (known.empty() ? "" : ", ") + std::string(s.arch);
  return unimplemented(fmt::format(
      "{}: our engine has no architecture \"{}\" (it has: {}); serve, run, chat and batch "
      "compute such models on libllama",
      file.path(), printable(*arch), known));
}

}  // namespace hcache::model
