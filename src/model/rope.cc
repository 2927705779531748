#include "rope.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace hcache::model {
namespace {

using Scaling = RopeOverride::Scaling;

Result<Scaling> file_scaling(const GgufFile& file, const std::string& arch) {
  HCACHE_ASSIGN_OR_RETURN(const auto name, file.string(arch + ".rope.scaling.type"));
  if (name == "none") return Scaling::kNone;
  return name == "yarn" ? Scaling::kYarn : Scaling::kLinear;
}

Result<float> number_or(const GgufFile& file, const std::string& key, float otherwise) {
  HCACHE_ASSIGN_OR_RETURN(const auto number, file.number(key));
  return static_cast<float>(number.value_or(otherwise));
}

Status check(const DecoderSpec& spec, const HParams& h) {
  if (spec.rope_mode < 0) {
    return invalid_argument(fmt::format("{} models have no rotary positions to change", spec.arch));
  }
  const char* why = nullptr;
  if (h.long_rope) why = "its file has LongRoPE's factors";
  if (h.n_window > 0 && spec.window_rope == WindowRope::kSame) {
    why = "its layers with windows would keep the file's";
  }
  if (spec.temperature) why = "its Q grows with the positions that it was trained for";
  if (why != nullptr) {
    return unimplemented(
        fmt::format("rotary positions of this {} model can't be changed on our engine: {}; try "
                    "--engine llama",
                    spec.arch, why));
  }
  return {};
}

}  // namespace

bool RopeOverride::any() const { return *this != RopeOverride(); }

int64_t extended_context(const RopeOverride& rope, int64_t n_ctx, int n_rot, float file_base,
                         float file_scale) {
  double factor = 1;
  if (rope.freq_scale > 0 && rope.scaling != Scaling::kNone) factor = file_scale / rope.freq_scale;
  if (rope.freq_base > file_base && n_rot > 2) {
    factor *= std::pow(static_cast<double>(rope.freq_base) / file_base,
                       static_cast<double>(n_rot - 2) / n_rot);
  }
  const double most = std::numeric_limits<int32_t>::max();
  // What is closer together than it was can be longer, what is further apart is as long.
  return static_cast<int64_t>(std::min(most, std::max(1.0, factor) * static_cast<double>(n_ctx)));
}

float yarn_magnitude(float freq_scale, float log_factor) {
  const float scale = 1.0F / freq_scale;
  const auto magnitude = [scale](float by) {
    return scale <= 1.0F ? 1.0F : (0.1F * by * logf(scale) + 1.0F);
  };
  float out = magnitude(1.0F);
  if (log_factor != 0) out /= magnitude(log_factor);
  // ggml_rope_ext applies this factor itself.
  return out * (1.0F / (1.0F + 0.1F * logf(scale)));
}

Status override_rope(const GgufFile& file, const DecoderSpec& spec, const RopeOverride& rope,
                     HParams& h) {
  if (!rope.any()) return {};
  HCACHE_RETURN_IF_ERROR(check(spec, h));
  Scaling scaling = rope.scaling;
  if (scaling == Scaling::kFile) {
    HCACHE_ASSIGN_OR_RETURN(scaling, file_scaling(file, h.arch));
  }
  const float file_scale = h.rope_freq_scale;
  const int64_t context =
      extended_context(rope, h.n_ctx_train, h.n_rot, h.rope_freq_base, file_scale);
  if (rope.freq_base > 0) {
    h.rope_freq_base = rope.freq_base;
    if (spec.window_rope == WindowRope::kUnscaled) h.window_freq_base = rope.freq_base;
  }
  if (rope.freq_scale > 0) h.rope_freq_scale = rope.freq_scale;
  if (scaling == Scaling::kNone) h.rope_freq_scale = 1;
  if (rope.orig_ctx > 0) h.rope_n_ctx_orig = rope.orig_ctx;
  if (rope.beta_fast >= 0) h.rope_beta_fast = rope.beta_fast;
  if (rope.beta_slow >= 0) h.rope_beta_slow = rope.beta_slow;
  h.rope_ext_factor =
      rope.ext_factor >= 0 ? rope.ext_factor : (scaling == Scaling::kYarn ? 1.0F : 0.0F);
  h.rope_attn_factor = rope.attn_factor >= 0 ? rope.attn_factor : 1.0F;
  if (h.rope_ext_factor != 0) h.rope_attn_factor = yarn_magnitude(h.rope_freq_scale, 0);
  HCACHE_ASSIGN_OR_RETURN(const float attn_factor,
                          number_or(file, h.arch + ".rope.scaling.attn_factor", 1.0F));
  h.rope_attn_factor *= attn_factor;
  if (!std::isfinite(h.rope_attn_factor)) {
    return invalid_argument("a RoPE scale this small leaves no magnitude to rotate by");
  }
  const bool custom_yarn = scaling == Scaling::kYarn && h.rope_freq_scale != file_scale;
  h.n_ctx_train = static_cast<int>(
      custom_yarn ? static_cast<int64_t>(static_cast<float>(h.rope_n_ctx_orig) / h.rope_freq_scale)
                  : context);
  return {};
}

}  // namespace hcache::model
