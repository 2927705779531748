#include "batch_checks.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/graph.h"

namespace hcache::engine {

int least_rows(const model::Model& model) {
  const model::Device& device = model.device();
  int64_t least = model::least_product_rows(device, model.weights().output.w->type);
  for (const model::LayerWeights& w : model.weights().layers) {
    for (const model::Linear* linear :
         {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down, &w.experts.shared_gate,
          &w.experts.shared_up, &w.experts.shared_down}) {
      if (linear->w == nullptr) continue;
      least = std::max(least, model::least_product_rows(device, linear->w->type));
    }
  }
  return static_cast<int>(least);
}

Status check_tokens(const model::Model& model, std::span<const int32_t> tokens) {
  for (const int32_t token : tokens) {
    if (token >= 0 && token < model.hparams().n_vocab) continue;
    return invalid_argument(
        fmt::format("token {} is outside the vocabulary of {}", token, model.hparams().n_vocab));
  }
  return {};
}

Status check_options(const model::Model& model, const HybridOptions& options) {
  if (model.devices().size() > 1) {
    return unimplemented(
        fmt::format("a batch runs on one device, the model's layers are on {}; name one --device",
                    model.devices().size()));
  }
  const model::HParams& hp = model.hparams();
  if (hp.n_window > 0 || hp.attention_soft_cap > 0 || model.spec().sinks) {
    return unimplemented(
        fmt::format("the batch engine attends all rows alike, and {} models have layers with "
                    "windows, capped scores or sinks",
                    model.hparams().arch));
  }
  if (options.buffer_tokens < kBlockTokens || options.n_buffers < 2 || options.max_batch_rows < 1 ||
      options.max_step_rows < 1) {
    return invalid_argument(fmt::format(
        "a batch needs two buffers of {} tokens or more, and a row a step", kBlockTokens));
  }
  if (options.recomputed_layers < 0 || options.recomputed_layers > model.hparams().n_layer) {
    return invalid_argument(fmt::format("{} recomputed layers of a model of {}",
                                        options.recomputed_layers, model.hparams().n_layer));
  }
  if (options.disk_bytes > 0 && options.disk_dir.empty()) {
    return invalid_argument("blocks on disk need a directory");
  }
  return {};
}

}  // namespace hcache::engine
