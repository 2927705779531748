// Weights that do not stay on the device: where a layer's bytes lie in the file, and where they go.
//
// The layers behind the resident ones are streamed in *units*: whole layers, or, where two of those
// have no room, the halves of each, its attention and its feed-forward block. The units' tensors
// share two slots of device memory, unit i (counted from the first streamed one) lies in slot
// i mod 2, and before a graph that uses a unit runs its slot must have been filled.
// engine/weight_stream.h does that.
//
// A unit's bytes are moved as an *image*: the ranges of the files that hold its tensors, in whole
// blocks of kDirectAlignment, one behind the other. Every tensor lies in the image as it lies in
// the file, modulo the block, so direct I/O can fill an image without a copy.
#pragma once

#include <ggml.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/status.h"

namespace hcache::model {

// Where the weights of layers are kept.
enum class WeightPlace {
  kAuto,      // resident where they fit, else in host memory, else on disk
  kResident,  // all on the device
  kHost,      // in host memory, but for the first ones; only on devices with memory of their own
  kDisk,      // in the model's file, but for the first ones
};
// "auto", "resident", "host", "disk". kInvalidArgument names what there is.
[[nodiscard]] Result<WeightPlace> parse_weight_place(std::string_view name);
[[nodiscard]] std::string_view weight_place_name(WeightPlace place);

// Which of a layer's weights are wanted.
enum class LayerPart {
  kKv,           // what K and V of rows that have run through the layer before need: the norm
                 // before attention, W_k and W_v with their biases and norms
  kAttention,    // the first half: all up to the residual behind attention
  kFeedForward,  // the second half: the rest
  kAll,          // the whole layer
};

// A range of a file and where it goes in the unit's image. Offsets and n_bytes are multiples of
// kDirectAlignment.
struct WeightPiece {
  size_t file = 0;  // of StreamedWeights::files
  uint64_t file_offset = 0;
  size_t image_offset = 0;
  size_t n_bytes = 0;
  size_t file_bytes = 0;  // n_bytes, or less where the file ends
};

struct StreamedTensor {
  ggml_tensor* tensor = nullptr;  // in the unit's slot
  size_t image_offset = 0;
  size_t n_bytes = 0;
  bool is_kv = false;  // part of LayerPart::kKv
};

struct StreamedFile {
  std::string path;
  FileIdentity identity;
};

// A layer, or half of one.
struct StreamedUnit {
  std::vector<WeightPiece> pieces;  // those that LayerPart::kKv needs come first
  size_t n_kv_pieces = 0;
  std::vector<StreamedTensor> tensors;
  uint64_t kv_bytes = 0;            // of the pieces of LayerPart::kKv
  uint64_t n_bytes = 0;             // of all pieces
  const std::byte* host = nullptr;  // the image in host memory; null: it is on disk
};

// Immutable but for `claimed`.
struct StreamedWeights {
  WeightPlace place = WeightPlace::kDisk;  // or kHost
  Env* env = nullptr;
  // What the model's file is split into, one at least, as they were when their headers were read.
  std::vector<StreamedFile> files;
  int first_layer = 0;  // all layers from here on are streamed
  bool halves = false;  // a layer is two units: its attention, then its feed-forward block
  std::vector<StreamedUnit> units;
  std::array<size_t, 2> image_bytes{};  // of the largest image of each slot
  std::array<size_t, 2> slot_bytes{};   // device memory of each slot; 0: there is none
  // Where the host may write a unit's image straight into its slot; null where the device's memory
  // or the tensors' alignment in the file don't allow it.
  std::array<std::byte*, 2> slots{};
  // Whether a stream fills the slots; one at a time may.
  mutable std::atomic<bool> claimed = false;

  [[nodiscard]] int n_layers() const { return static_cast<int>(units.size()) / (halves ? 2 : 1); }
  [[nodiscard]] uint64_t n_bytes() const;
  // "28 streamed from disk (9GiB for a step) through 2 slots of 330MiB"
  [[nodiscard]] std::string describe() const;
};

// What decides how many layers stay on the device.
struct WeightSizes {
  uint64_t shared_bytes = 0;          // what belongs to no layer and is always on the device
  std::vector<uint64_t> layer_bytes;  // on the device, where the layer is resident
  std::vector<uint64_t> slot_bytes;   // that a slot needs for the layer
  // The same for its halves; empty where layers can't be halved.
  std::vector<std::array<uint64_t, 2>> half_bytes{};
};
struct WeightRoom {
  bool device_limited = false;  // by the user, and not only by what is free
  uint64_t device_bytes = 0;    // that weights may take on the device
  uint64_t host_bytes = 0;      // that weights may take in host memory beside the device's
  bool own_memory = false;      // the device's memory is not the host's
};
struct WeightPlan {
  WeightPlace place = WeightPlace::kResident;  // never kAuto
  int n_resident = 0;                          // leading layers that stay on the device
  bool halves = false;                         // the others come half by half
};
// kHost and kDisk stream every layer unless the device's memory was limited by the user: then as
// many leading layers as fit beside two slots stay, and everything does that fits. kAuto streams
// only what does not fit. Layers are halved where two whole ones don't fit beside the rest.
// kResourceExhausted says how much is wanted, where not even the slots fit, or the user's limit is
// too small for kResident; kInvalidArgument for kHost without own_memory.
[[nodiscard]] Result<WeightPlan> plan_weights(WeightPlace wanted, const WeightSizes& sizes,
                                              const WeightRoom& room);

}  // namespace hcache::model
