#include "experts.h"

#include <cmath>

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
ggml_tensor* router_logits(ggml_context* ctx, const Linear& router, ggml_tensor* in) {
  ggml_tensor* rows = ggml_reshape_3d(ctx, in, in->ne[0], 1, in->ne[1]);
  ggml_tensor* logits = ggml_mul_mat_id(ctx, router.w, rows, only_matrix(ctx, in));
  logits = ggml_reshape_2d(ctx, logits, logits->ne[0], in->ne[1]);
  return router.b != nullptr ? ggml_add(ctx, logits, router.b) : logits;
}

ggml_tensor* shared_experts(ggml_context* ctx, const ExpertWeights& e, ggml_tensor* in) {
  ggml_tensor* up = ggml_mul_mat(ctx, e.shared_up.w, in);
  ggml_tensor* act = ggml_swiglu_split(ctx, ggml_mul_mat(ctx, e.shared_gate.w, in), up);
  ggml_tensor* out = ggml_mul_mat(ctx, e.shared_down.w, act);
  if (e.shared_weight == nullptr) return out;
  ggml_tensor* weight = ggml_sum_rows(ctx, ggml_mul(ctx, in, e.shared_weight));
  return ggml_mul(ctx, out, ggml_sigmoid(ctx, weight));
}

}  // namespace

ggml_tensor* build_experts(ggml_context* ctx, const Model& model, const ExpertWeights& experts,
                           ggml_tensor* in) {
  const HParams& hp = model.hparams();
  const int64_t n = in->ne[1];
  const int64_t n_used = hp.n_expert_used;
  ggml_tensor* probabilities = ggml_soft_max(ctx, router_logits(ctx, experts.router, in));
  ggml_tensor* chosen = ggml_argsort_top_k(ctx, probabilities, hp.n_expert_used);
  ggml_tensor* weights =
      ggml_get_rows(ctx, ggml_reshape_3d(ctx, probabilities, 1, hp.n_expert, n), chosen);
  if (model.spec().normalised_experts) {
    weights = ggml_reshape_2d(ctx, weights, n_used, n);
    ggml_tensor* sum = ggml_clamp(ctx, ggml_sum_rows(ctx, weights), kLeastSum, INFINITY);
    weights = ggml_reshape_3d(ctx, ggml_div(ctx, weights, sum), 1, n_used, n);
  }
  if (hp.expert_scale != 1) weights = ggml_scale(ctx, weights, hp.expert_scale);

  ggml_tensor* rows = ggml_reshape_3d(ctx, in, in->ne[0], 1, n);
  ggml_tensor* up = ggml_mul_mat_id(ctx, experts.up.w, rows, chosen);
  ggml_tensor* act = ggml_swiglu_split(ctx, ggml_mul_mat_id(ctx, experts.gate.w, rows, chosen), up);
  ggml_tensor* each = ggml_mul(ctx, ggml_mul_mat_id(ctx, experts.down.w, act, chosen), weights);
  ggml_tensor* sum = nullptr;  // in the order of the choice
  for (int64_t i = 0; i < n_used; ++i) {
    ggml_tensor* one =
        ggml_view_2d(ctx, each, each->ne[0], n, each->nb[2], static_cast<size_t>(i) * each->nb[1]);
    sum = sum == nullptr ? one : ggml_add(ctx, sum, one);
  }
  if (n_used == 1) sum = ggml_cont(ctx, sum);
  return experts.shared_up.w == nullptr ? sum
                                        : ggml_add(ctx, sum, shared_experts(ctx, experts, in));
}

}  // namespace hcache::model
