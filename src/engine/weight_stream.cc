#include "engine/weight_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/units.h"
#include "weight_reader.h"

namespace hcache::engine {

using model::LayerPart;
using model::StreamedTensor;
using model::StreamedUnit;

namespace {

constexpr size_t kBlock = kDirectAlignment;

}  // namespace

WeightStream::WeightStream(const model::Model& model, CopyQueue& queue)
    : model_(model),
      queue_(queue),
      weights_(model.streamed()),
      first_(weights_ == nullptr ? model.hparams().n_layer : weights_->first_layer) {}

WeightStream::~WeightStream() {
  reader_.reset();  // writes into the slots
  if (weights_ != nullptr) weights_->claimed = false;
}

Result<std::unique_ptr<WeightStream>> WeightStream::open(const model::Model& model,
                                                         CopyQueue& queue, bool is_async) {
  const model::StreamedWeights* weights = model.streamed();
  if (weights != nullptr && weights->claimed.exchange(true)) {
    return failed_precondition(
        "another engine streams this model's weights; load the model once for each");
  }
  std::unique_ptr<WeightStream> stream(new WeightStream(model, queue));
  if (weights == nullptr) return stream;
  const bool in_host = weights->place == model::WeightPlace::kHost;
  const bool direct = !in_host && !is_async && weights->slots[0] != nullptr;
  stream->uploads_ = !direct;
  if (!in_host) HCACHE_RETURN_IF_ERROR(stream->open_reader(direct));
  return stream;
}

Status WeightStream::open_reader(bool direct) {
  images_ = weights_->slots;
  if (!direct) {
    const std::array<size_t, 2>& image = weights_->image_bytes;
    const size_t n_bytes = image[0] + image[1];
    host_.reset(model_.device().alloc_host(n_bytes + kBlock));
    if (host_ == nullptr) {
      return resource_exhausted(
          fmt::format("no {} of host memory to read weights into", format_bytes(n_bytes)));
    }
    const auto base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(host_.get()));
    images_[0] = reinterpret_cast<std::byte*>((base + kBlock - 1) / kBlock * kBlock);
    images_[1] = images_[0] + image[0];
  }
  HCACHE_ASSIGN_OR_RETURN(reader_, WeightReader::open(*weights_, images_));
  return {};
}

int WeightStream::graph_end(int begin, int end) const {
  return streams(begin) ? std::min(begin + 1, end) : std::min(end, first_);
}

// With two units or fewer each stays in its slot.
size_t WeightStream::next_in_slot(size_t index) const {
  return index + 2 < weights_->units.size() ? index + 2 : index % 2;
}

bool WeightStream::is_there(size_t index, LayerPart part) {
  if (!uploads_) return reader_->ready(index, part);
  const Slot& slot = slot_of(index);
  return slot.unit == static_cast<int64_t>(index) && slot.has_kv &&
         (part == LayerPart::kKv || slot.has_rest);
}

void WeightStream::begin(size_t index, LayerPart part) {
  if (reader_ == nullptr || is_there(index, part)) return;
  // What was read there last must have left the host's memory.
  if (uploads_ && reader_->target(index) != static_cast<int64_t>(index)) {
    queue_.wait(slot_of(index).ticket);
  }
  reader_->fetch(index, part);
}

// The copy queue reads what the unit's image holds.
void WeightStream::upload(size_t index, LayerPart part) {
  Slot& slot = slot_of(index);
  const StreamedUnit& unit = weights_->units[index];
  if (slot.unit != static_cast<int64_t>(index)) {
    queue_.after_compute(slot.mark);
    slot = {.unit = static_cast<int64_t>(index), .ticket = slot.ticket, .mark = slot.mark};
  }
  const std::byte* image = unit.host != nullptr ? unit.host : images_.at(index % 2);
  const bool wants_rest = part == LayerPart::kAll;
  for (const StreamedTensor& t : unit.tensors) {
    if (t.is_kv ? slot.has_kv : (slot.has_rest || !wants_rest)) continue;
    slot.ticket = queue_.upload(t.tensor, 0, image + t.image_offset, t.n_bytes);
    if (reader_ == nullptr) uploaded_ += t.n_bytes;
  }
  slot.has_kv = true;
  slot.has_rest = slot.has_rest || wants_rest;
}

void WeightStream::upload_and_wait(size_t index, LayerPart part) {
  Env& env = *weights_->env;
  const int64_t start_ns = env.monotonic_ns();
  upload(index, part);
  queue_.wait(slot_of(index).ticket);
  upload_ns_ += env.monotonic_ns() - start_ns;
}

size_t WeightStream::unit_of(int layer, LayerPart part) const {
  const auto index = static_cast<size_t>(layer - first_);
  return weights_->halves ? 2 * index + (part == LayerPart::kFeedForward ? 1 : 0) : index;
}

Status WeightStream::acquire(int layer, LayerPart wanted) {
  if (!streams(layer)) return {};
  if (weights_->halves && wanted == LayerPart::kAll) {
    return internal_error(fmt::format("layer {}'s weights come by halves, not whole", layer));
  }
  if (held_ >= 0) {
    return failed_precondition(fmt::format(
        "layer {}'s weights are wanted while those of layer {} are in use", layer, held_));
  }
  const size_t index = unit_of(layer, wanted);
  const LayerPart part = wanted == LayerPart::kKv ? LayerPart::kKv : LayerPart::kAll;
  if (!is_there(index, part)) ++layers_;
  begin(index, part);
  const size_t next = (index + 1) % weights_->units.size();
  // Behind K and V alone no feed-forward block is wanted.
  const bool skips = weights_->halves && part == LayerPart::kKv;
  const bool has_next = read_ahead_ && next % 2 != index % 2 && !skips;
  if (has_next) begin(next, part);
  if (reader_ != nullptr && !is_there(index, part) && !reader_->ready(index, part)) {
    Env& env = *weights_->env;
    const int64_t start_ns = env.monotonic_ns();
    const Status status = reader_->wait(index, part);
    wait_ns_ += env.monotonic_ns() - start_ns;
    HCACHE_RETURN_IF_ERROR(status);
  }
  if (uploads_) {
    if (!is_there(index, part)) {
      read_ahead_ ? upload(index, part) : upload_and_wait(index, part);
    }
    queue_.before_compute(slot_of(index).ticket);
    // Beside this layer's graphs.
    const bool has_image = has_next && (reader_ == nullptr || reader_->ready(next, part));
    if (has_image && !is_there(next, part)) upload(next, part);
  }
  held_ = layer;
  held_unit_ = index;
  held_part_ = part;
  return {};
}

void WeightStream::release(int layer) {
  if (layer != held_) return;
  held_ = -1;
  const size_t index = held_unit_;
  if (uploads_) slot_of(index).mark = queue_.mark_compute();
  if (read_ahead_ && held_part_ == LayerPart::kAll) {
    begin(next_in_slot(index), LayerPart::kAll);
  }
}

WeightStats WeightStream::stats() const {
  WeightStats stats;
  stats.layers = layers_;
  stats.bytes = uploaded_;
  stats.wait_s = static_cast<double>(wait_ns_) * 1e-9;
  stats.upload_s = static_cast<double>(upload_ns_) * 1e-9;
  if (reader_ == nullptr) return stats;
  const WeightReader::Counters read = reader_->counters();
  stats.bytes = read.bytes_read;
  stats.read_errors = read.errors;
  stats.read_s = static_cast<double>(read.busy_ns) * 1e-9;
  return stats;
}

uint64_t WeightStream::layer_bytes(int layer, LayerPart part) const {
  if (!streams(layer)) return 0;
  const StreamedUnit& unit = weights_->units[unit_of(layer, part)];
  if (part == LayerPart::kKv) return unit.kv_bytes;
  const bool both = part == LayerPart::kAll && weights_->halves;
  return unit.n_bytes +
         (both ? weights_->units[unit_of(layer, LayerPart::kFeedForward)].n_bytes : 0);
}

size_t WeightStream::host_bytes() const {
  return host_ == nullptr ? 0 : ggml_backend_buffer_get_size(host_.get());
}

}  // namespace hcache::engine
