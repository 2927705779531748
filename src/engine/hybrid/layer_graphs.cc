#include "layer_graphs.h"

#include <algorithm>

#include "hidden_rows.h"
#include "kv_arena.h"

namespace hcache::engine {
namespace {

constexpr size_t kNodes = 128;            // of a layer, without ggml's attention
constexpr size_t kNodesPerSegment = 16;   // of ggml's attention
constexpr size_t kNodesPerChunk = 32;     // of generating K and V
constexpr size_t kNodesPerCopy = 4;       // of a device block's page
constexpr size_t kCaptureAlignment = 64;  // of the captured parts

}  // namespace

Status LayerGraphs::allocate(const Capacity& capacity) {
  capacity_ = capacity;
  inputs_.open(3);
  ggml_context* ctx = inputs_.ctx();
  const int64_t n_act = capacity.buffer_tokens + capacity.least_rows;
  act_positions_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n_act);
  act_cells_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, n_act);
  cells_ = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, capacity.max_batch_rows);
  return inputs_.allocate(stage_.device().buffer_type(), "a mini-batch's inputs");
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
  const model::Product product = types_.product(model_.device(layer));
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
                       positions, product));
    put(buffer.v,
        model::build_v(g.ctx, model_, layer,
                       HiddenTypes::product_input(g.ctx, model_.device(layer), w.v.w, rows),
                       product));
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

// Positions, cells and segments of the piece's rows, unless the last graph had the same.
Status LayerGraphs::set_piece(const Forward& forward) {
  const Piece& piece = *forward.piece;
  if (inputs_of_ != piece.index) {
    std::vector<int32_t> positions(piece.n_padded, 0);
    std::vector<int64_t> cells(piece.n_padded);
    for (const RowRange& range : piece.ranges) {
      const int64_t first_cell = forward.batch->members[range.member].first_cell;
      for (int r = 0; r < range.n_rows; ++r) {
        positions[range.first_row + r] = static_cast<int32_t>(range.first_pos + r);
        cells[range.first_row + r] = first_cell + range.first_pos + r;
      }
    }
    for (int r = piece.n_rows; r < piece.n_padded; ++r) {
      cells[r] = capacity_.pad_cell + (r - piece.n_rows);
    }
    stage_.graphs().set(stage_.positions(), positions);
    stage_.graphs().set(cells_, cells);
    inputs_of_ = piece.index;
  }
  while (static_cast<int>(attention_.size()) <= piece.index) {
    attention_.push_back(std::make_unique<AttentionOp>(model_.hparams(), stage_.graphs(),
                                                       own_attention_, stage_.engine_options(),
                                                       stage_.arena().row_bytes()));
  }
  if (!forward.wanted.empty()) stage_.graphs().set(stage_.output_rows(), forward.wanted);
  return attention_[piece.index]->set_batch(
      attention_segments(*forward.batch, piece, capacity_.pad_cell));
}

void LayerGraphs::capture(const Graph& g, const Forward& forward, ggml_type type, ggml_tensor* rows,
                          int64_t offset, ggml_tensor** written) {
  const int64_t n = forward.piece->n_padded;
  ggml_tensor* target = tensor_in_block(g.ctx, forward.capture, offset, type, rows->ne[0], n);
  *written = ggml_set_rows(g.ctx, target, rows, stage_.order(g.ctx, n));
  g.add(*written);
}

// Adds K and V of the new rows to the buffer, and what is captured of them.
ggml_tensor* LayerGraphs::build_kv(const Graph& g, const Forward& forward, BatchBuffer& buffer,
                                   ggml_tensor* hidden) {
  const int layer = forward.layer;
  const model::LayerWeights& w = model_.weights().layers[layer];
  ggml_tensor* positions = ggml_view_1d(g.ctx, stage_.positions(), forward.piece->n_padded, 0);
  ggml_tensor* input = hidden;
  if (forward.capture != nullptr && forward.layout.act_offset >= 0) {
    ggml_tensor* saved = nullptr;
    capture(g, forward, types_.native(layer), hidden, forward.layout.act_offset, &saved);
    // Project exactly what is kept: it is what the product would have converted to anyway.
    if (stage_.device().is_cpu()) input = saved;
  }
  ggml_tensor* k = model::build_k(
      g.ctx, model_, layer, HiddenTypes::product_input(g.ctx, model_.device(layer), w.k.w, input),
      positions);
  ggml_tensor* v = model::build_v(
      g.ctx, model_, layer, HiddenTypes::product_input(g.ctx, model_.device(layer), w.v.w, input));
  const int64_t n = forward.piece->n_padded;
  const int64_t width = model_.hparams().n_embd_kv();
  ggml_tensor* cells = ggml_view_1d(g.ctx, cells_, n, 0);
  k = ggml_reshape_2d(g.ctx, k, width, n);
  v = ggml_reshape_2d(g.ctx, v, width, n);
  g.add(ggml_set_rows(g.ctx, buffer.k, k, cells));
  g.add(ggml_set_rows(g.ctx, buffer.v, v, cells));
  if (forward.capture != nullptr && forward.layout.k_offset >= 0) {
    ggml_tensor* unused = nullptr;
    capture(g, forward, buffer.k->type, k, forward.layout.k_offset, &unused);
    capture(g, forward, buffer.v->type, v, forward.layout.v_offset, &unused);
  }
  return positions;
}

// Of the wanted rows alone; a row may stand there twice, for the kernel that takes many.
ggml_tensor* LayerGraphs::build_outputs(const Graph& g, const Forward& forward, ggml_tensor* x,
                                        ggml_tensor* hidden, ggml_tensor* attention) {
  ggml_tensor* wanted =
      ggml_view_1d(g.ctx, stage_.output_rows(), static_cast<int64_t>(forward.wanted.size()), 0);
  attention = ggml_get_rows(g.ctx, attention, wanted);
  x = ggml_get_rows(g.ctx, x, wanted);
  hidden = ggml_get_rows(g.ctx, hidden, wanted);
  ggml_tensor* logits = model::build_logits(
      g.ctx, model_, model::build_layer_output(g.ctx, model_, forward.layer, x, hidden, attention));
  ggml_set_output(logits);
  g.add(logits);
  return logits;
}

ggml_tensor* LayerGraphs::step_rows(const Graph& g, int64_t first_row, int64_t n_rows) const {
  return ggml_view_2d(g.ctx, rows_, rows_->ne[0], n_rows, rows_->nb[1],
                      static_cast<size_t>(first_row) * rows_->nb[1]);
}

// Behind the last layer's attention the wanted rows alone go on.
void LayerGraphs::keep_attention(const Graph& g, const Forward& forward, ggml_tensor* x,
                                 ggml_tensor* attention) {
  ggml_tensor* input = x;
  int64_t n = forward.piece->n_padded;
  if (forward.layer == last_layer()) {
    n = static_cast<int64_t>(forward.wanted.size());
    ggml_tensor* wanted = ggml_view_1d(g.ctx, stage_.output_rows(), n, 0);
    attention = ggml_get_rows(g.ctx, attention, wanted);
    input = ggml_get_rows(g.ctx, x, wanted);
  }
  ggml_tensor* rows =
      model::build_attention_output(g.ctx, model_, forward.layer, input, nullptr, attention);
  g.add(ggml_cpy(g.ctx, rows, step_rows(g, forward.piece->row_offset, n)));
}

Status LayerGraphs::feed_forward(int layer, int64_t first_row, int64_t n_rows) {
  const Graph g(stage_.graphs(), kNodes);
  ggml_tensor* x = step_rows(g, first_row, n_rows);
  g.add(ggml_cpy(g.ctx, model::build_feed_forward(g.ctx, model_, layer, x), x));
  return stage_.graphs().compute(g);
}

Result<ggml_tensor*> LayerGraphs::finish(const std::vector<int32_t>& rows) {
  stage_.graphs().set(stage_.output_rows(), rows);
  const Graph g(stage_.graphs(), kNodes);
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

Result<ggml_tensor*> LayerGraphs::forward(BatchBuffer& buffer, const Forward& forward) {
  HCACHE_RETURN_IF_ERROR(set_piece(forward));
  const Piece& piece = *forward.piece;
  const bool last = forward.layer == last_layer();
  const Graph g(stage_.graphs(),
                kNodes + (own_attention_ ? 0 : kNodesPerSegment * (piece.ranges.size() + 1)));
  ggml_tensor* x = step_rows(g, piece.row_offset, piece.n_padded);
  ggml_tensor* hidden = model::build_hidden(g.ctx, model_, forward.layer, x);
  ggml_tensor* positions = build_kv(g, forward, buffer, hidden);
  ggml_tensor* logits = nullptr;
  // Rows nobody wants logits of need no more than their K and V in the last layer.
  if (!forward.kv_only && (!last || !forward.wanted.empty())) {
    ggml_tensor* q = model::build_q(g.ctx, model_, forward.layer, hidden, positions);
    g.add(q);
    ggml_tensor* attention = attention_[piece.index]->build(g.ctx, q, buffer.k, buffer.v);
    if (forward.attention_only) {
      keep_attention(g, forward, x, attention);
    } else if (last) {
      logits = build_outputs(g, forward, x, hidden, attention);
    } else {
      ggml_tensor* out =
          model::build_layer_output(g.ctx, model_, forward.layer, x, hidden, attention);
      g.add(ggml_cpy(g.ctx, out, x));
    }
  }
  HCACHE_RETURN_IF_ERROR(stage_.graphs().compute(g));
  return logits;
}

}  // namespace hcache::engine
