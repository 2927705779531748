// Lays streamed layers out: their images, their slots, and where their tensors lie in both.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "gguf_file.h"
#include "model/device.h"
#include "model/model.h"
#include "model/streamed_weights.h"

namespace hcache::model {

struct ContextFree {
  void operator()(ggml_context* ctx) const { ggml_free(ctx); }
};
struct BufferFree {
  void operator()(ggml_backend_buffer_t buffer) const { ggml_backend_buffer_free(buffer); }
};
using ContextPtr = std::unique_ptr<ggml_context, ContextFree>;
using BufferPtr = std::unique_ptr<ggml_backend_buffer, BufferFree>;

// One weight of a streamed layer.
struct StreamedSource {
  int layer = 0;  // of the model
  ggml_tensor** target = nullptr;
  std::function<ggml_tensor*(ggml_context*)> create;
  size_t part = 0;                 // of the model's files
  std::span<const uint8_t> bytes;  // in that one's mapping
  bool is_kv = false;
  bool is_feed_forward = false;  // of the second half
};

// What a layer's attention needs, and what its feed-forward block needs.
std::array<std::vector<StreamedSource>, 2> halves_of(std::span<const StreamedSource> layer);

// The block-wise ranges of the files that hold these weights, as an image: what a slot needs.
struct UnitImage {
  StreamedUnit unit;  // without tensors
  size_t n_bytes = 0;
  std::vector<size_t> offsets;  // of the sources, in their order
};
UnitImage image_of(const GgufFile& file, std::span<const StreamedSource> sources);

// The result with what it consists of.
struct StreamedLayers {
  StreamedWeights weights;
  std::vector<ContextPtr> contexts;
  std::vector<BufferPtr> buffers;
};
// `sources` in the order of their layers, which are the last ones of the model. With `halves` a
// layer is two units. kHost reads the weights here. kResourceExhausted where the device or the host
// has no room, kUnimplemented where the device can't have two units in one place.
Result<std::unique_ptr<StreamedLayers>> lay_out_streamed(const GgufFile& file, Device& device,
                                                         WeightPlace place, bool halves, Env& env,
                                                         std::span<const StreamedSource> sources,
                                                         const Progress& progress);

}  // namespace hcache::model
