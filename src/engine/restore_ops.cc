#include "restore_ops.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "graph_runner.h"
#include "model/graph.h"

namespace hcache::engine {
namespace {

// Slices beside the open ones that may wait for their product while the next is staged.
constexpr int kClosedSlots = 2;

// Of a slice, that one of several devices is sent before the next one's turn comes.
constexpr int kStripeRows = 32;

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

RestoreOps::Ticket RestoreOps::issue(Stage& stage, CopyQueue::Ticket copy,
                                     std::unique_ptr<std::byte[]> held) {
  done(last_ticket_);  // those that nobody asks for any more are dropped
  issued_.push_back({++last_ticket_, &stage, copy, std::move(held)});
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

// Rows that a layer keeps of more than it holds are no longer what their positions say.
Status RestoreOps::check_writable(SeqId seq, int layer, int64_t first_pos, int64_t n_rows) const {
  HCACHE_RETURN_IF_ERROR(check_rows(seq, layer, first_pos, n_rows));
  if (sequences_.held(seq, sequences_.group_of(layer)).first_pos == 0) return {};
  return sequences_.check_compacted(seq, first_pos);
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
  HCACHE_RETURN_IF_ERROR(check_writable(seq, layer, first_pos, n_rows));
  const int64_t cell = sequences_.held(seq, sequences_.group_of(layer)).cell(first_pos);
  if (stages_.shares_layers()) return load_shares(layer, cell, n_rows, k, v);
  Stage& stage = stages_.of(layer);
  return issue(stage, stage.arena().upload(layer, cell, n_rows, k, v));
}

// Each device is sent the rows of its own heads.
RestoreOps::Ticket RestoreOps::load_shares(int layer, int64_t cell, int n_rows, const std::byte* k,
                                           const std::byte* v) {
  const size_t whole = ggml_row_size(options_.kv_type, model_.hparams().n_embd_kv());
  const auto n = static_cast<size_t>(n_rows);
  for (Stage* stage : stages_.members(layer)) {
    KvArena& arena = stage->arena();
    const size_t width = arena.row_bytes();
    auto held = std::make_unique_for_overwrite<std::byte[]>(2 * n * width);
    std::byte* out = held.get();
    for (const std::byte* rows : {k, v}) {
      const std::byte* in = rows + arena.row_offset();
      for (size_t r = 0; r < n; ++r, in += whole, out += width) std::memcpy(out, in, width);
    }
    const CopyQueue::Ticket copy =
        arena.upload(layer, cell, n_rows, held.get(), held.get() + n * width);
    issue(*stage, copy, std::move(held));
  }
  return last_ticket_;
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
  taken.ticket = 0;
  return &taken;
}

Result<RestoreOps::Ticket> RestoreOps::stage_hidden(SeqId seq, int layer, int row_in_slice,
                                                    int n_rows, ggml_type type,
                                                    const std::byte* rows) {
  HCACHE_RETURN_IF_ERROR(sequences_.check(seq));
  HCACHE_RETURN_IF_ERROR(check_slice(layer, row_in_slice, n_rows));
  if (!types_.can_project(type, layer)) return types_.cannot_project(type, layer);
  HCACHE_RETURN_IF_ERROR(open_slots(seq, layer));
  const size_t row = types_.row_bytes(type);
  if (stages_.shares_layers()) return stage_shares(seq, layer, row_in_slice, n_rows, row, rows);
  Stage& stage = stages_.of(layer);
  Slot* slot = open_slot(stage, seq);
  slot->ticket = stage.queue().upload(slot->rows, row * row_in_slice, rows, row * n_rows);
  return issue(stage, slot->ticket);
}

// On every device that needs the sequence's next slice.
Status RestoreOps::open_slots(SeqId seq, int layer) {
  for (Stage* stage : stages_.members(layer)) {
    if (open_slot(*stage, seq) != nullptr) continue;
    HCACHE_RETURN_IF_ERROR(take_slot(*stage, seq).status());
  }
  return {};
}

// Each device is sent rows of its own, in stripes that go round (HCache §5); gather_staged() brings
// it the others'.
RestoreOps::Ticket RestoreOps::stage_shares(SeqId seq, int layer, int row_in_slice, int n_rows,
                                            size_t row_bytes, const std::byte* rows) {
  const auto members = stages_.members(layer);
  const int end = row_in_slice + n_rows;
  for (int row = row_in_slice; row < end;) {
    const int stripe_end = std::min(end, (row / kStripeRows + 1) * kStripeRows);
    Stage& stage = *members[static_cast<size_t>(row / kStripeRows) % members.size()];
    Slot* slot = open_slot(stage, seq);
    slot->ticket =
        stage.queue().upload(slot->rows, row_bytes * row, rows + row_bytes * (row - row_in_slice),
                             row_bytes * (stripe_end - row));
    issue(stage, slot->ticket);
    row = stripe_end;
  }
  return last_ticket_;
}

// Copies every stripe from the device that was sent it to the others, in the order of their graphs.
void RestoreOps::gather_staged(SeqId seq, int layer, int n_rows, size_t row_bytes) {
  const auto members = stages_.members(layer);
  // A copy between devices waits for the source's work alone, so products that read the slots
  // before must be through. Uploads into a slot are behind them.
  for (Stage* stage : members) {
    const Slot* slot = open_slot(*stage, seq);
    if (slot->ticket == 0) stage->graphs().synchronize();
    stage->queue().wait(slot->ticket);
  }
  for (int row = 0; row < n_rows; row += kStripeRows) {
    Stage& from = *members[static_cast<size_t>(row / kStripeRows) % members.size()];
    const auto n_bytes = static_cast<int64_t>(row_bytes) * std::min(kStripeRows, n_rows - row);
    for (Stage* to : members) {
      if (to == &from) continue;
      const Graph holder(from.graphs(), 2);
      const Graph target_holder(to->graphs(), 2);
      const auto stripe = [&](const Graph& g, const Stage& stage) {
        return tensor_in_block(g.ctx, open_slot(stage, seq)->rows,
                               static_cast<int64_t>(row_bytes) * row, GGML_TYPE_I8, n_bytes, 1);
      };
      from.graphs().copy(stripe(holder, from), to->graphs(), stripe(target_holder, *to));
    }
  }
}

void RestoreOps::close_slot(const Stage& stage, Slot* slot) {
  slot->owner = -1;
  auto& slots = slots_[stage.index()];
  const auto at = std::find_if(slots.begin(), slots.end(),
                               [&](const auto& other) { return other.get() == slot; });
  std::rotate(at, at + 1, slots.end());
}

Status RestoreOps::project_staged(SeqId seq, int layer, int64_t first_pos, int n_rows,
                                  ggml_type type) {
  HCACHE_RETURN_IF_ERROR(check_writable(seq, layer, first_pos, n_rows));
  HCACHE_RETURN_IF_ERROR(check_slice(layer, 0, n_rows));
  const auto members = stages_.members(layer);
  for (const Stage* stage : members) {
    if (open_slot(*stage, seq) != nullptr) continue;
    return failed_precondition(fmt::format("no hidden rows are staged for sequence {}", seq));
  }
  if (!types_.can_project(type, layer)) return types_.cannot_project(type, layer);
  const HeldWeights weights(weights_, layer, model::LayerPart::kKv);
  HCACHE_RETURN_IF_ERROR(weights.status());
  for (Stage* stage : members) stage->queue().before_compute(open_slot(*stage, seq)->ticket);
  if (members.size() > 1) gather_staged(seq, layer, n_rows, types_.row_bytes(type));
  Status status;
  for (Stage* stage : members) {
    Slot* slot = open_slot(*stage, seq);
    // A slice of few rows takes the slot's older ones along, for the kernel that takes many.
    const int64_t computed = std::clamp<int64_t>(types_.least_rows(stage->device(), layer), n_rows,
                                                 options_.max_batch_rows);
    const Graph holder(stage->graphs(), 1);
    ggml_tensor* rows =
        tensor_in_block(holder.ctx, slot->rows, 0, type, model_.hparams().n_embd, computed);
    if (status.ok()) status = project(*stage, rows, seq, layer, first_pos, n_rows);
    slot->mark = stage->queue().mark_compute();
    close_slot(*stage, slot);
  }
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
  std::vector<int64_t> cells(n_rows);
  std::iota(cells.begin(), cells.end(),
            sequences_.held(seq, sequences_.group_of(layer)).cell(first_pos));
  stage.graphs().set(stage.cells(0), cells);

  const Graph g(stage.graphs(), 64);
  const model::Model& model = stage.model();
  const model::LayerWeights& w = model.weights().layers[layer];
  const int64_t width = model.hparams().n_embd_kv();
  ggml_tensor* rotation = ggml_view_1d(g.ctx, stage.positions(), rows->ne[1], 0);
  const auto input = [&](const ggml_tensor* weight) {
    return HiddenTypes::product_input(g.ctx, stage.device(), weight, rows);
  };
  ggml_tensor* k = model::build_k(g.ctx, model, layer, input(w.k.w), rotation);
  ggml_tensor* v = model::build_v(g.ctx, model, layer, input(w.v.w));
  // The same row conversion as in a step.
  ggml_tensor* targets = ggml_view_1d(g.ctx, stage.cells(0), n_rows, 0);
  for (const auto& [arena, made] :
       {std::pair(stage.arena().k(layer), k), std::pair(stage.arena().v(layer), v)}) {
    ggml_tensor* all = ggml_reshape_2d(g.ctx, made, width, rows->ne[1]);
    g.add(ggml_set_rows(g.ctx, arena, ggml_view_2d(g.ctx, all, width, n_rows, all->nb[1], 0),
                        targets));
  }
  return stage.graphs().compute(g);
}

Status RestoreOps::read_kv(SeqId seq, int layer, int64_t first_pos, int n_rows, std::byte* k,
                           std::byte* v) {
  HCACHE_RETURN_IF_ERROR(check_rows(seq, layer, first_pos, n_rows));
  const int64_t cell = sequences_.held(seq, sequences_.group_of(layer)).cell(first_pos);
  const size_t whole = ggml_row_size(options_.kv_type, model_.hparams().n_embd_kv());
  for (Stage* stage : stages_.members(layer)) {
    stage->graphs().synchronize();
    const KvArena& arena = stage->arena();
    if (!stages_.shares_layers()) {
      arena.read(layer, cell, n_rows, k, v);
      continue;
    }
    const size_t width = arena.row_bytes();
    const auto n = static_cast<size_t>(n_rows);
    std::vector<std::byte> own(2 * n * width);
    arena.read(layer, cell, n_rows, own.data(), own.data() + n * width);
    const std::byte* in = own.data();
    for (std::byte* rows : {k, v}) {
      std::byte* out = rows + arena.row_offset();
      for (size_t r = 0; r < n; ++r, in += width, out += whole) std::memcpy(out, in, width);
    }
  }
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
