#include "experts.h"

#include <cmath>

#include "low_rank.h"
#include "model/graph.h"

namespace hcache::model {
namespace {

constexpr float kLeastSum = 6.103515625e-5F;  // of weights: F16's smallest normal number

// Zero for each of n rows: the number of the only matrix.
ggml_tensor* only_matrix(ggml_context* ctx, ggml_tensor* rows) {
  ggml_tensor* one = ggml_cont(ctx, ggml_view_2d(ctx, rows, 1, rows->ne[1], rows->nb[1], 0));
  return ggml_argsort(ctx, one, GGML_SORT_ORDER_DESC);
}

// Of each row and expert, [n_expert, n]. As a product of a mixture's kind, which goes row by row
// where others have one kernel for few rows and one for many: a choice between two experts that are
// as good must not depend on who else is computed.
ggml_tensor* router_logits(const Adapted& adapted, const Linear& router, ggml_tensor* in) {
  ggml_context* ctx = adapted.ctx;
  ggml_tensor* rows = ggml_reshape_3d(ctx, in, in->ne[0], 1, in->ne[1]);
  ggml_tensor* logits = ggml_mul_mat_id(ctx, router.w, rows, only_matrix(ctx, in));
  logits = ggml_reshape_2d(ctx, logits, logits->ne[0], in->ne[1]);
  logits = adapted.add(router.w, in, logits);
  return router.b != nullptr ? ggml_add(ctx, logits, router.b) : logits;
}

ggml_tensor* shared_experts(const Adapted& adapted, const ExpertWeights& e, ggml_tensor* in) {
  ggml_context* ctx = adapted.ctx;
  const auto product = [&](const Linear& linear, ggml_tensor* x) {
    return adapted.add(linear.w, x, build_product(ctx, linear.w, x));
  };
  ggml_tensor* up = product(e.shared_up, in);
  ggml_tensor* act = ggml_swiglu_split(ctx, product(e.shared_gate, in), up);
  ggml_tensor* out = product(e.shared_down, act);
  if (e.shared_weight == nullptr) return out;
  ggml_tensor* weight = ggml_sum_rows(ctx, ggml_mul(ctx, in, e.shared_weight));
  return ggml_mul(ctx, out, ggml_sigmoid(ctx, weight));
}

// Of the experts that were chosen for each row, [n_out, n_used, n].
ggml_tensor* chosen_products(const Adapted& adapted, const Linear& experts, ggml_tensor* in,
                             ggml_tensor* chosen) {
  ggml_context* ctx = adapted.ctx;
  ggml_tensor* out = build_expert_product(ctx, experts.w, in, chosen);
  out = adapted.add_chosen(experts.w, in, chosen, out);
  if (experts.b == nullptr) return out;
  ggml_tensor* biases = ggml_reshape_2d(ctx, experts.b, experts.w->ne[1], experts.w->ne[2]);
  return ggml_add_id(ctx, out, biases, chosen);
}

ggml_tensor* gated(ggml_context* ctx, Activation kind, ggml_tensor* gate, ggml_tensor* up) {
  constexpr float kSteepness = 1.702F;
  constexpr float kLimit = 7.0F;
  return kind == Activation::kClampedSwiglu ? ggml_swiglu_oai(ctx, gate, up, kSteepness, kLimit)
                                            : ggml_swiglu_split(ctx, gate, up);
}

// The weights of those that were chosen, [1, n_used, n].
ggml_tensor* expert_weights(ggml_context* ctx, const Model& model, ggml_tensor* probabilities,
                            ggml_tensor* chosen) {
  const HParams& hp = model.hparams();
  const DecoderSpec& spec = model.spec();
  const int64_t n = chosen->ne[1];
  const int64_t n_used = hp.n_expert_used;
  ggml_tensor* weights =
      ggml_get_rows(ctx, ggml_reshape_3d(ctx, probabilities, 1, hp.n_expert, n), chosen);
  if (spec.softmax_of_chosen) {
    weights = ggml_soft_max(ctx, ggml_reshape_2d(ctx, weights, n_used, n));
    weights = ggml_reshape_3d(ctx, weights, 1, n_used, n);
  }
  if (spec.normalised_experts) {
    weights = ggml_reshape_2d(ctx, weights, n_used, n);
    ggml_tensor* sum = ggml_clamp(ctx, ggml_sum_rows(ctx, weights), kLeastSum, INFINITY);
    weights = ggml_reshape_3d(ctx, ggml_div(ctx, weights, sum), 1, n_used, n);
  }
  return hp.expert_scale == 1 ? weights : ggml_scale(ctx, weights, hp.expert_scale);
}

}  // namespace

ggml_tensor* build_experts(ggml_context* ctx, const Model& model, const ExpertWeights& experts,
                           ggml_tensor* in, AdapterScales adapters) {
  const HParams& hp = model.hparams();
  const Adapted adapted = {ctx, model, adapters};
  const int64_t n = in->ne[1];
  const int64_t n_used = hp.n_expert_used;
  ggml_tensor* probabilities = router_logits(adapted, experts.router, in);
  if (!model.spec().softmax_of_chosen) probabilities = ggml_soft_max(ctx, probabilities);
  ggml_tensor* chosen = ggml_argsort_top_k(ctx, probabilities, hp.n_expert_used);
  ggml_tensor* weights = expert_weights(ctx, model, probabilities, chosen);

  ggml_tensor* rows = ggml_reshape_3d(ctx, in, in->ne[0], 1, n);
  ggml_tensor* up = chosen_products(adapted, experts.up, rows, chosen);
  ggml_tensor* gate = chosen_products(adapted, experts.gate, rows, chosen);
  ggml_tensor* act = gated(ctx, model.spec().activation, gate, up);
  ggml_tensor* each = ggml_mul(ctx, chosen_products(adapted, experts.down, act, chosen), weights);
  ggml_tensor* sum = nullptr;  // in the order of the choice
  for (int64_t i = 0; i < n_used; ++i) {
    ggml_tensor* one =
        ggml_view_2d(ctx, each, each->ne[0], n, each->nb[2], static_cast<size_t>(i) * each->nb[1]);
    sum = sum == nullptr ? one : ggml_add(ctx, sum, one);
  }
  if (n_used == 1) sum = ggml_cont(ctx, sum);
  return experts.shared_up.w == nullptr ? sum
                                        : ggml_add(ctx, sum, shared_experts(adapted, experts, in));
}

}  // namespace hcache::model
