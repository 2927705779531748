#include "batch_buffers.h"

#include <fmt/format.h>

#include <algorithm>

namespace hcache::engine {
namespace {

int64_t align_up(int64_t n) {
  constexpr auto kAlignment = static_cast<int64_t>(kDirectAlignment);
  return (n + kAlignment - 1) / kAlignment * kAlignment;
}

}  // namespace

Status BatchBuffers::allocate(const Shape& shape) {
  shape_ = shape;
  for (int i = 0; i < shape.n_buffers; ++i) {
    buffers_.push_back(std::make_unique<BatchBuffer>());
    HCACHE_RETURN_IF_ERROR(allocate(*buffers_.back(), shape));
  }
  return {};
}

Status BatchBuffers::allocate(BatchBuffer& buffer, const Shape& shape) {
  const auto kv_bytes = align_up(static_cast<int64_t>(layout_.kv_row_bytes) * shape.n_cells);
  const size_t widest =
      *std::max_element(layout_.act_row_bytes.begin(), layout_.act_row_bytes.end());
  const auto act_bytes = static_cast<int64_t>(std::max<size_t>(widest, 1)) *
                         (shape.buffer_tokens + shape.spare_act_rows);
  const int64_t n_bytes = 2 * kv_bytes + align_up(act_bytes);
  buffer.memory.open(1);
  buffer.block = ggml_new_tensor_1d(buffer.memory.ctx(), GGML_TYPE_I8,
                                    n_bytes + static_cast<int64_t>(kDirectAlignment));
  HCACHE_RETURN_IF_ERROR(buffer.memory.allocate(
      device_.buffer_type(), fmt::format("a buffer of {} tokens", shape.buffer_tokens)));
  // Reads in place need addresses that are aligned for direct I/O.
  const auto address = reinterpret_cast<uintptr_t>(buffer.block->data);
  const auto first = align_up(static_cast<int64_t>(address)) - static_cast<int64_t>(address);
  buffer.tensors.open(3);
  ggml_context* ctx = buffer.tensors.ctx();
  const auto kv_at = [&](int64_t offset) {
    return tensor_in_block(ctx, buffer.block, offset, shape.kv_type, shape.n_embd_kv,
                           shape.n_cells);
  };
  buffer.k = kv_at(first);
  buffer.v = kv_at(first + kv_bytes);
  buffer.act = tensor_in_block(ctx, buffer.block, first + 2 * kv_bytes, GGML_TYPE_I8, act_bytes, 1);
  if (shape.from_disk && !shape.in_place) {
    HCACHE_ASSIGN_OR_RETURN(buffer.landing, HostBuffer::make(device_, static_cast<size_t>(n_bytes),
                                                             "blocks from disk"));
  }
  return {};
}

std::byte* BatchBuffers::landing(const BatchBuffer& buffer, const ggml_tensor* target) const {
  auto* data = static_cast<std::byte*>(target->data);
  if (shape_.in_place) return data;
  // The landing memory has the layout of the buffer.
  return buffer.landing.data() + (data - static_cast<std::byte*>(buffer.k->data));
}

template <typename Visit>
void BatchBuffers::visit_act(const MiniBatch& batch,
                             std::span<const std::vector<BlockStore::Id>* const> blocks,
                             const Visit& visit) const {
  int64_t row = 0;
  for (const bool complete : {true, false}) {
    for (size_t m = 0; m < batch.members.size(); ++m) {
      const StepMember& member = batch.members[m];
      const int64_t n_complete = member.n_past / kBlockTokens;
      const int64_t end = (member.n_past + kBlockTokens - 1) / kBlockTokens;
      for (int64_t b = complete ? 0 : n_complete; b < (complete ? n_complete : end); ++b) {
        const BlockStore::Id id = (*blocks[m])[b];
        if (store_.kind(id) != BlockKind::kAct) continue;
        const int64_t first = b * kBlockTokens;
        const int64_t n = std::min<int64_t>(kBlockTokens, member.n_past - first);
        visit(id, ActRun{.first_pos = first,
                         .n_rows = n,
                         .first_row = row,
                         .first_cell = member.first_cell + first});
        row += n;
      }
    }
  }
}

std::vector<ActRun> BatchBuffers::act_runs(
    const MiniBatch& batch, std::span<const std::vector<BlockStore::Id>* const> blocks) const {
  std::vector<ActRun> runs;
  visit_act(batch, blocks, [&](BlockStore::Id, const ActRun& run) { runs.push_back(run); });
  return runs;
}

void BatchBuffers::add_page(const BatchBuffer& buffer, BlockStore::Id id, int layer, int part,
                            int64_t n_rows, ggml_tensor* target, int64_t row,
                            std::vector<PageLoad>* loads) const {
  const BlockKind kind = store_.kind(id);
  const size_t row_bytes = layout_.row_bytes(kind, layer);
  PageLoad load{.target = target,
                .offset = static_cast<size_t>(row) * row_bytes,
                .n_bytes = static_cast<size_t>(n_rows) * row_bytes};
  switch (store_.place(id)) {
    case BlockPlace::kDisk:
      load.read = {store_.file(kind),
                   store_.file_offset(id, layer, part),
                   {landing(buffer, target) + load.offset, load.n_bytes}};
      break;
    case BlockPlace::kHost: load.host = store_.host_page(id, layer, part); break;
    case BlockPlace::kDevice:
      load.device = store_.device_block(id);
      load.device_offset = layout_.offset(kind, layer, part);
      break;
  }
  loads->push_back(load);
}

LayerLoad BatchBuffers::loads(BatchBuffer& buffer, int layer, const MiniBatch& batch,
                              std::span<const std::vector<BlockStore::Id>* const> blocks) const {
  LayerLoad load;
  if (layer < layout_.first_layer) return load;
  visit_act(batch, blocks, [&](BlockStore::Id id, const ActRun& run) {
    add_page(buffer, id, layer, 0, run.n_rows, buffer.act, run.first_row, &load.act);
  });
  for (size_t m = 0; m < batch.members.size(); ++m) {
    const StepMember& member = batch.members[m];
    for (int64_t first = 0; first < member.n_past; first += kBlockTokens) {
      const BlockStore::Id id = (*blocks[m])[first / kBlockTokens];
      const int64_t n = std::min<int64_t>(kBlockTokens, member.n_past - first);
      if (store_.kind(id) != BlockKind::kKv) continue;
      add_page(buffer, id, layer, 0, n, buffer.k, member.first_cell + first, &load.kv);
      add_page(buffer, id, layer, 1, n, buffer.v, member.first_cell + first, &load.kv);
    }
  }
  return load;
}

std::vector<PageTransfer> BatchBuffers::reads(const std::vector<PageLoad>& loads) {
  std::vector<PageTransfer> merged;
  std::vector<size_t> open;  // of `merged`: the last transfer into each target
  std::vector<const ggml_tensor*> targets;
  for (const PageLoad& load : loads) {
    if (load.read.file == nullptr) continue;
    const auto at = std::find(targets.begin(), targets.end(), load.target) - targets.begin();
    if (at == static_cast<std::ptrdiff_t>(targets.size())) {
      targets.push_back(load.target);
      open.push_back(merged.size());
      merged.push_back(load.read);
      continue;
    }
    PageTransfer& last = merged[open[at]];
    const bool joins = last.file == load.read.file &&
                       last.offset + last.memory.size() == load.read.offset &&
                       last.memory.data() + last.memory.size() == load.read.memory.data();
    if (joins) {
      last.memory = {last.memory.data(), last.memory.size() + load.read.memory.size()};
    } else {
      open[at] = merged.size();
      merged.push_back(load.read);
    }
  }
  return merged;
}

void BatchBuffers::upload(BatchBuffer& buffer, const std::vector<PageLoad>& loads) {
  bool fenced = false;
  for (const PageLoad& load : loads) {
    const std::byte* from = load.host;
    if (load.read.file != nullptr && !shape_.in_place) from = load.read.memory.data();
    if (from == nullptr) continue;
    if (!fenced) queue_.after_compute(buffer.used);
    fenced = true;
    buffer.upload = queue_.upload(load.target, load.offset, from, load.n_bytes);
  }
}

size_t BatchBuffers::n_bytes() const {
  size_t n = 0;
  for (const auto& buffer : buffers_) n += buffer->memory.n_bytes();
  return n;
}

}  // namespace hcache::engine
