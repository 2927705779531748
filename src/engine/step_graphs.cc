#include "step_graphs.h"

namespace hcache::engine {
namespace {

constexpr int kNodesPerLayer = 96;    // upper bound, without ggml's attention
constexpr int kNodesPerSegment = 16;  // of ggml's attention, per layer
constexpr int kNodesPerExpert = 4;    // that is used
constexpr int kNodesPerAdapter = 80;  // per layer

}  // namespace

Result<StepOutputs> StepGraphs::run(Stage& stage, const StepState& step, int begin, int end,
                                    bool kv_only_last, model::LayerPart part) {
  const Key key = {.begin = begin,
                   .end = end,
                   .n_rows = step.n_rows,
                   .n_outputs = step.output_rows.size(),
                   .n_logits = step.n_logits,
                   .kv_only_last = kv_only_last,
                   .part = part,
                   .capture = !step.capture.empty(),
                   .x_size = step.x.size(),
                   .adapters = step.adapters};
  Last& last = last_[stage.index()];
  GraphRunner& graphs = stage.graphs();
  const uint64_t attention = stage.attention_layout();
  if (last.graph == nullptr || last.n_allocated != graphs.n_allocated() || !(last.key == key) ||
      last.attention != attention) {
    last.graph.reset();
    auto g = std::make_unique<Graph>(graphs, most_nodes(stage, step, end - begin));
    Range range = {.stage = stage,
                   .g = *g,
                   .step = step,
                   .begin = begin,
                   .end = end,
                   .kv_only_last = kv_only_last,
                   .part = part,
                   .n_x = static_cast<int64_t>(step.x.size()) / model_.hparams().n_embd};
    add_inputs(range);
    const StepOutputs outputs = build(range);
    HCACHE_RETURN_IF_ERROR(graphs.allocate(*g));
    last = {std::move(g), key, graphs.n_allocated(), attention, outputs};
  }
  const StepOutputs outputs = last.outputs;
  HCACHE_RETURN_IF_ERROR(graphs.run(*last.graph));
  return outputs;
}

Result<ggml_tensor*> StepGraphs::run_piece(Stage& stage, const StepState& step, int layer,
                                           Piece piece, bool kv_only) {
  const Graph g(stage.graphs(), most_nodes(stage, step, 1));
  const bool sums_wanted = is_last(layer) && piece != Piece::kAttention;
  Range range = {.stage = stage,
                 .g = g,
                 .step = step,
                 .begin = layer,
                 .end = layer + 1,
                 .kv_only_last = kv_only,
                 .n_x = sums_wanted
                            ? static_cast<int64_t>(step.output_rows.size())
                            : static_cast<int64_t>(step.x.size()) / model_.hparams().n_embd};
  add_inputs(range);
  ggml_tensor* made = build_piece(range, piece);
  if (made != nullptr) {
    ggml_set_output(made);
    g.add(made);
  }
  HCACHE_RETURN_IF_ERROR(stage.graphs().compute(g));
  return made;
}

void StepGraphs::add_inputs(Range& range) {
  ggml_context* ctx = range.g.ctx;
  const int64_t n = range.step.n_rows;
  range.positions = ggml_view_1d(ctx, range.stage.positions(), n, 0);
  range.order = range.stage.order(ctx, n);
  for (size_t i = 0; i < range.step.adapters.size(); ++i) {
    ggml_tensor* all = range.stage.adapter_scales();
    const size_t row_bytes = static_cast<size_t>(n) * sizeof(float);
    ggml_tensor* scales = nullptr;
    ggml_tensor* wanted = nullptr;
    if (range.step.adapters[i]) {
      scales = ggml_view_2d(ctx, all, 1, n, sizeof(float), i * row_bytes);
      if (!range.step.output_rows.empty()) wanted = wanted_rows(range, scales);
    }
    range.adapters.push_back(scales);
    range.wanted_adapters.push_back(wanted);
  }
}

size_t StepGraphs::most_nodes(Stage& stage, const StepState& step, int n_layers) {
  const bool own_attention = stage.attention(0).ours();
  const auto n_experts = static_cast<size_t>(stage.model().hparams().n_expert_used);
  return static_cast<size_t>(n_layers) *
             (kNodesPerLayer + kNodesPerExpert * n_experts +
              kNodesPerAdapter * step.adapters.size() +
              (own_attention ? 0 : kNodesPerSegment) * step.segments.size()) +
         64;
}

ggml_tensor* StepGraphs::build_piece(const Range& range, Piece piece) {
  ggml_context* ctx = range.g.ctx;
  const model::Model& part = range.stage.model();
  const int layer = range.begin;
  ggml_tensor* x = kept_rows(range, range.n_x);
  if (piece == Piece::kLogits) return model::build_logits(ctx, part, x);
  if (piece == Piece::kFeedForward) return model::build_feed_forward(ctx, part, layer, x);
  ggml_tensor* hidden = model::build_hidden(ctx, part, layer, x);
  build_kv(range, layer, hidden);
  if (range.kv_only_last) return nullptr;
  ggml_tensor* attention = build_attention(range, layer, hidden);
  if (is_last(layer)) {
    attention = wanted_rows(range, attention);
    x = wanted_rows(range, x);
    hidden = wanted_rows(range, hidden);
  }
  return model::build_attention_output(ctx, part, layer, x, hidden, attention);
}

void StepGraphs::forget_last() {
  for (Last& last : last_) last.graph.reset();
}

StepOutputs StepGraphs::build(const Range& range) {
  const Graph& g = range.g;
  const StepState& step = range.step;
  if (range.part == model::LayerPart::kFeedForward) {
    return build_feed_forward_half(range, range.begin);
  }
  ggml_tensor* cur = kept_rows(range, range.n_x);
  for (int layer = range.begin; layer < range.end; ++layer) {
    const bool last = is_last(layer);
    ggml_tensor* hidden = model::build_hidden(g.ctx, model_, layer, cur);
    build_kv(range, layer, hidden);
    // Rows nobody wants logits of need no more than their K and V in the last layer.
    if (range.ends_with_kv_of(layer) || (last && step.output_rows.empty())) continue;
    ggml_tensor* attention = build_attention(range, layer, hidden);
    if (range.part == model::LayerPart::kAttention) {
      build_attention_half(range, layer, cur, attention);
      continue;
    }
    if (last) return build_last_layer(range, layer, cur, hidden, attention);
    cur = model::build_layer_output(g.ctx, model_, layer, cur, hidden, attention, range.adapters);
    if (layer == range.end - 1) {
      g.add(ggml_cpy(g.ctx, cur, kept_rows(range, step.n_rows)));
    }
  }
  return {};
}

ggml_tensor* StepGraphs::kept_rows(const Range& range, int64_t n) {
  ggml_tensor* rows = range.stage.rows();
  return ggml_view_2d(range.g.ctx, rows, rows->ne[0], n, rows->nb[1], 0);
}

// Behind the last layer's attention the wanted rows alone go on.
void StepGraphs::build_attention_half(const Range& range, int layer, ggml_tensor* x,
                                      ggml_tensor* attention) {
  ggml_context* ctx = range.g.ctx;
  const bool last = is_last(layer);
  int64_t n = range.step.n_rows;
  if (last) {
    n = static_cast<int64_t>(range.step.output_rows.size());
    attention = wanted_rows(range, attention);
    x = wanted_rows(range, x);
  }
  ggml_tensor* rows = model::build_attention_output(ctx, model_, layer, x, nullptr, attention,
                                                    last ? range.wanted_adapters : range.adapters);
  range.g.add(ggml_cpy(ctx, rows, kept_rows(range, n)));
}

StepOutputs StepGraphs::build_feed_forward_half(const Range& range, int layer) {
  ggml_context* ctx = range.g.ctx;
  const bool last = is_last(layer);
  ggml_tensor* rows = kept_rows(
      range, last ? static_cast<int64_t>(range.step.output_rows.size()) : range.step.n_rows);
  ggml_tensor* out = model::build_feed_forward(ctx, model_, layer, rows,
                                               last ? range.wanted_adapters : range.adapters);
  if (!last) {
    range.g.add(ggml_cpy(ctx, out, rows));
    return {};
  }
  return build_outputs(range, out);
}

ggml_tensor* StepGraphs::capture(const Range& range, ggml_type type, ggml_tensor* rows,
                                 int64_t offset) {
  ggml_tensor* target =
      tap_.tensor(range.g.ctx, range.stage, range.step, type, rows->ne[0], offset);
  ggml_tensor* written = ggml_set_rows(range.g.ctx, target, rows, range.order);
  range.g.add(written);
  return written;
}

void StepGraphs::build_kv(const Range& range, int layer, ggml_tensor* hidden) {
  ggml_context* ctx = range.g.ctx;
  Stage& stage = range.stage;
  const StepState& step = range.step;
  const model::Model& model = stage.model();
  const model::Device& device = stage.device();
  const model::LayerWeights& w = model.weights().layers[layer];
  const CapturedLayer* captured = step.capture.empty() ? nullptr : &step.capture[layer];
  // What this device writes of it.
  const CapturedLayer* own = CaptureTap::layout(stage, step, layer);
  ggml_tensor* input = hidden;
  if (own != nullptr && own->hidden_offset >= 0) {
    ggml_tensor* saved = capture(range, own->hidden_type, hidden, own->hidden_offset);
    // Project exactly what is saved: it is what the product would have converted to anyway.
    if (device.is_cpu() && own->hidden_type == types_.native(layer)) input = saved;
  }
  // Restoration projects rows by the hundred; the same kernel must have computed them here. What is
  // not saved of layer 0 is projected from the tokens' embeddings.
  const bool projected_later = captured != nullptr && (captured->hidden_offset >= 0 ||
                                                       (layer == 0 && captured->k_offset < 0));
  const bool tail = range.ends_with_kv_of(layer);
  const bool padded = (projected_later || tail) && range.n_x < types_.least_rows(device, layer);
  if (padded) input = hidden;
  const model::Product product =
      padded ? HiddenTypes::padded_product(device) : model::build_product;
  const auto of = [&](bool is_k) {
    return step.token_rows.empty() ? product : table_.through(stage, step, is_k, product);
  };
  ggml_tensor* k =
      model::build_k(ctx, model, layer, HiddenTypes::product_input(ctx, device, w.k.w, input),
                     range.positions, of(true), range.adapters);
  ggml_tensor* v =
      model::build_v(ctx, model, layer, HiddenTypes::product_input(ctx, device, w.v.w, input),
                     of(false), range.adapters);

  const int64_t n = step.n_rows;
  const int64_t width = model.hparams().n_embd_kv();
  ggml_tensor* cells = ggml_view_1d(ctx, stage.cells(sequences_.group_of(layer)), n, 0);
  range.g.add(cells);
  // Rotation, view and writing next to each other are one kernel on CUDA.
  k = ggml_view_2d(ctx, k, width, n, ggml_row_size(k->type, width), 0);
  v = ggml_reshape_2d(ctx, v, width, n);
  range.g.add(ggml_set_rows(ctx, stage.arena().k(layer), k, cells));
  range.g.add(ggml_set_rows(ctx, stage.arena().v(layer), v, cells));
  if (own != nullptr && own->k_offset >= 0) {
    capture(range, options_.kv_type, k, own->k_offset);
    capture(range, options_.kv_type, v, own->v_offset);
  }
}

ggml_tensor* StepGraphs::build_attention(const Range& range, int layer, ggml_tensor* hidden) {
  Stage& stage = range.stage;
  ggml_tensor* q =
      model::build_q(range.g.ctx, stage.model(), layer, hidden, range.positions, range.adapters);
  range.g.add(q);
  return stage.attention(sequences_.group_of(layer))
      .build(range.g.ctx, layer, q, stage.arena().k(layer), stage.arena().v(layer),
             stage.model().weights().layers[layer].sinks);
}

ggml_tensor* StepGraphs::wanted_rows(const Range& range, ggml_tensor* rows) {
  ggml_context* ctx = range.g.ctx;
  return ggml_get_rows(ctx, rows,
                       ggml_view_1d(ctx, range.stage.output_rows(),
                                    static_cast<int64_t>(range.step.output_rows.size()), 0));
}

// Of the wanted rows alone.
StepOutputs StepGraphs::build_last_layer(const Range& range, int layer, ggml_tensor* x,
                                         ggml_tensor* hidden, ggml_tensor* attention) {
  ggml_context* ctx = range.g.ctx;
  attention = wanted_rows(range, attention);
  x = wanted_rows(range, x);
  hidden = wanted_rows(range, hidden);
  ggml_tensor* out =
      model::build_layer_output(ctx, model_, layer, x, hidden, attention, range.wanted_adapters);
  return build_outputs(range, out);
}

StepOutputs StepGraphs::build_outputs(const Range& range, ggml_tensor* rows) {
  ggml_context* ctx = range.g.ctx;
  const auto n_logits = static_cast<int64_t>(range.step.n_logits);
  const int64_t n_hidden = rows->ne[1] - n_logits;
  const auto part_of = [ctx](ggml_tensor* of, int64_t first, int64_t n) {
    if (of == nullptr || n == of->ne[1]) return of;
    return ggml_view_2d(ctx, of, of->ne[0], n, of->nb[1], static_cast<size_t>(first) * of->nb[1]);
  };
  StepOutputs outputs;
  if (n_logits > 0) {
    std::vector<ggml_tensor*> adapters;
    for (ggml_tensor* scales : range.wanted_adapters) {
      adapters.push_back(part_of(scales, 0, n_logits));
    }
    outputs.logits = model::build_logits(ctx, model_, part_of(rows, 0, n_logits), adapters);
  }
  if (n_hidden > 0) {
    outputs.hidden = model::build_output_norm(ctx, model_, part_of(rows, n_logits, n_hidden));
  }
  for (ggml_tensor* output : {outputs.logits, outputs.hidden}) {
    if (output == nullptr) continue;
    ggml_set_output(output);
    range.g.add(output);
  }
  return outputs;
}

}  // namespace hcache::engine
