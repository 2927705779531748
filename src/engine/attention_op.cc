#include "attention_op.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

namespace hcache::engine {
namespace {

// From this many rows on ggml's CPU kernel runs tiled, and a row's result is then independent of
// the others; shorter prefill pieces are padded up to it.
constexpr int64_t kTiledRows = 64;

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

bool same_segment(const AttentionSegment& a, const AttentionSegment& b) {
  return a.first_row == b.first_row && a.n_rows == b.n_rows && a.first_cell == b.first_cell &&
         a.n_past == b.n_past;
}

}  // namespace

AttentionOp::AttentionOp(const model::Model& model, GraphRunner& graphs, bool ours,
                         const EngineOptions& options, size_t kv_row_bytes, int64_t window)
    : graphs_(graphs), has_sinks_(model.spec().sinks) {
  const model::HParams& hp = model.hparams();
  tiled_ = graphs.device().may_use_cpu_kernels();
  const size_t alignment = graphs.device().read_alignment();
  view_cells_ = static_cast<int64_t>(alignment / std::gcd(alignment, kv_row_bytes));
  shape_ = {.n_head = hp.n_head,
            .n_head_kv = hp.n_head_kv,
            .head_dim_k = hp.head_dim,
            .head_dim_v = hp.head_dim,
            .scale = hp.attention_scale,
            .soft_cap = hp.attention_soft_cap,
            .window = window};
  if (ours) {
    plan_ = std::make_unique<AttentionPlan>(shape_, graphs.device().n_threads());
    calls_.assign(static_cast<size_t>(hp.n_layer), {.plan = plan_.get(), .observed = {}});
  } else {
    flash_ = options.attention != AttentionKind::kScores && has_flash_attention(options.kv_type);
  }
}

AttentionOp::~AttentionOp() { ggml_backend_buffer_free(mask_buffer_); }

Status AttentionOp::set_batch(std::span<const AttentionSegment> segments) {
  // The layer ranges of one step share what the first of them set up.
  if (std::equal(segments.begin(), segments.end(), segments_.begin(), segments_.end(),
                 same_segment)) {
    return {};
  }
  segments_.assign(segments.begin(), segments.end());
  if (plan_ != nullptr) {
    graphs_.synchronize();  // the plan belongs to a graph that runs
    plan_->set_batch(segments_);
    return {};
  }
  std::vector<Layout> layouts;
  for (const AttentionSegment& s : segments_) layouts.push_back(layout_of(s));
  if (layouts != layouts_) {
    if (Status status = make_masks(std::move(layouts)); !status.ok()) {
      segments_.clear();
      layouts_.clear();
      return status;
    }
  }
  upload_masks();
  return {};
}

AttentionOp::Layout AttentionOp::layout_of(const AttentionSegment& s) const {
  const bool prefill = s.n_rows > 1;
  const int64_t lead = s.first_cell % view_cells_;
  // A sink is a head's, and packed rows are of several.
  const int group = prefill && tiled_ && !has_sinks_ ? shape_.n_head / shape_.n_head_kv : 1;
  const int64_t n_rows = static_cast<int64_t>(s.n_rows) * group;
  return {.first_row = s.first_row,
          .n_queries = s.n_rows,
          .first_cell = s.first_cell - lead,
          .n_kv = round_up(lead + s.n_past + s.n_rows, kKvPadding),
          .group = group,
          .n_rows = prefill && tiled_ ? std::max(n_rows, kTiledRows) : n_rows};
}

Status AttentionOp::make_masks(std::vector<Layout> layouts) {
  ++layout_;
  layouts_ = std::move(layouts);
  mask_tensors_ = std::make_unique<Graph>(graphs_, layouts_.size());
  masks_.clear();
  size_t n_bytes = 0;
  const size_t alignment = ggml_backend_buft_get_alignment(graphs_.device().buffer_type());
  for (const Layout& layout : layouts_) {
    masks_.push_back(
        ggml_new_tensor_2d(mask_tensors_->ctx, GGML_TYPE_F16, layout.n_kv, layout.n_rows));
    n_bytes +=
        round_up(static_cast<int64_t>(ggml_nbytes(masks_.back())), static_cast<int64_t>(alignment));
  }
  if (n_bytes > mask_capacity_) {
    graphs_.synchronize();
    ggml_backend_buffer_free(mask_buffer_);
    mask_capacity_ = 0;
    mask_buffer_ = ggml_backend_buft_alloc_buffer(graphs_.device().buffer_type(), n_bytes);
    if (mask_buffer_ == nullptr) {
      return resource_exhausted(
          fmt::format("no {} bytes of device memory for attention masks", n_bytes));
    }
    mask_capacity_ = n_bytes;
  }

  auto* base = static_cast<std::byte*>(ggml_backend_buffer_get_base(mask_buffer_));
  size_t offset = 0;
  for (ggml_tensor* mask : masks_) {
    if (ggml_backend_tensor_alloc(mask_buffer_, mask, base + offset) != GGML_STATUS_SUCCESS) {
      return internal_error("attention mask does not fit its buffer");
    }
    offset += round_up(static_cast<int64_t>(ggml_nbytes(mask)), static_cast<int64_t>(alignment));
  }
  return {};
}

void AttentionOp::upload_masks() {
  const ggml_fp16_t zero = ggml_fp32_to_fp16(0.0F);
  const ggml_fp16_t hidden = ggml_fp32_to_fp16(-INFINITY);
  for (size_t i = 0; i < masks_.size(); ++i) {
    const Layout& layout = layouts_[i];
    const AttentionSegment& s = segments_[i];
    const int64_t lead = s.first_cell - layout.first_cell;
    // Padding rows see the first key alone, so that no row is fully masked.
    std::vector<ggml_fp16_t> values(static_cast<size_t>(layout.n_kv * layout.n_rows), hidden);
    for (int64_t row = 0; row < layout.n_rows; ++row) {
      const int64_t token = row / layout.group;
      const int64_t end = token < s.n_rows ? s.n_past + token + 1 : 1;
      const int64_t begin = shape_.window > 0 ? std::max<int64_t>(0, end - shape_.window) : 0;
      std::fill_n(values.begin() + row * layout.n_kv + lead + begin, end - begin, zero);
    }
    // In the compute queue, behind graphs that still read the masks of another step.
    graphs_.set(masks_[i], values);
  }
}

void AttentionOp::observe(int layer, const AttentionObservation& observed) {
  calls_.at(static_cast<size_t>(layer)).observed = observed;
}

ggml_tensor* AttentionOp::build(ggml_context* ctx, int layer, ggml_tensor* q, ggml_tensor* k_arena,
                                ggml_tensor* v_arena, ggml_tensor* sinks) {
  if (plan_ == nullptr) return build_ggml(ctx, q, k_arena, v_arena, sinks);
  std::array<ggml_tensor*, 4> args = {q, k_arena, v_arena, sinks};
  return ggml_custom_4d(ctx, GGML_TYPE_F32, q->ne[0] * q->ne[1], q->ne[2], 1, 1, args.data(),
                        sinks == nullptr ? 3 : 4, run_custom, GGML_N_TASKS_MAX,
                        &calls_[static_cast<size_t>(layer)]);
}

void AttentionOp::run_custom(ggml_tensor* dst, int ith, int nth, void* userdata) {
  const ggml_tensor* q = dst->src[0];
  const ggml_tensor* k = dst->src[1];
  const ggml_tensor* v = dst->src[2];
  const AttentionTensors tensors = {
      .q = static_cast<const float*>(q->data),
      .q_stride = q->nb[2],
      .k = k->data,
      .k_stride = k->nb[1],
      .v = v->data,
      .v_stride = v->nb[1],
      .out = static_cast<float*>(dst->data),
      .out_stride = dst->nb[1],
      .sinks = dst->src[3] == nullptr ? nullptr : static_cast<const float*>(dst->src[3]->data)};
  const auto* call = static_cast<const Call*>(userdata);
  call->plan->run(tensors, ith, nth, call->observed);
}

bool AttentionOp::has_flash_attention(ggml_type kv_type) const {
  const Graph g(graphs_, 8);
  const int64_t dim = shape_.head_dim_k;
  const int n_head = has_sinks_ ? shape_.n_head : shape_.n_head_kv;
  ggml_tensor* q = ggml_new_tensor_3d(g.ctx, GGML_TYPE_F32, dim, kTiledRows, n_head);
  ggml_tensor* kv = ggml_new_tensor_3d(g.ctx, kv_type, dim, kKvPadding, shape_.n_head_kv);
  ggml_tensor* mask = ggml_new_tensor_2d(g.ctx, GGML_TYPE_F16, kKvPadding, kTiledRows);
  ggml_tensor* out =
      ggml_flash_attn_ext(g.ctx, q, kv, kv, mask, shape_.scale, 0.0F, shape_.soft_cap);
  if (has_sinks_) {
    ggml_flash_attn_ext_add_sinks(out, ggml_new_tensor_1d(g.ctx, GGML_TYPE_F32, shape_.n_head));
  }
  return ggml_backend_supports_op(graphs_.device().compute(), out);
}

// Devices have flash attention for some sizes of heads alone (CUDA: 64, 80, 96, 128, ...):
// elsewhere the scores are computed in full.
ggml_tensor* AttentionOp::attend(ggml_context* ctx, ggml_tensor* q, const Attended& to) const {
  if (flash_) {
    ggml_tensor* out =
        ggml_flash_attn_ext(ctx, q, to.k, to.v, to.mask, shape_.scale, 0.0F, shape_.soft_cap);
    ggml_prec_set_acc(out, GGML_PREC_F32);  // half precision is not enough for every model
    ggml_flash_attn_ext_add_sinks(out, to.sinks);
    return out;
  }
  ggml_tensor* scores = ggml_mul_mat(ctx, to.k, q);
  ggml_prec_set_acc(scores, GGML_PREC_F32);
  float scale = shape_.scale;
  if (shape_.soft_cap > 0) {
    scores = ggml_tanh(ctx, ggml_scale(ctx, scores, scale / shape_.soft_cap));
    scale = shape_.soft_cap;
  }
  scores = ggml_soft_max_ext(ctx, scores, to.mask, scale, 0.0F);
  ggml_soft_max_add_sinks(scores, to.sinks);
  ggml_tensor* v = to.v;
  if (ggml_is_quantized(v->type)) v = ggml_cast(ctx, v, GGML_TYPE_F32);
  ggml_tensor* out = ggml_mul_mat(ctx, ggml_cont(ctx, ggml_transpose(ctx, v)), scores);
  return ggml_cont(ctx, ggml_permute(ctx, out, 0, 2, 1, 3));
}

// One attention per sequence on views of its extent.
ggml_tensor* AttentionOp::build_ggml(ggml_context* ctx, ggml_tensor* q, ggml_tensor* k_arena,
                                     ggml_tensor* v_arena, ggml_tensor* sinks) {
  const int64_t dim = shape_.head_dim_k;
  ggml_tensor* result = nullptr;
  for (size_t i = 0; i < layouts_.size(); ++i) {
    const Layout& layout = layouts_[i];
    const auto arena_view = [&](ggml_tensor* arena) {
      return ggml_view_3d(ctx, arena, dim, layout.n_kv, shape_.n_head_kv, arena->nb[1],
                          ggml_row_size(arena->type, dim),
                          static_cast<size_t>(layout.first_cell) * arena->nb[1]);
    };
    ggml_tensor* queries = ggml_view_3d(ctx, q, dim, shape_.n_head, layout.n_queries, q->nb[1],
                                        q->nb[2], static_cast<size_t>(layout.first_row) * q->nb[2]);
    const Attended to = {
        .k = arena_view(k_arena), .v = arena_view(v_arena), .mask = masks_[i], .sinks = sinks};
    ggml_tensor* out = nullptr;
    if (layout.n_rows == layout.n_queries) {
      out = attend(ctx, ggml_permute(ctx, queries, 0, 2, 1, 3), to);
      out = ggml_reshape_2d(ctx, out, dim * shape_.n_head, layout.n_queries);
    } else {
      out = attend_packed(ctx, layout, queries, to);
    }
    result = result == nullptr ? out : ggml_concat(ctx, result, out, 1);
  }
  return result;
}

// In prefill on CPUs the query heads that share a KV head are packed as rows of one head, which
// changes no bit of the tiled kernel's result.
ggml_tensor* AttentionOp::attend_packed(ggml_context* ctx, const Layout& layout, ggml_tensor* q,
                                        const Attended& to) const {
  const int64_t dim = shape_.head_dim_k;
  const int64_t n = layout.n_queries;
  const int64_t group = layout.group;
  const int64_t packed_heads = shape_.n_head / group;
  // [dim, group, packed_heads, rows] -> [dim, group * rows, packed_heads]
  ggml_tensor* packed = ggml_cont(ctx, q);
  packed = ggml_reshape_4d(ctx, packed, dim, group, packed_heads, n);
  packed = ggml_cont(ctx, ggml_permute(ctx, packed, 0, 1, 3, 2));
  packed = ggml_reshape_3d(ctx, packed, dim, group * n, packed_heads);
  const int64_t padding = layout.n_rows - group * n;
  if (padding > 0) packed = ggml_pad(ctx, packed, 0, static_cast<int>(padding), 0, 0);

  ggml_tensor* out = attend(ctx, packed, to);
  // [dim, packed_heads, group * rows (+ padding)] -> [dim * n_head, rows]
  ggml_tensor* unpacked = ggml_view_4d(ctx, out, dim, packed_heads, group, n, out->nb[1],
                                       out->nb[2], out->nb[2] * static_cast<size_t>(group), 0);
  unpacked = ggml_cont(ctx, ggml_permute(ctx, unpacked, 0, 2, 1, 3));
  return ggml_reshape_2d(ctx, unpacked, dim * shape_.n_head, n);
}

}  // namespace hcache::engine
