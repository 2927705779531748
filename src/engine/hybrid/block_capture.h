// What a batch computed, on its way to whoever saves it: a block of rows each time, as a step's
// capture of one sequence.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "block_store.h"
#include "engine/engine.h"

namespace hcache::engine {

// Threading: the engine's thread, between steps.
class BlockCapture {
 public:
  // `act_types`: per layer, COUNT where no activation rows are kept. The rest must outlive it.
  BlockCapture(const BlockLayout& layout, const BlockStore& store, ggml_type kv_type,
               std::vector<ggml_type> act_types)
      : layout_(layout), store_(store), kv_type_(kv_type), act_types_(std::move(act_types)) {}

  void set(CaptureSink* sink) { sink_ = sink; }
  [[nodiscard]] ggml_type act_type(int layer) const {
    return act_types_[static_cast<size_t>(layer)];
  }
  // Copies the first n_rows rows of a block in host memory into the sink, unless it has no room.
  // Blocks that hold nothing are left out: the sink sees the gap.
  void give(RequestId id, BlockStore::Id block, int64_t first_pos, int n_rows) const;

 private:
  const BlockLayout& layout_;
  const BlockStore& store_;
  const ggml_type kv_type_;
  const std::vector<ggml_type> act_types_;
  CaptureSink* sink_ = nullptr;
};

}  // namespace hcache::engine
