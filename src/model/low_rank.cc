#include "low_rank.h"

namespace hcache::model {

ggml_tensor* Adapted::scale_of(const LowRank& part) const {
  const auto index = static_cast<size_t>(part.adapter);
  return index < scales.size() ? scales[index] : nullptr;
}

ggml_tensor* Adapted::add(const ggml_tensor* weight, ggml_tensor* x, ggml_tensor* y) const {
  for (const LowRank& part : model.low_rank(weight)) {
    ggml_tensor* scale = scale_of(part);
    if (scale == nullptr) continue;
    // ggml has one kernel for a single row and another one for more.
    const int64_t n = x->ne[1];
    ggml_tensor* rows = n > 1 ? x : ggml_pad(ctx, x, 0, 1, 0, 0);
    ggml_tensor* added = ggml_mul_mat(ctx, part.b, ggml_mul_mat(ctx, part.a, rows));
    if (n == 1) added = ggml_view_2d(ctx, added, added->ne[0], n, added->nb[1], 0);
    y = ggml_add(ctx, y, ggml_mul(ctx, added, scale));
  }
  return y;
}

ggml_tensor* Adapted::add_chosen(const ggml_tensor* weights, ggml_tensor* x, ggml_tensor* chosen,
                                 ggml_tensor* y) const {
  for (const LowRank& part : model.low_rank(weights)) {
    ggml_tensor* scale = scale_of(part);
    if (scale == nullptr) continue;
    ggml_tensor* low = ggml_mul_mat_id(ctx, part.a, x, chosen);
    ggml_tensor* added = ggml_mul_mat_id(ctx, part.b, low, chosen);
    scale = ggml_reshape_3d(ctx, scale, 1, 1, scale->ne[1]);
    y = ggml_add(ctx, y, ggml_mul(ctx, added, scale));
  }
  return y;
}

}  // namespace hcache::model
