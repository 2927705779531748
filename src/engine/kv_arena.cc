#include "kv_arena.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "model/graph.h"

namespace hcache::engine {

KvArena::KvArena(const model::Model& model, const EngineOptions& options, int begin, int end,
                 GraphRunner& graphs, CopyQueue& queue)
    : model_(model),
      options_(options),
      begin_(begin),
      end_(end),
      graphs_(graphs),
      queue_(queue),
      last_upload_(end - begin, 0) {}

Status KvArena::allocate(std::span<const int64_t> cells) {
  const int64_t width = model_.hparams().n_embd_kv();
  pool_.open(2 * static_cast<size_t>(end_ - begin_) + 1);
  for (int layer = begin_; layer < end_; ++layer) {
    for (auto* arena : {&k_, &v_}) {
      arena->push_back(ggml_new_tensor_2d(pool_.ctx(), options_.kv_type, width,
                                          cells[static_cast<size_t>(layer - begin_)]));
    }
  }
  if (ggml_is_quantized(options_.kv_type) && !graphs_.device().host_visible()) {
    turned_ = ggml_new_tensor_2d(pool_.ctx(), options_.kv_type, width, options_.max_batch_rows);
  }
  return pool_.allocate(graphs_.device().buffer_type(),
                        fmt::format("a KV arena of {} tokens", options_.arena_tokens));
}

ggml_tensor* KvArena::rows(ggml_context* ctx, ggml_tensor* arena, int64_t cell, int64_t n) {
  return ggml_view_2d(ctx, arena, arena->ne[0], n, arena->nb[1],
                      static_cast<size_t>(cell) * arena->nb[1]);
}

ggml_tensor* KvArena::words(ggml_context* ctx, ggml_tensor* arena, int64_t cell, int64_t n) {
  const size_t row_bytes = arena->nb[1];
  const ggml_type type = row_bytes % sizeof(int32_t) == 0 ? GGML_TYPE_I32 : GGML_TYPE_F16;
  return tensor_in_block(ctx, arena, cell * static_cast<int64_t>(row_bytes), type,
                         static_cast<int64_t>(row_bytes / ggml_type_size(type)), n);
}

// Rows are copied in blocks that do not overlap their target, in the direction that never
// overwrites rows that have yet to be read.
Status KvArena::move_rows(int layer, const ExtentAllocator::Move& move) {
  if (move.n == 0 || move.from == move.to) return {};
  if (graphs_.device().host_visible()) {
    graphs_.synchronize();
    for (ggml_tensor* arena : {k(layer), v(layer)}) {
      auto* base = static_cast<std::byte*>(arena->data);
      std::memmove(base + static_cast<size_t>(move.to) * arena->nb[1],
                   base + static_cast<size_t>(move.from) * arena->nb[1],
                   static_cast<size_t>(move.n) * arena->nb[1]);
    }
    return {};
  }
  // Through a bounce tensor per block: source and target of one copy must not overlap on devices.
  const int64_t block = options_.max_batch_rows;
  const int64_t n_blocks = (move.n + block - 1) / block;
  const Graph g(graphs_, static_cast<size_t>(n_blocks) * 12 + 16);
  for (int64_t i = 0; i < n_blocks; ++i) {
    const int64_t index = move.to < move.from ? i : n_blocks - 1 - i;
    const int64_t first = index * block;
    const int64_t n = std::min(block, move.n - first);
    for (ggml_tensor* arena : {k(layer), v(layer)}) {
      ggml_tensor* bounce = ggml_cont(g.ctx, words(g.ctx, arena, move.from + first, n));
      g.add(ggml_cpy(g.ctx, bounce, words(g.ctx, arena, move.to + first, n)));
    }
  }
  return graphs_.compute(g);
}

Status KvArena::shift_k(int layer, int64_t cell, int64_t n, ggml_tensor* deltas) {
  const model::HParams& hp = model_.hparams();
  const Graph g(graphs_, 32);
  ggml_tensor* target = rows(g.ctx, k(layer), cell, n);
  if (turned_ != nullptr) {
    target = rows(g.ctx, turned_, 0, n);
    g.add(ggml_cpy(g.ctx, words(g.ctx, k(layer), cell, n), words(g.ctx, turned_, 0, n)));
  }
  ggml_tensor* turned = target->type == GGML_TYPE_F32 ? ggml_cont(g.ctx, target)
                                                      : ggml_cast(g.ctx, target, GGML_TYPE_F32);
  turned = ggml_reshape_3d(g.ctx, turned, hp.head_dim, hp.n_head_kv, n);
  turned = model::build_k_shift(g.ctx, model_, layer, turned, ggml_view_1d(g.ctx, deltas, n, 0));
  turned = ggml_reshape_2d(g.ctx, turned, hp.n_embd_kv(), n);
  g.add(ggml_cpy(g.ctx, turned, target));
  if (turned_ != nullptr) {
    g.add(ggml_cpy(g.ctx, words(g.ctx, turned_, 0, n), words(g.ctx, k(layer), cell, n)));
  }
  return graphs_.compute(g);
}

CopyQueue::Ticket KvArena::upload(int layer, int64_t cell, int n, const std::byte* k_rows,
                                  const std::byte* v_rows) {
  const size_t offset = static_cast<size_t>(cell) * row_bytes();
  const size_t n_bytes = row_bytes() * static_cast<size_t>(n);
  queue_.upload(k(layer), offset, k_rows, n_bytes);
  return last_upload_[layer - begin_] = queue_.upload(v(layer), offset, v_rows, n_bytes);
}

CopyQueue::Ticket KvArena::last_upload(int begin, int end) const {
  return *std::max_element(last_upload_.begin() + (begin - begin_),
                           last_upload_.begin() + (end - begin_));
}

void KvArena::wait_for_uploads() { queue_.wait(last_upload(begin_, end_)); }

void KvArena::read(int layer, int64_t cell, int n, std::byte* k_rows, std::byte* v_rows) const {
  const size_t offset = static_cast<size_t>(cell) * row_bytes();
  const size_t n_bytes = row_bytes() * static_cast<size_t>(n);
  ggml_backend_tensor_get(k(layer), k_rows, offset, n_bytes);
  ggml_backend_tensor_get(v(layer), v_rows, offset, n_bytes);
}

size_t KvArena::row_bytes() const {
  return ggml_row_size(options_.kv_type, model_.hparams().n_embd_kv());
}

size_t KvArena::row_offset() const {
  return ggml_row_size(options_.kv_type,
                       int64_t{model_.share().first_head_kv} * model_.hparams().head_dim);
}

}  // namespace hcache::engine
