#include "capture_tap.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace hcache::engine {
namespace {

constexpr size_t kAlignment = 64;  // of a layer's rows within a block

size_t align_up(size_t n) { return (n + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

CaptureTap::CaptureTap(const model::Model& model, const EngineOptions& options,
                       const Stages& stages, HiddenTypes& types)
    : model_(model), options_(options), stages_(stages), types_(types) {
  for (size_t i = 0; i < stages.size(); ++i) blocks_.push_back(std::make_unique<Block>());
}

Status CaptureTap::set(CaptureSink* sink, const CaptureOptions& options) {
  while (!steps_.empty()) abandon(*steps_.back());
  poll(true);
  sink_ = nullptr;
  masks_.clear();
  const auto any = [&](uint8_t wanted) {
    return std::any_of(options.layers.begin(), options.layers.end(),
                       [wanted](uint8_t mask) { return (mask & wanted) != 0; });
  };
  if (sink == nullptr || !any(kTapHidden | kTapKv)) return {};
  const auto n_layer = static_cast<size_t>(model_.hparams().n_layer);
  if (options.layers.size() != n_layer) {
    return invalid_argument(
        fmt::format("a save plan of {} layers for a model of {}", options.layers.size(), n_layer));
  }
  HCACHE_RETURN_IF_ERROR(choose_types(options));
  masks_ = options.layers;
  for (const auto& stage : stages_) {
    if (Status status = allocate(*stage); !status.ok()) {
      masks_.clear();
      return status;
    }
  }
  sink_ = sink;
  return {};
}

Status CaptureTap::choose_types(const CaptureOptions& options) {
  const size_t n_layer = options.layers.size();
  if (!options.hidden_types.empty() && options.hidden_types.size() != n_layer) {
    return invalid_argument(fmt::format("types of {} layers' hidden states for a model of {}",
                                        options.hidden_types.size(), n_layer));
  }
  hidden_types_.assign(n_layer, GGML_TYPE_COUNT);
  for (size_t i = 0; i < n_layer; ++i) {
    if ((options.layers[i] & kTapHidden) == 0) continue;
    const int layer = static_cast<int>(i);
    if (!options.hidden_types.empty()) hidden_types_[i] = options.hidden_types[i];
    if (hidden_types_[i] == GGML_TYPE_COUNT) hidden_types_[i] = types_.native(layer);
    if (!types_.can_project(hidden_types_[i], layer)) {
      return types_.cannot_project(hidden_types_[i], layer);
    }
  }
  return {};
}

// Makes the stage's block large enough for what the masks capture of its layers.
Status CaptureTap::allocate(Stage& stage) {
  Block& block = *blocks_[stage.index()];
  size_t row_bytes = 0;
  size_t n_parts = 0;
  for (int layer = stage.begin(); layer < stage.end(); ++layer) {
    if ((masks_[layer] & kTapHidden) != 0 && has_hidden(stage))
      row_bytes += types_.row_bytes(hidden_types_[layer]), ++n_parts;
    if ((masks_[layer] & kTapKv) != 0) row_bytes += 2 * stage.arena().row_bytes(), n_parts += 2;
  }
  const size_t capacity = row_bytes * options_.max_batch_rows + n_parts * kAlignment;
  if (capacity == 0 || (block.bytes != nullptr && ggml_nbytes(block.bytes) >= capacity)) return {};
  stage.graphs().synchronize();
  block.bytes = nullptr;
  block.pool.open(1);
  ggml_tensor* bytes =
      ggml_new_tensor_1d(block.pool.ctx(), GGML_TYPE_I8, static_cast<int64_t>(capacity));
  HCACHE_RETURN_IF_ERROR(block.pool.allocate(stage.device().buffer_type(), "the capture buffer"));
  block.bytes = bytes;
  return {};
}

void CaptureTap::lay_out(StepState& step) {
  if (sink_ == nullptr) return;
  lay_out(step.n_rows, true, kv_row_bytes(), step.capture, step.capture_ends);
  for (const auto& stage : stages_) {
    step.captured_to.push_back(stage->begin());
    if (!stages_.shares_layers()) continue;
    CapturedShare& share = step.capture_shares.emplace_back();
    lay_out(step.n_rows, has_hidden(*stage), stage->arena().row_bytes(), share.layers, share.ends);
    share.host = std::make_unique_for_overwrite<std::byte[]>(share.ends.back());
  }
  step.capture_tickets.assign(stages_.size(), 0);
  steps_.push_back(&step);
}

void CaptureTap::lay_out(int n_rows, bool with_hidden, size_t kv_row_bytes,
                         std::vector<CapturedLayer>& layers, std::vector<size_t>& ends) const {
  size_t offset = 0;
  const auto take = [&](size_t row_bytes) {
    const size_t at = offset;
    offset = align_up(offset + row_bytes * static_cast<size_t>(n_rows));
    return static_cast<int64_t>(at);
  };
  for (size_t i = 0; i < masks_.size(); ++i) {
    CapturedLayer layer;
    if ((masks_[i] & kTapHidden) != 0 && with_hidden) {
      layer.hidden_type = hidden_types_[i];
      layer.hidden_row_bytes = types_.row_bytes(layer.hidden_type);
      layer.hidden_offset = take(layer.hidden_row_bytes);
    }
    if ((masks_[i] & kTapKv) != 0) {
      layer.k_offset = take(kv_row_bytes);
      layer.v_offset = take(kv_row_bytes);
    }
    layers.push_back(layer);
    ends.push_back(offset);
  }
}

size_t CaptureTap::kv_row_bytes() const {
  return ggml_row_size(options_.kv_type, model_.hparams().n_embd_kv());
}

void CaptureTap::own_block(Stage& stage, StepState& step) {
  Block& block = *blocks_[stage.index()];
  if (step.capture.empty() || block.owner == &step) return;
  if (block.owner != nullptr) download(stage, *block.owner);
  block.owner = &step;
  stage.queue().before_compute(block.ticket);
}

ggml_tensor* CaptureTap::tensor(ggml_context* ctx, const Stage& stage, const StepState& step,
                                ggml_type type, int64_t width, int64_t offset) const {
  const auto stage_begin = static_cast<int64_t>(layer_begin(stage, step, stage.begin()));
  return tensor_in_block(ctx, blocks_[stage.index()]->bytes, offset - stage_begin, type, width,
                         step.n_rows);
}

// Copies what the stage's block holds of the step to the sink's memory: all of it in one copy,
// unless another step ran between the layers of this one.
void CaptureTap::download(Stage& stage, StepState& step) {
  int& captured_to = step.captured_to[stage.index()];
  const int computed_to = std::clamp(step.next_layer, stage.begin(), stage.end());
  const size_t begin = layer_begin(stage, step, captured_to);
  const size_t end = layer_begin(stage, step, computed_to);
  if (begin >= end) return;
  if (step.capture_host == nullptr) step.capture_host = sink_->reserve(step.capture_ends.back());
  if (step.capture_host == nullptr) return abandon(step);
  Block& block = *blocks_[stage.index()];
  std::byte* host = step.capture_shares.empty() ? step.capture_host
                                                : step.capture_shares[stage.index()].host.get();
  stage.queue().after_compute();
  block.ticket = stage.queue().download(
      block.bytes, begin - layer_begin(stage, step, stage.begin()), host + begin, end - begin);
  step.capture_tickets[stage.index()] = block.ticket;
  captured_to = computed_to;
}

void CaptureTap::abandon(StepState& step) {
  if (step.capture.empty()) return;
  if (step.capture_host != nullptr) {
    for (const auto& stage : stages_) stage->queue().wait(step.capture_tickets[stage->index()]);
    sink_->drop(std::exchange(step.capture_host, nullptr));
  }
  step.capture.clear();
  step.capture_shares.clear();
  std::erase(steps_, &step);
  for (const auto& block : blocks_) {
    if (block->owner == &step) block->owner = nullptr;
  }
}

void CaptureTap::publish(StepState& step) {
  for (const auto& stage : stages_) {
    if (blocks_[stage->index()]->owner == &step) download(*stage, step);
  }
  if (step.capture.empty()) return;
  Pending p;
  p.tickets = step.capture_tickets;
  p.block = std::exchange(step.capture_host, nullptr);
  p.layers = step.capture;
  p.shares = std::move(step.capture_shares);
  for (const StepState::Segment& s : step.segments) {
    if (!s.captured) continue;
    p.rows.push_back(
        {.seq = s.seq, .first_pos = s.first_pos, .first_row = s.first_row, .n_rows = s.n_rows});
  }
  p.capture = {.layers = {},
               .rows = {},
               .n_rows = step.n_rows,
               .kv_type = options_.kv_type,
               .kv_row_bytes = kv_row_bytes(),
               .n_bytes = step.capture_ends.back()};
  pending_.push_back(std::move(p));
  abandon(step);  // nothing of it is left here
}

// Whole rows of K and V from those of each stage's heads.
void CaptureTap::put_together(const Pending& p) const {
  const auto n_rows = static_cast<size_t>(p.capture.n_rows);
  for (const auto& stage : stages_) {
    if (p.shares.empty()) return;
    const CapturedShare& share = p.shares[stage->index()];
    const size_t width = stage->arena().row_bytes();
    const auto scatter = [&](int64_t from, int64_t to) {
      const std::byte* in = share.host.get() + from;
      std::byte* out = p.block + to + stage->arena().row_offset();
      for (size_t r = 0; r < n_rows; ++r, in += width, out += p.capture.kv_row_bytes) {
        std::memcpy(out, in, width);
      }
    };
    for (size_t i = 0; i < p.layers.size(); ++i) {
      const CapturedLayer& own = share.layers[i];
      const CapturedLayer& whole = p.layers[i];
      if (own.hidden_offset >= 0) {
        std::memcpy(p.block + whole.hidden_offset, share.host.get() + own.hidden_offset,
                    n_rows * own.hidden_row_bytes);
      }
      if (own.k_offset < 0) continue;
      scatter(own.k_offset, whole.k_offset);
      scatter(own.v_offset, whole.v_offset);
    }
  }
}

void CaptureTap::poll(bool all) {
  while (!pending_.empty()) {
    Pending& p = pending_.front();
    const bool done = std::all_of(stages_.begin(), stages_.end(), [&](const auto& stage) {
      return stage->queue().done(p.tickets[stage->index()]);
    });
    if (!done) {
      // One block may stay in flight beside the step that follows it.
      if (!all && pending_.size() < 2) return;
      for (const auto& stage : stages_) stage->queue().wait(p.tickets[stage->index()]);
    }
    put_together(p);
    p.capture.layers = p.layers;
    p.capture.rows = p.rows;
    sink_->publish(p.block, p.capture);
    pending_.pop_front();
  }
}

void CaptureTap::wait() {
  for (const auto& stage : stages_) stage->queue().wait(blocks_[stage->index()]->ticket);
}

size_t CaptureTap::n_bytes() const {
  size_t n = 0;
  for (const auto& block : blocks_) n += block->pool.n_bytes();
  return n;
}

}  // namespace hcache::engine
