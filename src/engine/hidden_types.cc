#include "hidden_types.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "base/log.h"

namespace hcache::engine {

using model::LayerWeights;

namespace {

ggml_type native_of(const model::Device& device, const ggml_tensor* weight) {
  return model::native_activation_type(device, weight->type);
}

}  // namespace

HiddenTypes::HiddenTypes(const model::Model& model, const EngineOptions& options,
                         const Stages& stages, WeightStream& weights)
    : model_(model), options_(options), stages_(stages), weights_(weights) {
  derives_q8_0_ = derives_q8_0();
  for (int layer = 0; layer < model.hparams().n_layer; ++layer) {
    native_.push_back(find_native(layer));
  }
}

ggml_type HiddenTypes::find_native(int layer) const {
  // What an adapter adds is of F32 rows, and in a sequence that has it.
  if (model_.adapts_kv(layer)) return GGML_TYPE_COUNT;
  const LayerWeights& w = model_.weights().layers[layer];
  const model::Device& device = stages_.of(layer).device();
  const ggml_type k = native_of(device, w.k.w);
  const ggml_type v = native_of(device, w.v.w);
  const auto members = stages_.members(layer);
  const bool agree = std::all_of(members.begin(), members.end(), [&](const Stage* stage) {
    return native_of(stage->device(), w.k.w) == k && native_of(stage->device(), w.v.w) == v;
  });
  const auto fits = [&](ggml_type type) {
    return model_.hparams().n_embd % ggml_blck_size(type) == 0;
  };
  if (agree && k == v && fits(k)) return k;
  const auto are = [&](ggml_type a, ggml_type b) {
    return (k == a && v == b) || (k == b && v == a);
  };
  if (agree && derives_q8_0_ && are(GGML_TYPE_Q8_0, GGML_TYPE_Q8_1)) return GGML_TYPE_Q8_1;
  // Each product makes its own of F32 rows.
  const size_t kv_bytes = 2 * ggml_row_size(options_.kv_type, model_.hparams().n_embd_kv());
  const bool smaller = row_bytes(GGML_TYPE_F32) < kv_bytes;
  return smaller ? GGML_TYPE_F32 : GGML_TYPE_COUNT;
}

Status HiddenTypes::cannot_project(ggml_type type, int layer) const {
  const LayerWeights& w = model_.weights().layers[layer];
  const std::string weights = fmt::format("layer {}'s {} and {} weights", layer,
                                          ggml_type_name(w.k.w->type), ggml_type_name(w.v.w->type));
  if (type == GGML_TYPE_COUNT) {
    return unimplemented(fmt::format(
        "no hidden states smaller than K and V serve {} without loss; save the layer's K and V, or "
        "choose a --state-type",
        weights));
  }
  return unimplemented(fmt::format(
      "device {} can't project hidden states saved as {} with {}; choose another --state-type, or "
      "--save kv",
      stages_.of(layer).device().name(), ggml_type_name(type), weights));
}

ggml_tensor* HiddenTypes::product_input(ggml_context* ctx, const model::Device& device,
                                        const ggml_tensor* weight, ggml_tensor* hidden) {
  if (hidden->type == GGML_TYPE_F32) return hidden;
  if (device.is_cpu()) {
    const ggml_type native = native_of(device, weight);
    if (hidden->type == native) return hidden;
    if (hidden->type == GGML_TYPE_Q8_1 && native == GGML_TYPE_Q8_0) {
      return without_sums(ctx, hidden);
    }
  } else if (hidden->type == weight->type &&
             (hidden->type == GGML_TYPE_F16 || hidden->type == GGML_TYPE_BF16)) {
    ggml_tensor* product = ggml_mul_mat(ctx, const_cast<ggml_tensor*>(weight), hidden);
    if (ggml_backend_supports_op(device.compute(), product)) return hidden;
  }
  return ggml_cast(ctx, hidden, GGML_TYPE_F32);
}

int64_t HiddenTypes::least_rows(const model::Device& device, int layer) const {
  const LayerWeights& w = model_.weights().layers[layer];
  return std::max(model::least_product_rows(device, w.k.w->type),
                  model::least_product_rows(device, w.v.w->type));
}

model::Product HiddenTypes::padded_product(const model::Device& device) {
  return [&device](ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x) {
    return engine::padded_product(ctx, weight, x, model::least_product_rows(device, weight->type));
  };
}

bool HiddenTypes::can_project(ggml_type type, int layer) {
  if (type == GGML_TYPE_COUNT || model_.hparams().n_embd % ggml_blck_size(type) != 0) return false;
  const auto members = stages_.members(layer);
  return std::all_of(members.begin(), members.end(),
                     [&](Stage* stage) { return can_project(type, *stage, layer); });
}

bool HiddenTypes::can_project(ggml_type type, Stage& stage, int layer) {
  const LayerWeights& w = stage.model().weights().layers[layer];
  const auto can = [&](ggml_tensor* weight) {
    const Tried key = {&stage, type, weight->type};
    if (const auto known = projectable_.find(key); known != projectable_.end()) {
      return known->second;
    }
    const HeldWeights weights(weights_, layer, model::LayerPart::kKv);
    if (!weights.status().ok()) {  // it will be asked again
      log::warn("whether hidden states can be projected is not known: {}",
                weights.status().to_string());
      return false;
    }
    return projectable_[key] = is_supported(type, stage.device(), weight) &&
                               survives_round_trip(type, stage, weight);
  };
  return can(w.k.w) && can(w.v.w);
}

// Whether there are the ops that saving and projecting `type` needs.
bool HiddenTypes::is_supported(ggml_type type, const model::Device& device,
                               const ggml_tensor* weight) const {
  const bool is_cpu = device.is_cpu();
  const ggml_type native = native_of(device, weight);
  switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
    case GGML_TYPE_Q8_0: return true;
    // These can't be cast back (ggml crashes): only the product itself reads them.
    case GGML_TYPE_Q8_1:
      return is_cpu && (native == type || (native == GGML_TYPE_Q8_0 && derives_q8_0_));
    case GGML_TYPE_Q8_K: return is_cpu && native == type;
    default: return false;
  }
}

// Puts a few rows to try with where a step's rows are.
void HiddenTypes::load_sample(Stage& stage) const {
  const auto n =
      static_cast<size_t>(model_.hparams().n_embd) * std::min(4, options_.max_batch_rows);
  std::vector<float> values(n);
  for (size_t i = 0; i < n; ++i) {
    values[i] =
        std::sin(0.37F * static_cast<float>(i)) + 0.25F * std::cos(1.7F * static_cast<float>(i));
  }
  stage.spill_rows();
  stage.graphs().set(stage.rows(), values);
}

ggml_tensor* HiddenTypes::sample(ggml_context* ctx, const Stage& stage) const {
  ggml_tensor* x = stage.rows();
  return ggml_view_2d(ctx, x, x->ne[0], std::min(4, options_.max_batch_rows), x->nb[1], 0);
}

// F32 rows -> saved type -> product, against the product of the F32 rows.
bool HiddenTypes::survives_round_trip(ggml_type type, Stage& stage, ggml_tensor* weight) {
  GraphRunner& graphs = stage.graphs();
  load_sample(stage);
  const Graph g(graphs, 64);
  ggml_tensor* exact = sample(g.ctx, stage);
  ggml_tensor* saved = saved_as(g.ctx, type, exact, stage.order(g.ctx, exact->ne[1]));
  ggml_tensor* from_saved =
      model::build_product(g.ctx, weight, product_input(g.ctx, stage.device(), weight, saved));
  ggml_tensor* from_exact = model::build_product(g.ctx, weight, exact);
  for (ggml_tensor* product : {from_saved, from_exact}) {
    ggml_set_output(product);
    g.add(product);
  }
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
  return error <= 1e-3 * norm;
}

// Whether dropping the sums of Q8_1 rows gives the very Q8_0 rows that a product makes of F32 ones.
// Tried on the CPU only, where a layer needs it.
bool HiddenTypes::derives_q8_0() const {
  for (int layer = 0; layer < model_.hparams().n_layer; ++layer) {
    const LayerWeights& w = model_.weights().layers[layer];
    Stage& stage = stages_.of(layer);
    const bool needed = native_of(stage.device(), w.k.w) != native_of(stage.device(), w.v.w);
    if (!needed || !stage.device().is_cpu()) continue;
    if (model_.hparams().n_embd % ggml_blck_size(GGML_TYPE_Q8_1) != 0) return false;
    load_sample(stage);
    const Graph g(stage.graphs(), 16);
    ggml_tensor* rows = sample(g.ctx, stage);
    ggml_tensor* order = stage.order(g.ctx, rows->ne[1]);
    ggml_tensor* made = saved_as(g.ctx, GGML_TYPE_Q8_0, rows, order);
    ggml_tensor* derived = without_sums(g.ctx, saved_as(g.ctx, GGML_TYPE_Q8_1, rows, order));
    for (ggml_tensor* result : {made, derived}) {
      ggml_set_output(result);
      g.add(result);
    }
    if (!stage.graphs().compute(g).ok()) return false;
    stage.graphs().synchronize();
    return std::memcmp(made->data, derived->data, ggml_nbytes(made)) == 0;
  }
  return false;
}

}  // namespace hcache::engine
