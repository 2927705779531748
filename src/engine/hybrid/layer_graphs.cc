#include "layer_graphs.h"

#include <algorithm>

#include "hidden_rows.h"
#include "kv_arena.h"

namespace hcache::engine {
namespace {

constexpr size_t kNodes = 128;            // of a layer, without ggml's attention
constexpr size_t kNodesPerExpert = 4;     // that is used
constexpr size_t kNodesPerSegment = 16;   // of ggml's attention
constexpr size_t kNodesPerChunk = 32;     // of generating K and V
constexpr size_t kNodesPerCopy = 4;       // of a device block's page
constexpr size_t kCaptureAlignment = 64;  // of the captured parts

}  // namespace

Status LayerGraphs::allocate(const Capacity& capacity) {
  capacity_ = capacity;
  inputs_.open(2);
  ggml_context* ctx = inputs_.ctx();
  const int64_t n_act = capacity.buffer_tokens + capacity.least_rows;
  act_positions_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_act);
  act_cells_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_act);
  HCACHE_RETURN_IF_ERROR(inputs_.allocate(stage_.device().buffer_type(), "a mini-batch's inputs"));
  return allocate(group_rows_[0]);  // the other when context is computed for the first time
}

Status LayerGraphs::allocate(GroupRows& rows) {
  rows.pool.open(4);
  ggml_context* ctx = rows.pool.ctx();
  const model::HParams& hp = model_.hparams();
  const auto make = [&](int64_t width) {
    return ggml_new_tensor_2d(ctx, GGML_TYPE_F32, width, capacity_.max_batch_rows);
  };
  ggml_tensor* q = make(hp.n_embd_q());
  rows.k = make(hp.n_embd_kv());
  rows.v = make(hp.n_embd_kv());
  rows.cells = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, capacity_.max_batch_rows);
  HCACHE_RETURN_IF_ERROR(
      rows.pool.allocate(stage_.device().buffer_type(), "a group of rows within a layer"));
  rows.q = q;
  return {};
}

size_t LayerGraphs::n_nodes() const {
  return kNodes + kNodesPerExpert * static_cast<size_t>(model_.hparams().n_expert_used);
}

void LayerGraphs::new_step() {
  positions_of_ = nullptr;
  for (GroupRows& rows : group_rows_) rows.group = nullptr;
}

Status LayerGraphs::set_rows(const std::vector<float>& rows) {
  const int64_t n_embd = model_.hparams().n_embd;
  const auto n = static_cast<int64_t>(rows.size()) / n_embd;
  if (rows_ == nullptr || rows_->ne[1] < n) {
    stage_.graphs().synchronize();
    rows_ = nullptr;
    rows_pool_.open(1);
    ggml_tensor* grown = ggml_new_tensor_2d(rows_pool_.ctx(), GGML_TYPE_F32, n_embd, n);
    HCACHE_RETURN_IF_ERROR(
        rows_pool_.allocate(stage_.device().buffer_type(), "the rows of a step between layers"));
    rows_ = grown;
  }
  stage_.graphs().set(rows_, rows);
  return {};
}

void LayerGraphs::set_act_rows(const std::vector<int32_t>& positions,
                               const std::vector<int64_t>& cells) {
  stage_.graphs().set(act_positions_, positions);
  stage_.graphs().set(act_cells_, cells);
}

// The pages of blocks on the device, byte by byte.
void LayerGraphs::add_copies(const Graph& g, std::span<const PageLoad> loads) {
  for (const PageLoad& load : loads) {
    if (load.device == nullptr) continue;
    const auto n = static_cast<int64_t>(load.n_bytes);
    const auto* source = load.device;
    g.add(ggml_cpy(g.ctx,
                   tensor_in_block(g.ctx, source, static_cast<int64_t>(load.device_offset),
                                   GGML_TYPE_I8, n, 1),
                   tensor_in_block(g.ctx, load.target, static_cast<int64_t>(load.offset),
                                   GGML_TYPE_I8, n, 1)));
  }
}

Status LayerGraphs::generate(int layer, BatchBuffer& buffer, int64_t n_rows,
                             std::span<const PageLoad> act_loads,
                             std::span<const PageLoad> kv_loads) {
  const auto on_device = [](const PageLoad& load) { return load.device != nullptr; };
  const auto n_copies =
      static_cast<size_t>(std::count_if(act_loads.begin(), act_loads.end(), on_device) +
                          std::count_if(kv_loads.begin(), kv_loads.end(), on_device));
  if (n_rows == 0 && n_copies == 0) return {};
  const int64_t chunk = capacity_.max_batch_rows;
  const auto n_chunks = static_cast<size_t>((n_rows + chunk - 1) / chunk);
  const Graph g(stage_.graphs(), 16 + n_chunks * kNodesPerChunk + n_copies * kNodesPerCopy);
  add_copies(g, act_loads);
  add_copies(g, kv_loads);
  const model::LayerWeights& w = model_.weights().layers[layer];
  const int64_t width = model_.hparams().n_embd_kv();
  const ggml_type type = types_.native(layer);
  for (int64_t first = 0; first < n_rows; first += chunk) {
    const int64_t n = std::min(chunk, n_rows - first);
    // Few rows take some behind them along, for the kernel that takes many.
    const int64_t computed = std::max<int64_t>(n, capacity_.least_rows);
    ggml_tensor* rows =
        tensor_in_block(g.ctx, buffer.act, first * static_cast<int64_t>(types_.row_bytes(type)),
                        type, model_.hparams().n_embd, computed);
    ggml_tensor* positions =
        ggml_view_1d(g.ctx, act_positions_, computed, static_cast<size_t>(first) * sizeof(int32_t));
    ggml_tensor* cells =
        ggml_view_1d(g.ctx, act_cells_, n, static_cast<size_t>(first) * sizeof(int64_t));
    const auto put = [&](ggml_tensor* target, ggml_tensor* made) {
      ggml_tensor* all = ggml_reshape_2d(g.ctx, made, width, computed);
      g.add(ggml_set_rows(g.ctx, target, ggml_view_2d(g.ctx, all, width, n, all->nb[1], 0), cells));
    };
    put(buffer.k,
        model::build_k(g.ctx, model_, layer,
                       HiddenTypes::product_input(g.ctx, model_.device(layer), w.k.w, rows),
                       positions));
    put(buffer.v,
        model::build_v(g.ctx, model_, layer,
                       HiddenTypes::product_input(g.ctx, model_.device(layer), w.v.w, rows)));
  }
  return stage_.graphs().compute(g);
}

CaptureLayout LayerGraphs::capture_layout(int layer, int64_t n_rows, bool act, bool kv) const {
  CaptureLayout layout;
  const auto take = [&](size_t row_bytes) {
    const auto at = static_cast<int64_t>(layout.n_bytes);
    const size_t n_bytes = row_bytes * static_cast<size_t>(n_rows);
    layout.n_bytes += (n_bytes + kCaptureAlignment - 1) / kCaptureAlignment * kCaptureAlignment;
    return at;
  };
  if (act) layout.act_offset = take(types_.row_bytes(types_.native(layer)));
  if (kv) {
    layout.k_offset = take(stage_.arena().row_bytes());
    layout.v_offset = take(stage_.arena().row_bytes());
  }
  return layout;
}

// Positions and cells of the group's rows, unless the device has them.
void LayerGraphs::set_group(const StepPlan& plan, const RowGroup& group) {
  GroupRows& rows = rows_of(group);
  if (positions_of_ == &group && rows.group == &group) return;
  std::vector<int32_t> positions(group.n_padded, 0);
  std::vector<int64_t> cells(group.n_rows);
  for (const int index : group.pieces) {
    const Piece& piece = plan.pieces[index];
    for (const RowRange& range : piece.ranges) {
      const int64_t first_cell = plan.batches[piece.batch].members[range.member].first_cell;
      for (int r = 0; r < range.n_rows; ++r) {
        const int row = piece.first_row + range.first_row + r;
        positions[row] = static_cast<int32_t>(range.first_pos + r);
        cells[row] = first_cell + range.first_pos + r;
      }
    }
  }
  stage_.graphs().set(stage_.positions(), positions);
  positions_of_ = &group;
  if (rows.group == &group) return;
  stage_.graphs().set(rows.cells, cells);
  rows.group = &group;
}

void LayerGraphs::capture(const Graph& g, const Projection& projection, ggml_type type,
                          ggml_tensor* rows, int64_t offset, ggml_tensor** written) {
  const int64_t n = rows->ne[1];
  ggml_tensor* target = tensor_in_block(g.ctx, projection.capture, offset, type, rows->ne[0], n);
  *written = ggml_set_rows(g.ctx, target, rows, stage_.order(g.ctx, n));
  g.add(*written);
}

Status LayerGraphs::project(const StepPlan& plan, const RowGroup& group,
                            const Projection& projection) {
  GroupRows& rows = rows_of(group);
  if (rows.q == nullptr) HCACHE_RETURN_IF_ERROR(allocate(rows));
  set_group(plan, group);
  const int layer = projection.layer;
  const int64_t n = group.n_padded;
  const Graph g(stage_.graphs(), n_nodes());
  ggml_tensor* positions = ggml_view_1d(g.ctx, stage_.positions(), n, 0);
  ggml_tensor* hidden = model::build_hidden(g.ctx, model_, layer, step_rows(g, group.first_row, n));
  ggml_tensor* input = hidden;
  if (projection.capture != nullptr && projection.layout.act_offset >= 0) {
    ggml_tensor* saved = nullptr;
    capture(g, projection, types_.native(layer), hidden, projection.layout.act_offset, &saved);
    // Project exactly what is kept: it is what the product would have converted to anyway.
    if (stage_.device().is_cpu()) input = saved;
  }
  const auto input_of = [&](const model::Linear& linear) {
    return HiddenTypes::product_input(g.ctx, model_.device(layer), linear.w, input);
  };
  // K, V or queries, [width, n].
  const auto put = [&](ggml_tensor* target, ggml_tensor* made) {
    made = ggml_reshape_2d(g.ctx, made, target->ne[0], n);
    g.add(ggml_cpy(g.ctx, made, ggml_view_2d(g.ctx, target, target->ne[0], n, target->nb[1], 0)));
    return made;
  };
  const model::LayerWeights& w = model_.weights().layers[layer];
  ggml_tensor* k = put(rows.k, model::build_k(g.ctx, model_, layer, input_of(w.k), positions));
  ggml_tensor* v = put(rows.v, model::build_v(g.ctx, model_, layer, input_of(w.v)));
  if (projection.capture != nullptr && projection.layout.k_offset >= 0) {
    ggml_tensor* unused = nullptr;
    const ggml_type type = stage_.engine_options().kv_type;
    capture(g, projection, type, k, projection.layout.k_offset, &unused);
    capture(g, projection, type, v, projection.layout.v_offset, &unused);
  }
  if (!projection.kv_only) {
    put(rows.q, model::build_q(g.ctx, model_, layer, hidden, positions));
  }
  return stage_.graphs().compute(g);
}

Status LayerGraphs::attend(const StepPlan& plan, int index, bool kv_only, BatchBuffer& buffer) {
  const Piece& piece = plan.pieces[index];
  const GroupRows& rows = rows_of(plan.groups[piece.group]);
  if (attention_.size() < plan.pieces.size()) attention_.resize(plan.pieces.size());
  std::unique_ptr<AttentionOp>& attention = attention_[index];
  if (attention == nullptr) {
    attention =
        std::make_unique<AttentionOp>(model_, stage_.graphs(), own_attention_,
                                      stage_.engine_options(), stage_.arena().row_bytes(), 0);
  }
  if (!kv_only) {
    HCACHE_RETURN_IF_ERROR(
        attention->set_batch(attention_segments(plan.batches[piece.batch], piece)));
  }
  const Graph g(stage_.graphs(),
                n_nodes() + (own_attention_ ? 0 : kNodesPerSegment * piece.ranges.size()));
  // The piece's rows of what is kept of the group.
  const auto view = [&](ggml_tensor* all) {
    return ggml_view_2d(g.ctx, all, all->ne[0], piece.n_rows, all->nb[1],
                        static_cast<size_t>(piece.first_row) * all->nb[1]);
  };
  ggml_tensor* cells = ggml_view_1d(g.ctx, rows.cells, piece.n_rows,
                                    static_cast<size_t>(piece.first_row) * sizeof(int64_t));
  g.add(ggml_set_rows(g.ctx, buffer.k, view(rows.k), cells));
  g.add(ggml_set_rows(g.ctx, buffer.v, view(rows.v), cells));
  if (!kv_only) {
    const model::HParams& hp = model_.hparams();
    ggml_tensor* q = ggml_reshape_3d(g.ctx, view(rows.q), hp.head_dim, hp.n_head, piece.n_rows);
    g.add(q);
    // Nobody observes a layer here, so that any will do.
    ggml_tensor* attended = attention->build(g.ctx, 0, q, buffer.k, buffer.v, nullptr);
    g.add(ggml_cpy(g.ctx, attended, view(rows.q)));
  }
  return stage_.graphs().compute(g);
}

Result<ggml_tensor*> LayerGraphs::output(const RowGroup& group, const Output& output) {
  const bool last = output.layer == last_layer();
  if (last && output.wanted.empty()) return nullptr;
  const Graph g(stage_.graphs(), n_nodes());
  const GroupRows& rows = rows_of(group);
  int64_t n = group.n_padded;
  ggml_tensor* x = step_rows(g, group.first_row, n);
  ggml_tensor* attended = ggml_view_2d(g.ctx, rows.q, rows.q->ne[0], n, rows.q->nb[1], 0);
  if (last) {
    n = static_cast<int64_t>(output.wanted.size());
    stage_.graphs().set(stage_.output_rows(), output.wanted);
    ggml_tensor* wanted = ggml_view_1d(g.ctx, stage_.output_rows(), n, 0);
    attended = ggml_get_rows(g.ctx, attended, wanted);
    x = ggml_get_rows(g.ctx, x, wanted);
  }
  ggml_tensor* made =
      output.attention_only
          ? model::build_attention_output(g.ctx, model_, output.layer, x, nullptr, attended)
          : model::build_layer_output(g.ctx, model_, output.layer, x,
                                      model::build_hidden(g.ctx, model_, output.layer, x),
                                      attended);
  ggml_tensor* logits = nullptr;
  if (last && !output.attention_only) {
    logits = model::build_logits(g.ctx, model_, made);
    ggml_set_output(logits);
    g.add(logits);
  } else {
    g.add(ggml_cpy(g.ctx, made, step_rows(g, group.first_row, n)));
  }
  HCACHE_RETURN_IF_ERROR(stage_.graphs().compute(g));
  return logits;
}

ggml_tensor* LayerGraphs::step_rows(const Graph& g, int64_t first_row, int64_t n_rows) const {
  return ggml_view_2d(g.ctx, rows_, rows_->ne[0], n_rows, rows_->nb[1],
                      static_cast<size_t>(first_row) * rows_->nb[1]);
}

Status LayerGraphs::feed_forward(int layer, int64_t first_row, int64_t n_rows) {
  const Graph g(stage_.graphs(), n_nodes());
  ggml_tensor* x = step_rows(g, first_row, n_rows);
  g.add(ggml_cpy(g.ctx, model::build_feed_forward(g.ctx, model_, layer, x), x));
  return stage_.graphs().compute(g);
}

Result<ggml_tensor*> LayerGraphs::finish(const std::vector<int32_t>& rows) {
  stage_.graphs().set(stage_.output_rows(), rows);
  const Graph g(stage_.graphs(), n_nodes());
  ggml_tensor* wanted =
      ggml_view_1d(g.ctx, stage_.output_rows(), static_cast<int64_t>(rows.size()), 0);
  ggml_tensor* x = ggml_get_rows(g.ctx, rows_, wanted);
  ggml_tensor* logits =
      model::build_logits(g.ctx, model_, model::build_feed_forward(g.ctx, model_, last_layer(), x));
  ggml_set_output(logits);
  g.add(logits);
  HCACHE_RETURN_IF_ERROR(stage_.graphs().compute(g));
  return logits;
}

}  // namespace hcache::engine
