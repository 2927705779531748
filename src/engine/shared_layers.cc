#include "shared_layers.h"

#include <cstddef>

namespace hcache::engine {

Result<ggml_tensor*> SharedLayers::run(StepState& step, int begin, int end, bool kv_only_last) {
  using Piece = StepGraphs::Piece;
  const int n_layer = model_.hparams().n_layer;
  ggml_tensor* const no_logits = nullptr;
  for (int layer = begin; layer < end; ++layer) {
    const bool last = layer == n_layer - 1;
    // Rows nobody wants logits of need no more than their K and V in the last layer.
    const bool kv_only = (kv_only_last && layer == end - 1) || (last && step.output_rows.empty());
    HCACHE_RETURN_IF_ERROR(run_piece(step, layer, Piece::kAttention, kv_only));
    if (kv_only) return no_logits;
    if (!model_.hparams().parallel) {
      HCACHE_RETURN_IF_ERROR(run_piece(step, layer, Piece::kFeedForward, false));
    }
  }
  if (end < n_layer) return no_logits;
  Stage& first = stages_.of(end - 1);
  HCACHE_RETURN_IF_ERROR(first.load(step));
  return graphs_.run_piece(first, step, end - 1, Piece::kLogits, false);
}

// Every device has its work before one of them is waited for.
Status SharedLayers::run_piece(StepState& step, int layer, StepGraphs::Piece piece, bool kv_only) {
  std::vector<ggml_tensor*> results;
  for (Stage* stage : stages_.members(layer)) {
    HCACHE_RETURN_IF_ERROR(stage->load(step));
    HCACHE_ASSIGN_OR_RETURN(results.emplace_back(),
                            graphs_.run_piece(*stage, step, layer, piece, kv_only));
  }
  if (!kv_only) add_up(step, layer, results);
  return {};
}

void SharedLayers::add_up(StepState& step, int layer, const std::vector<ggml_tensor*>& results) {
  const auto members = stages_.members(layer);
  const auto n = static_cast<size_t>(ggml_nelements(results.front()));
  step.x.resize(n);
  results_.resize(members.size() - 1);
  for (size_t i = 0; i < members.size(); ++i) {
    if (i > 0) results_[i - 1].resize(n);
    float* const to = i == 0 ? step.x.data() : results_[i - 1].data();
    members[i]->graphs().get(results[i], to, n * sizeof(float));
  }
  for (size_t i = 0; i < members.size(); ++i) {
    members[i]->graphs().synchronize();
    if (i == 0) continue;
    const std::vector<float>& result = results_[i - 1];
    for (size_t j = 0; j < n; ++j) step.x[j] += result[j];
  }
}

}  // namespace hcache::engine
