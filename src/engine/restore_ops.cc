#include "restore_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "graph_runner.h"
#include "model/graph.h"

namespace hcache::engine {
namespace {

// Slices beside the open ones that may wait for their product while the next is staged.
constexpr int kClosedSlots = 2;

}  // namespace

RestoreOps::RestoreOps(const model::Model& model, const EngineOptions& options,
                       const Sequences& sequences, const Stages& stages, HiddenTypes& types,
                       WeightStream& weights)
    : model_(model),
      options_(options),
      sequences_(sequences),
      stages_(stages),
      types_(types),
      weights_(weights),
      slots_(stages.size()) {}

RestoreOps::Ticket RestoreOps::issue(Stage& stage, CopyQueue::Ticket copy) {
  done(last_ticket_);  // those that nobody asks for any more are dropped
  issued_.push_back({++last_ticket_, &stage, copy});
  return last_ticket_;
}

void RestoreOps::wait(Ticket ticket) {
  while (!issued_.empty() && issued_.front().ticket <= ticket) {
    issued_.front().stage->queue().wait(issued_.front().copy);
    issued_.pop_front();
  }
}

bool RestoreOps::done(Ticket ticket) {
  while (!issued_.empty() && issued_.front().ticket <= ticket) {
    if (!issued_.front().stage->queue().done(issued_.front().copy)) return false;
    issued_.pop_front();
  }
  return true;
}

Status RestoreOps::check_rows(SeqId seq, int layer, int64_t first_pos, int64_t n_rows) const {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  const int64_t length = sequences_.length(seq);
  const bool known = layer >= 0 && layer < model_.hparams().n_layer;
  const int64_t begin =
      known ? sequences_.held(seq, sequences_.group_of(layer)).first_pos : int64_t{0};
  if (!known || first_pos < begin || n_rows < 1 || first_pos + n_rows > length) {
    return out_of_range(fmt::format("rows [{}, {}) of layer {} lie outside sequence {} of {} rows",
                                    first_pos, first_pos + n_rows, layer, seq, length));
  }
  return {};
}

Status RestoreOps::check_slice(int layer, int first_row, int n_rows) const {
  if (layer < 0 || layer >= model_.hparams().n_layer) {
    return out_of_range(
        fmt::format("no layer {} in a model of {}", layer, model_.hparams().n_layer));
  }
  if (first_row >= 0 && n_rows >= 1 && n_rows <= options_.max_batch_rows - first_row) return {};
  return out_of_range(fmt::format("{} rows from {} on in a slice of at most {} rows", n_rows,
                                  first_row, options_.max_batch_rows));
}

Result<RestoreOps::Ticket> RestoreOps::load_kv(SeqId seq, int layer, int64_t first_pos, int n_rows,
                                               const std::byte* k, const std::byte* v) {
  HCACHE_RETURN_IF_ERROR(check_rows(seq, layer, first_pos, n_rows));
  Stage& stage = stages_.of(layer);
  const int64_t cell = sequences_.held(seq, sequences_.group_of(layer)).cell(first_pos);
  return issue(stage, stage.arena().upload(layer, cell, n_rows, k, v));
}

RestoreOps::Slot* RestoreOps::open_slot(const Stage& stage, SeqId seq) {
  for (const auto& slot : slots_[stage.index()]) {
    if (slot->owner == seq) return slot.get();
  }
  return nullptr;
}

// A slot for the sequence's next slice: of those that no slice is open in, the one whose product
// was enqueued first. There are always some more than there are open slices.
Result<RestoreOps::Slot*> RestoreOps::take_slot(Stage& stage, SeqId seq) {
  auto& slots = slots_[stage.index()];
  const auto n_free =
      std::count_if(slots.begin(), slots.end(), [](const auto& slot) { return slot->owner < 0; });
  if (n_free <= kClosedSlots) {
    auto slot = std::make_unique<Slot>();
    slot->pool.open(1);
    const size_t capacity = types_.row_bytes(GGML_TYPE_F32) * options_.max_batch_rows;
    ggml_tensor* rows =
        ggml_new_tensor_1d(slot->pool.ctx(), GGML_TYPE_I8, static_cast<int64_t>(capacity));
    HCACHE_RETURN_IF_ERROR(
        slot->pool.allocate(stage.device().buffer_type(), "staged hidden states"));
    slot->rows = rows;
    slots.push_front(std::move(slot));
  }
  const auto free =
      std::find_if(slots.begin(), slots.end(), [](const auto& slot) { return slot->owner < 0; });
  Slot& taken = **free;
  // The slot's previous slice must have been projected; those of other slots may still be.
  stage.queue().after_compute(taken.mark);
  taken.owner = seq;
  return &taken;
}

Result<RestoreOps::Ticket> RestoreOps::stage_hidden(SeqId seq, int layer, int row_in_slice,
                                                    int n_rows, ggml_type type,
                                                    const std::byte* rows) {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  HCACHE_RETURN_IF_ERROR(check_slice(layer, row_in_slice, n_rows));
  if (!types_.can_project(type, layer)) return types_.cannot_project(type, layer);
  Stage& stage = stages_.of(layer);
  Slot* slot = open_slot(stage, seq);
  if (slot == nullptr) {
    HCACHE_ASSIGN_OR_RETURN(slot, take_slot(stage, seq));
  }
  const size_t row = types_.row_bytes(type);
  slot->ticket = stage.queue().upload(slot->rows, row * row_in_slice, rows, row * n_rows);
  return issue(stage, slot->ticket);
}

Status RestoreOps::project_staged(SeqId seq, int layer, int64_t first_pos, int n_rows,
                                  ggml_type type) {
  HCACHE_RETURN_IF_ERROR(check_rows(seq, layer, first_pos, n_rows));
  HCACHE_RETURN_IF_ERROR(check_slice(layer, 0, n_rows));
  Stage& stage = stages_.of(layer);
  Slot* slot = open_slot(stage, seq);
  if (slot == nullptr) {
    return failed_precondition(fmt::format("no hidden rows are staged for sequence {}", seq));
  }
  if (!types_.can_project(type, layer)) return types_.cannot_project(type, layer);
  const HeldWeights weights(weights_, layer, model::LayerPart::kKv);
  HCACHE_RETURN_IF_ERROR(weights.status());
  // A slice of few rows takes the slot's older ones along, for the kernel that takes many.
  const int64_t computed =
      std::clamp<int64_t>(types_.least_rows(layer), n_rows, options_.max_batch_rows);
  const Graph holder(stage.graphs(), 1);
  ggml_tensor* rows =
      tensor_in_block(holder.ctx, slot->rows, 0, type, model_.hparams().n_embd, computed);
  stage.queue().before_compute(slot->ticket);
  const Status status = project(stage, rows, seq, layer, first_pos, n_rows);
  slot->mark = stage.queue().mark_compute();
  slot->owner = -1;
  // It is the last to be taken again.
  auto& slots = slots_[stage.index()];
  const auto at = std::find_if(slots.begin(), slots.end(),
                               [&](const auto& other) { return other.get() == slot; });
  std::rotate(at, at + 1, slots.end());
  return status;
}

// K and V of `layer` from hidden rows [n_embd, n_rows or more] of any type, into the sequence's
// rows; rows behind n_rows are there for the kernel's choice alone.
Status RestoreOps::project(Stage& stage, ggml_tensor* rows, SeqId seq, int layer, int64_t first_pos,
                           int n_rows) {
  stage.inputs_overwritten();
  std::vector<int32_t> positions(rows->ne[1]);
  std::iota(positions.begin(), positions.end(), static_cast<int32_t>(first_pos));
  stage.graphs().set(stage.positions(), positions);

  const Graph g(stage.graphs(), 64);
  const model::LayerWeights& w = model_.weights().layers[layer];
  const int64_t width = model_.hparams().n_embd_kv();
  const int64_t cell = sequences_.held(seq, sequences_.group_of(layer)).cell(first_pos);
  ggml_tensor* rotation = ggml_view_1d(g.ctx, stage.positions(), rows->ne[1], 0);
  const model::Product product = types_.product(layer);
  const auto input = [&](const ggml_tensor* weight) {
    return types_.product_input(g.ctx, layer, weight, rows);
  };
  ggml_tensor* k = model::build_k(g.ctx, model_, layer, input(w.k.w), rotation, product);
  ggml_tensor* v = model::build_v(g.ctx, model_, layer, input(w.v.w), product);
  // The same row conversion as in a step, into a view of the extent.
  ggml_tensor* order = stage.order(g.ctx, n_rows);
  for (const auto& [arena, made] :
       {std::pair(stage.arena().k(layer), k), std::pair(stage.arena().v(layer), v)}) {
    ggml_tensor* all = ggml_reshape_2d(g.ctx, made, width, rows->ne[1]);
    g.add(ggml_set_rows(g.ctx, KvArena::rows(g.ctx, arena, cell, n_rows),
                        ggml_view_2d(g.ctx, all, width, n_rows, all->nb[1], 0), order));
  }
  return stage.graphs().compute(g);
}

Status RestoreOps::read_kv(SeqId seq, int layer, int64_t first_pos, int n_rows, std::byte* k,
                           std::byte* v) {
  HCACHE_RETURN_IF_ERROR(check_rows(seq, layer, first_pos, n_rows));
  const int64_t cell = sequences_.held(seq, sequences_.group_of(layer)).cell(first_pos);
  stages_.of(layer).graphs().synchronize();
  stages_.of(layer).arena().read(layer, cell, n_rows, k, v);
  return {};
}

void RestoreOps::drop_staged(SeqId seq) {
  for (const auto& stage : stages_) {
    Slot* slot = open_slot(*stage, seq);
    if (slot == nullptr) continue;
    stage->queue().wait(slot->ticket);
    slot->owner = -1;
  }
}

size_t RestoreOps::n_bytes() const {
  size_t n = 0;
  for (const auto& slots : slots_) {
    for (const auto& slot : slots) n += slot->pool.n_bytes();
  }
  return n;
}

}  // namespace hcache::engine
