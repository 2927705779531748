#include "model/graph.h"

#include <cmath>

#include "experts.h"
#include "low_rank.h"
#include "products.h"

namespace hcache::model {
namespace {

// Where graphs of the CPU's backend alone read it. (ggml leaves the device of the CPU's own buffer
// types out; host memory that another backend pins names that one's.)
bool takes_own_product(const ggml_tensor& weight) {
  if (!has_own_product(weight.type)) return false;
  if (weight.buffer == nullptr || !ggml_backend_buffer_is_host(weight.buffer)) return false;
  ggml_backend_dev_t dev =
      ggml_backend_buft_get_device(ggml_backend_buffer_get_type(weight.buffer));
  return dev == nullptr || ggml_backend_dev_type(dev) == GGML_BACKEND_DEVICE_TYPE_CPU;
}

ggml_tensor* apply_norm(ggml_context* ctx, const Model& model, Norm kind, const NormWeights& norm,
                        ggml_tensor* x) {
  const float eps = model.hparams().norm_eps;
  ggml_tensor* y = kind == Norm::kRms ? ggml_rms_norm(ctx, x, eps) : ggml_norm(ctx, x, eps);
  if (norm.w != nullptr) y = ggml_mul(ctx, y, norm.w);
  if (norm.b != nullptr) y = ggml_add(ctx, y, norm.b);
  return y;
}

ggml_tensor* apply_linear(ggml_context* ctx, const Model& model, const Linear& linear,
                          ggml_tensor* x, AdapterScales adapters,
                          const Product& product = build_product) {
  ggml_tensor* y = product(ctx, linear.w, x);
  y = Adapted{ctx, model, adapters}.add(linear.w, x, y);
  if (linear.b != nullptr) y = ggml_add(ctx, y, linear.b);
  return y;
}

// Whether the layer rotates Q and K.
bool has_rope(const Model& model, int layer) {
  const DecoderSpec& spec = model.spec();
  const HParams& hp = model.hparams();
  if (spec.no_rope_step > 0 && (layer + 1) % spec.no_rope_step == 0) return false;
  const bool only_windows = spec.window_rope == WindowRope::kOnlyThere && hp.n_window > 0;
  return spec.rope_mode >= 0 && (!only_windows || hp.window_of(layer) > 0);
}

ggml_tensor* apply_rope(ggml_context* ctx, const Model& model, int layer, ggml_tensor* heads,
                        ggml_tensor* positions, float magnitude) {
  if (!has_rope(model, layer)) return heads;
  const HParams& hp = model.hparams();
  const WindowRope kind = hp.window_of(layer) > 0 ? model.spec().window_rope : WindowRope::kSame;
  float base = hp.rope_freq_base;
  float scale = hp.rope_freq_scale;
  float ext_factor = hp.rope_ext_factor;
  if (hp.window_of(layer) > 0 && kind != WindowRope::kOnlyThere) base = hp.window_freq_base;
  if (kind == WindowRope::kOwnBase || kind == WindowRope::kUnscaled) scale = 1;
  if (kind == WindowRope::kUnscaled) {
    ext_factor = 0;
    magnitude = 1;
  }
  return ggml_rope_ext(ctx, heads, positions, model.weights().layers[layer].rope_factors, hp.n_rot,
                       model.spec().rope_mode, hp.rope_n_ctx_orig, base, scale, ext_factor,
                       magnitude, hp.rope_beta_fast, hp.rope_beta_slow);
}

// Of each head, where the norm's weights are those of each.
ggml_tensor* norm_each_head(ggml_context* ctx, const Model& model, const NormWeights& norm,
                            ggml_tensor* heads) {
  if (norm.w == nullptr) return heads;
  const NormWeights by_head = {.w = ggml_reshape_2d(ctx, norm.w, heads->ne[0], heads->ne[1])};
  return apply_norm(ctx, model, model.spec().norm, by_head, heads);
}

// One of Q or K: projection, norm, RoPE.
ggml_tensor* build_rotated_heads(ggml_context* ctx, const Model& model, int layer,
                                 ggml_tensor* hidden, ggml_tensor* positions, const Linear& linear,
                                 const NormWeights& head_norm, int n_head, AdapterScales adapters,
                                 const Product& product = build_product) {
  const HeadNorm kind = model.spec().head_norm;
  ggml_tensor* heads = apply_linear(ctx, model, linear, hidden, adapters, product);
  if (kind == HeadNorm::kRow) heads = apply_norm(ctx, model, Norm::kRms, head_norm, heads);
  heads = ggml_reshape_3d(ctx, heads, model.hparams().head_dim, n_head, heads->ne[1]);
  if (kind == HeadNorm::kHead) heads = apply_norm(ctx, model, Norm::kRms, head_norm, heads);
  if (kind == HeadNorm::kEachHead) heads = norm_each_head(ctx, model, head_norm, heads);
  return apply_rope(ctx, model, layer, heads, positions, model.hparams().rope_attn_factor);
}

// What each position's Q is multiplied by, [1, 1, n].
ggml_tensor* temperatures(ggml_context* ctx, const HParams& hp, ggml_tensor* positions) {
  ggml_tensor* x = ggml_cast(ctx, positions, GGML_TYPE_F32);
  // Half a position more than it is: rounding then crosses no border.
  const float step = 1.0F / static_cast<float>(hp.rope_n_ctx_orig);
  x = ggml_floor(ctx, ggml_scale_bias(ctx, x, step, step / 2));
  x = ggml_log(ctx, ggml_scale_bias(ctx, x, 1.0F, 1.0F));
  x = ggml_scale_bias(ctx, x, hp.attention_temperature, 1.0F);
  return ggml_reshape_3d(ctx, x, 1, 1, x->ne[0]);
}

// What a parallel feed-forward block multiplies.
ggml_tensor* parallel_ffn_input(ggml_context* ctx, const Model& model, int layer, ggml_tensor* x,
                                ggml_tensor* hidden) {
  const LayerWeights& w = model.weights().layers[layer];
  const Norm norm = model.spec().norm;
  if (w.ffn_norm.w != nullptr) return apply_norm(ctx, model, norm, w.ffn_norm, x);
  return w.attn_norm_2.w != nullptr ? apply_norm(ctx, model, norm, w.attn_norm, x) : hidden;
}

// What a block gives, as it is added to the residual.
ggml_tensor* block_output(ggml_context* ctx, const Model& model, const NormWeights& post_norm,
                          ggml_tensor* y) {
  if (model.spec().post_norm) y = apply_norm(ctx, model, model.spec().norm, post_norm, y);
  const float scale = model.hparams().residual_scale;
  return scale == 1 ? y : ggml_scale(ctx, y, scale);
}

// From the block's normed input to its output, without the residual.
ggml_tensor* feed_forward(ggml_context* ctx, const Model& model, const LayerWeights& w,
                          ggml_tensor* in, AdapterScales adapters) {
  if (w.experts.router.w != nullptr) return build_experts(ctx, model, w.experts, in, adapters);
  const DecoderSpec& spec = model.spec();
  ggml_tensor* up = apply_linear(ctx, model, w.up, in, adapters);
  ggml_tensor* act = spec.gated_ffn ? apply_linear(ctx, model, w.gate, in, adapters) : up;
  switch (spec.activation) {
    case Activation::kSilu:
      act = spec.gated_ffn ? ggml_swiglu_split(ctx, act, up) : ggml_silu(ctx, act);
      break;
    case Activation::kGelu:
      act = spec.gated_ffn ? ggml_geglu_split(ctx, act, up) : ggml_gelu(ctx, act);
      break;
    case Activation::kRelu:
      act = spec.gated_ffn ? ggml_reglu_split(ctx, act, up) : ggml_relu(ctx, act);
      break;
    case Activation::kSquaredRelu: act = ggml_sqr(ctx, ggml_relu(ctx, act)); break;
    case Activation::kClampedSwiglu: break;  // experts' alone
  }
  return apply_linear(ctx, model, w.down, act, adapters);
}

}  // namespace

ggml_tensor* build_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x) {
  return takes_own_product(*weight) ? build_own_product(ctx, weight, x)
                                    : ggml_mul_mat(ctx, weight, x);
}

ggml_tensor* build_expert_product(ggml_context* ctx, ggml_tensor* weights, ggml_tensor* x,
                                  ggml_tensor* chosen) {
  return takes_own_product(*weights) ? build_own_expert_product(ctx, weights, x, chosen)
                                     : ggml_mul_mat_id(ctx, weights, x, chosen);
}

ggml_tensor* build_hidden(ggml_context* ctx, const Model& model, int layer, ggml_tensor* x) {
  if (!model.spec().pre_norm) return x;
  const LayerWeights& w = model.weights().layers[layer];
  const NormWeights& norm = w.attn_norm_2.w != nullptr ? w.attn_norm_2 : w.attn_norm;
  return apply_norm(ctx, model, model.spec().norm, norm, x);
}

ggml_tensor* build_q(ggml_context* ctx, const Model& model, int layer, ggml_tensor* hidden,
                     ggml_tensor* positions, AdapterScales adapters) {
  const LayerWeights& w = model.weights().layers[layer];
  const HParams& hp = model.hparams();
  ggml_tensor* q =
      build_rotated_heads(ctx, model, layer, hidden, positions, w.q, w.q_norm, hp.n_head, adapters);
  if (hp.attention_temperature == 0) return q;
  return ggml_mul(ctx, q, temperatures(ctx, hp, positions));
}

ggml_tensor* build_k(ggml_context* ctx, const Model& model, int layer, ggml_tensor* hidden,
                     ggml_tensor* positions, const Product& product, AdapterScales adapters) {
  const LayerWeights& w = model.weights().layers[layer];
  return build_rotated_heads(ctx, model, layer, hidden, positions, w.k, w.k_norm,
                             model.hparams().n_head_kv, adapters, product);
}

ggml_tensor* build_v(ggml_context* ctx, const Model& model, int layer, ggml_tensor* hidden,
                     const Product& product, AdapterScales adapters) {
  const HParams& hp = model.hparams();
  const Linear& linear = model.weights().layers[layer].v;
  ggml_tensor* v = apply_linear(ctx, model, linear, hidden, adapters, product);
  return ggml_reshape_3d(ctx, v, hp.head_dim, hp.n_head_kv, v->ne[1]);
}

ggml_tensor* build_k_shift(ggml_context* ctx, const Model& model, int layer, ggml_tensor* k,
                           ggml_tensor* deltas) {
  // K already carries YaRN's magnitude. ggml multiplies the factor by 1 + 0.1 ln(1/scale) whenever
  // the extrapolation mix is on, so its inverse makes this a pure rotation.
  const HParams& hp = model.hparams();
  const float magnitude = hp.rope_ext_factor == 0.0F
                              ? 1.0F
                              : 1.0F / (1.0F + 0.1F * std::log(1.0F / hp.rope_freq_scale));
  return apply_rope(ctx, model, layer, k, deltas, magnitude);
}

ggml_tensor* build_layer_output(ggml_context* ctx, const Model& model, int layer, ggml_tensor* x,
                                ggml_tensor* hidden, ggml_tensor* attn, AdapterScales adapters) {
  ggml_tensor* y = build_attention_output(ctx, model, layer, x, hidden, attn, adapters);
  return model.hparams().parallel ? y : build_feed_forward(ctx, model, layer, y, adapters);
}

ggml_tensor* build_attention_output(ggml_context* ctx, const Model& part, int layer, ggml_tensor* x,
                                    ggml_tensor* hidden, ggml_tensor* attn,
                                    AdapterScales adapters) {
  const LayerWeights& w = part.weights().layers[layer];
  ggml_tensor* y = apply_linear(ctx, part, w.o, attn, adapters);
  y = block_output(ctx, part, w.attn_post_norm, y);
  if (part.hparams().parallel) {
    ggml_tensor* ffn_in = parallel_ffn_input(ctx, part, layer, x, hidden);
    ggml_tensor* ffn = feed_forward(ctx, part, w, ffn_in, adapters);
    y = ggml_add(ctx, block_output(ctx, part, w.ffn_post_norm, ffn), y);
  }
  return part.share().index == 0 ? ggml_add(ctx, y, x) : y;
}

ggml_tensor* build_feed_forward(ggml_context* ctx, const Model& part, int layer, ggml_tensor* x,
                                AdapterScales adapters) {
  const LayerWeights& w = part.weights().layers[layer];
  const DecoderSpec& spec = part.spec();
  ggml_tensor* ffn_in = spec.pre_norm ? apply_norm(ctx, part, spec.norm, w.ffn_norm, x) : x;
  ggml_tensor* y =
      block_output(ctx, part, w.ffn_post_norm, feed_forward(ctx, part, w, ffn_in, adapters));
  return part.share().index == 0 ? ggml_add(ctx, y, x) : y;
}

ggml_tensor* build_output_norm(ggml_context* ctx, const Model& model, ggml_tensor* x) {
  return apply_norm(ctx, model, model.spec().norm, model.weights().output_norm, x);
}

ggml_tensor* build_logits(ggml_context* ctx, const Model& model, ggml_tensor* x,
                          AdapterScales adapters) {
  x = build_output_norm(ctx, model, x);
  ggml_tensor* logits = apply_linear(ctx, model, model.weights().output, x, adapters);
  const HParams& hp = model.hparams();
  if (hp.logit_soft_cap > 0) {
    logits = ggml_tanh(ctx, ggml_scale(ctx, logits, 1.0F / hp.logit_soft_cap));
    logits = ggml_scale(ctx, logits, hp.logit_soft_cap);
  }
  return hp.logit_scale == 1 ? logits : ggml_scale(ctx, logits, hp.logit_scale);
}

}  // namespace hcache::model
