#include "engine/weight_stream.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/units.h"
#include "weight_reader.h"

namespace hcache::engine {

using model::LayerPart;
using model::StreamedLayer;
using model::StreamedTensor;

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
    const size_t image = weights_->image_bytes;
    host_.reset(
        ggml_backend_buft_alloc_buffer(model_.device().host_buffer_type(), 2 * image + kBlock));
    if (host_ == nullptr) {
      return resource_exhausted(
          fmt::format("no {} of host memory to read weights into", format_bytes(2 * image)));
    }
    const auto base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(host_.get()));
    images_[0] = reinterpret_cast<std::byte*>((base + kBlock - 1) / kBlock * kBlock);
    images_[1] = images_[0] + image;
  }
  HCACHE_ASSIGN_OR_RETURN(reader_, WeightReader::open(*weights_, images_));
  return {};
}

int WeightStream::graph_end(int begin, int end) const {
  return streams(begin) ? std::min(begin + 1, end) : std::min(end, first_);
}

// With two layers or fewer each stays in its slot.
size_t WeightStream::next_in_slot(size_t index) const {
  return index + 2 < weights_->layers.size() ? index + 2 : index % 2;
}

bool WeightStream::is_there(size_t index, LayerPart part) {
  if (!uploads_) return reader_->ready(index, part);
  const Slot& slot = slot_of(index);
  return slot.layer == static_cast<int64_t>(index) && slot.has_kv &&
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

// The copy queue reads what the layer's image holds.
void WeightStream::upload(size_t index, LayerPart part) {
  Slot& slot = slot_of(index);
  const StreamedLayer& layer = weights_->layers[index];
  if (slot.layer != static_cast<int64_t>(index)) {
    queue_.after_compute(slot.mark);
    slot = {.layer = static_cast<int64_t>(index), .ticket = slot.ticket, .mark = slot.mark};
  }
  const std::byte* image = layer.host != nullptr ? layer.host : images_.at(index % 2);
  const bool wants_rest = part == LayerPart::kAll;
  for (const StreamedTensor& t : layer.tensors) {
    if (t.is_kv ? slot.has_kv : (slot.has_rest || !wants_rest)) continue;
    slot.ticket = queue_.upload(t.tensor, 0, image + t.image_offset, t.n_bytes);
    if (reader_ == nullptr) uploaded_ += t.n_bytes;
  }
  slot.has_kv = true;
  slot.has_rest = slot.has_rest || wants_rest;
}

Status WeightStream::acquire(int layer, LayerPart part) {
  if (!streams(layer)) return {};
  if (held_ >= 0) {
    return failed_precondition(fmt::format(
        "layer {}'s weights are wanted while those of layer {} are in use", layer, held_));
  }
  const auto index = static_cast<size_t>(layer - first_);
  if (!is_there(index, part)) ++layers_;
  begin(index, part);
  const size_t n_layers = weights_->layers.size();
  const size_t next = (index + 1) % n_layers;
  const bool has_next = read_ahead_ && next % 2 != index % 2;
  if (has_next) begin(next, part);
  if (reader_ != nullptr && !is_there(index, part) && !reader_->ready(index, part)) {
    Env& env = *weights_->env;
    const int64_t start_ns = env.monotonic_ns();
    const Status status = reader_->wait(index, part);
    wait_ns_ += env.monotonic_ns() - start_ns;
    HCACHE_RETURN_IF_ERROR(status);
  }
  if (uploads_) {
    if (!is_there(index, part)) upload(index, part);
    queue_.before_compute(slot_of(index).ticket);
    // Beside this layer's graphs.
    const bool has_image = has_next && (reader_ == nullptr || reader_->ready(next, part));
    if (has_image && !is_there(next, part)) upload(next, part);
  }
  held_ = layer;
  held_part_ = part;
  return {};
}

void WeightStream::release(int layer) {
  if (layer != held_) return;
  held_ = -1;
  const auto index = static_cast<size_t>(layer - first_);
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
  if (reader_ == nullptr) return stats;
  const WeightReader::Counters read = reader_->counters();
  stats.bytes = read.bytes_read;
  stats.read_errors = read.errors;
  stats.read_s = static_cast<double>(read.busy_ns) * 1e-9;
  return stats;
}

uint64_t WeightStream::layer_bytes(int layer, LayerPart part) const {
  if (!streams(layer)) return 0;
  const StreamedLayer& l = weights_->layers[static_cast<size_t>(layer - first_)];
  return part == LayerPart::kKv ? l.kv_bytes : l.n_bytes;
}

size_t WeightStream::host_bytes() const {
  return host_ == nullptr ? 0 : ggml_backend_buffer_get_size(host_.get());
}

}  // namespace hcache::engine
