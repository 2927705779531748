#include "hidden_types.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <vector>

#include "projection.h"

namespace hcache::engine {
using model::LayerWeights;

ggml_tensor* saved_as(ggml_context* ctx, ggml_type type, ggml_tensor* rows, ggml_tensor* order) {
  ggml_tensor* target = ggml_new_tensor_2d(ctx, type, rows->ne[0], rows->ne[1]);
  ggml_set_input(target);  // set_rows writes into it: it must have memory of its own
  return ggml_set_rows(ctx, target, rows, order);
}

ggml_tensor* padded_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x,
                            int64_t n_rows) {
  const int64_t n = x->ne[1];
  const int64_t missing = std::max<int64_t>(n_rows - n, 0);
  ggml_tensor* rows = missing == 0 ? x : ggml_pad(ctx, x, 0, static_cast<int>(missing), 0, 0);
  ggml_tensor* y = ggml_mul_mat(ctx, weight, rows);
  return ggml_view_2d(ctx, y, y->ne[0], n, y->nb[1], 0);
}

ggml_type HiddenTypes::native() const {
  ggml_type type = GGML_TYPE_COUNT;
  for (size_t layer = 0; layer < model_.weights().layers.size(); ++layer) {
    const LayerWeights& w = model_.weights().layers[layer];
    for (const ggml_tensor* weight : {w.k.w, w.v.w}) {
      const ggml_type native =
          model::native_activation_type(stages_.of(static_cast<int>(layer)).device(), weight->type);
      if (type != GGML_TYPE_COUNT && type != native) return GGML_TYPE_F16;
      type = native;
    }
  }
  const bool fits = model_.hparams().n_embd % ggml_blck_size(type) == 0;
  return fits ? type : GGML_TYPE_F16;
}

Status HiddenTypes::cannot_project(ggml_type type) const {
  return unimplemented(fmt::format("device {} can't project hidden states saved as {}",
                                   stages_.front().device().name(), ggml_type_name(type)));
}

ggml_tensor* HiddenTypes::product_input(ggml_context* ctx, int layer, const ggml_tensor* weight,
                                        ggml_tensor* hidden) const {
  if (hidden->type == GGML_TYPE_F32) return hidden;
  const model::Device& device = stages_.of(layer).device();
  if (device.is_cpu()) {
    if (hidden->type == model::native_activation_type(device, weight->type)) return hidden;
  } else if (hidden->type == weight->type &&
             (hidden->type == GGML_TYPE_F16 || hidden->type == GGML_TYPE_BF16)) {
    ggml_tensor* product = ggml_mul_mat(ctx, const_cast<ggml_tensor*>(weight), hidden);
    if (ggml_backend_supports_op(device.compute(), product)) return hidden;
  }
  return ggml_cast(ctx, hidden, GGML_TYPE_F32);
}

int64_t HiddenTypes::least_rows(int layer) const {
  const model::Device& device = stages_.of(layer).device();
  const LayerWeights& w = model_.weights().layers[layer];
  return std::max(model::least_product_rows(device, w.k.w->type),
                  model::least_product_rows(device, w.v.w->type));
}

model::Product HiddenTypes::padded_product(int layer) const {
  return [&device = stages_.of(layer).device()](ggml_context* ctx, ggml_tensor* weight,
                                                ggml_tensor* x) {
    return engine::padded_product(ctx, weight, x, model::least_product_rows(device, weight->type));
  };
}

model::Product HiddenTypes::product(int layer) const {
  return [this, layer](ggml_context* ctx, ggml_tensor* weight, ggml_tensor* input) {
    return has_fast_product(layer, weight, input->type) ? build_fast_product(ctx, weight, input)
                                                        : ggml_mul_mat(ctx, weight, input);
  };
}

bool HiddenTypes::takes_fast_product(int layer, const ggml_tensor* weight, ggml_type rows) const {
  return stages_.of(layer).device().is_cpu() && ggml_backend_buffer_is_host(weight->buffer) &&
         can_project_fast(weight->type, rows);
}

bool HiddenTypes::has_fast_product(int layer, const ggml_tensor* weight, ggml_type rows) const {
  return fast_equals_.contains(weight->type) && takes_fast_product(layer, weight, rows);
}

bool HiddenTypes::has_fast_products(int layer) const {
  const LayerWeights& w = model_.weights().layers[layer];
  const ggml_type rows = native();
  return has_fast_product(layer, w.k.w, rows) && has_fast_product(layer, w.v.w, rows);
}

bool HiddenTypes::can_project(ggml_type type) {
  const auto known = projectable_.find(type);
  if (known != projectable_.end()) return known->second;
  return projectable_[type] = is_supported(type) && survives_round_trip(type);
}

// Whether there are the ops that saving and projecting `type` needs.
bool HiddenTypes::is_supported(ggml_type type) const {
  switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_Q8_1:
    case GGML_TYPE_Q8_K: break;
    default: return false;
  }
  if (model_.hparams().n_embd % ggml_blck_size(type) != 0) return false;
  for (size_t layer = 0; layer < model_.weights().layers.size(); ++layer) {
    const model::Device& device = stages_.of(static_cast<int>(layer)).device();
    const LayerWeights& w = model_.weights().layers[layer];
    for (const ggml_tensor* weight : {w.k.w, w.v.w}) {
      // Q8_1 and Q8_K can't be cast back (ggml crashes): only the product itself reads them.
      const bool castable = type != GGML_TYPE_Q8_1 && type != GGML_TYPE_Q8_K;
      const bool native =
          device.is_cpu() && type == model::native_activation_type(device, weight->type);
      if (!castable && !native) return false;
    }
  }
  return true;
}

// F32 rows -> saved type -> product of layer 0, against the product of the F32 rows.
bool HiddenTypes::survives_round_trip(ggml_type type) {
  const int64_t n_embd = model_.hparams().n_embd;
  const int n_rows = std::min(4, options_.max_batch_rows);
  Stage& stage = stages_.front();
  GraphRunner& graphs = stage.graphs();
  const Graph g(graphs, 64);
  std::vector<float> values(static_cast<size_t>(n_embd) * n_rows);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        std::sin(0.37F * static_cast<float>(i)) + 0.25F * std::cos(1.7F * static_cast<float>(i));
  }
  stage.spill_rows();
  ggml_tensor* x = stage.rows();
  graphs.set(x, values);
  const LayerWeights& w = model_.weights().layers[0];
  ggml_tensor* exact = ggml_view_2d(g.ctx, x, n_embd, n_rows, x->nb[1], 0);
  ggml_tensor* saved = saved_as(g.ctx, type, exact, stage.order(g.ctx, n_rows));
  ggml_tensor* from_saved = ggml_mul_mat(g.ctx, w.k.w, product_input(g.ctx, 0, w.k.w, saved));
  ggml_tensor* from_exact = ggml_mul_mat(g.ctx, w.k.w, exact);
  ggml_set_output(from_saved);
  ggml_set_output(from_exact);
  g.add(from_saved);
  g.add(from_exact);
  if (!graphs.compute(g).ok()) return false;
  std::vector<float> a(static_cast<size_t>(ggml_nelements(from_saved)));
  std::vector<float> b(a.size());
  graphs.synchronize();
  ggml_backend_tensor_get(from_saved, a.data(), 0, a.size() * sizeof(float));
  ggml_backend_tensor_get(from_exact, b.data(), 0, b.size() * sizeof(float));
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  if (error > 1e-3 * norm) return false;
  check_fast_products(type, n_rows);
  return true;
}

void HiddenTypes::check_fast_products(ggml_type type, int n_rows) {
  Stage& stage = stages_.front();
  ggml_tensor* x = stage.rows();
  const LayerWeights& w = model_.weights().layers[0];
  for (ggml_tensor* weight : {w.k.w, w.v.w}) {
    if (!takes_fast_product(0, weight, type)) continue;
    const Graph g(stage.graphs(), 64);
    ggml_tensor* saved =
        saved_as(g.ctx, type, ggml_view_2d(g.ctx, x, x->ne[0], n_rows, x->nb[1], 0),
                 stage.order(g.ctx, n_rows));
    const std::array<ggml_tensor*, 2> products = {ggml_mul_mat(g.ctx, weight, saved),
                                                  build_fast_product(g.ctx, weight, saved)};
    for (ggml_tensor* product : products) {
      ggml_set_output(product);
      g.add(product);
    }
    if (!stage.graphs().compute(g).ok()) return;
    stage.graphs().synchronize();
    if (std::memcmp(products[0]->data, products[1]->data, ggml_nbytes(products[0])) == 0) {
      fast_equals_.insert(weight->type);
    } else {
      fast_equals_.erase(weight->type);
    }
  }
}

}  // namespace hcache::engine
