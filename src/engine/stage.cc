#include "stage.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace hcache::engine {

Stage::Stage(const model::Model& model, const EngineOptions& options, StageOptions stage)
    : model_(model),
      engine_options_(options),
      options_(std::move(stage)),
      graphs_(*options_.device, *options_.queues.compute),
      arena_(model, engine_options_, options_.begin, options_.end, graphs_, *options_.queues.copy) {
  for (int i = 0; i < options_.n_groups; ++i) {
    const int64_t window = options_.windows.empty() ? 0 : options_.windows.at(i);
    attention_.push_back(std::make_unique<AttentionOp>(model, graphs_, options_.own_attention,
                                                       options, arena_.row_bytes(), window));
  }
}

void Stage::close() {
  graphs_.synchronize();
  options_.queues.copy.reset();
}

Status Stage::allocate() {
  HCACHE_RETURN_IF_ERROR(arena_.allocate(options_.cells));
  const int64_t n = engine_options_.max_batch_rows;
  inputs_.open(7 + options_.n_groups);
  ggml_context* ctx = inputs_.ctx();
  rows_ = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, model_.hparams().n_embd, n);
  positions_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
  for (int i = 0; i < options_.n_groups; ++i) {
    cells_.push_back(ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n));
  }
  order_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n);
  output_rows_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
  token_rows_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
  table_rows_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n);
  if (const auto n_adapters = static_cast<int64_t>(model_.adapters().size()); n_adapters > 0) {
    adapter_scales_ = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, n * n_adapters);
  }
  HCACHE_RETURN_IF_ERROR(inputs_.allocate(device().buffer_type(), "a step's inputs"));
  std::vector<int64_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  ggml_backend_tensor_set(order_, order.data(), 0, order.size() * sizeof(int64_t));
  return {};
}

Status Stage::load(StepState& step) {
  if (rows_owner_ != &step) {
    spill_rows();
    graphs_.set(rows_, step.x);
  }
  if (loaded_ != &step || loaded_epoch_ != step.placed_epoch) {
    graphs_.set(positions_, step.positions);
    for (int i = 0; i < options_.n_groups; ++i) graphs_.set(cells_[i], step.placed[i].cells);
    graphs_.set(output_rows_, step.output_rows);
    graphs_.set(token_rows_, step.token_rows);
    graphs_.set(table_rows_, step.table_rows);
    if (adapter_scales_ != nullptr) graphs_.set(adapter_scales_, step.adapter_scales);
    loaded_ = &step;
    loaded_epoch_ = step.placed_epoch;
  }
  for (int i = 0; i < options_.n_groups; ++i) {
    HCACHE_RETURN_IF_ERROR(attention_[i]->set_batch(step.placed[i].attention));
  }
  return {};
}

uint64_t Stage::attention_layout() const {
  uint64_t sum = 0;  // each only ever grows
  for (const auto& attention : attention_) sum += attention->layout();
  return sum;
}

void Stage::spill_rows() {
  if (rows_owner_ == nullptr) return;
  graphs_.get(rows_, rows_owner_->x.data(), rows_owner_->x.size() * sizeof(float));
  graphs_.synchronize();
  rows_owner_ = nullptr;
}

void Stage::pass_rows_to(Stage& next, StepState& step) {
  if (&next == this || rows_owner_ != &step) return;
  next.spill_rows();
  const Graph g(graphs_,
                2);  // holds the two tensors as long as the copy needs them
  const int64_t n_embd = model_.hparams().n_embd;
  const auto rows_of = [&](const Stage& stage) {
    return tensor_in_block(g.ctx, stage.rows_, 0, GGML_TYPE_F32, n_embd, step.n_rows);
  };
  graphs_.copy(rows_of(*this), next.graphs_, rows_of(next));
  rows_owner_ = nullptr;
  next.rows_owner_ = &step;
}

void Stage::wait_for_step_before() {
  const CopyQueue::Mark before = std::exchange(not_waited_for_, queue().mark_compute());
  queue().wait_compute(before);
}

void Stage::forget(const StepState& step) {
  if (loaded_ == &step) loaded_ = nullptr;
  if (rows_owner_ == &step) rows_owner_ = nullptr;
  if (computed_last_ == &step) computed_last_ = nullptr;
}

size_t Stage::n_bytes() const { return arena_.n_bytes() + inputs_.n_bytes() + graphs_.n_bytes(); }

Stages::Stages(std::vector<std::unique_ptr<Stage>> stages)
    : stages_(std::move(stages)), shares_layers_(stages_.back()->begin() == 0 && size() > 1) {
  for (const auto& stage : stages_) {
    const int n = shares_layers_ ? 1 : stage->end() - stage->begin();
    by_layer_.insert(by_layer_.end(), static_cast<size_t>(n), stage.get());
  }
}

void Stages::synchronize() const {
  for (const auto& stage : stages_) stage->graphs().synchronize();
}

void Stages::wait_for_uploads() const {
  for (const auto& stage : stages_) stage->arena().wait_for_uploads();
}

}  // namespace hcache::engine
