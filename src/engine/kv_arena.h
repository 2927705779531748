// K and V of a stage's layers: one tensor each per layer, [n_embd_kv, cells], and what is done to
// rows of them outside of steps. Which cells are whose is decided by Sequences.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "arena.h"
#include "base/status.h"
#include "engine/copy_queue.h"
#include "engine/engine.h"
#include "graph_runner.h"
#include "model/model.h"
#include "tensor_pool.h"

namespace hcache::engine {

// Threading: the engine's thread.
class KvArena {
 public:
  // Of layers [begin, end). What is passed must outlive it.
  KvArena(const model::Model& model, const EngineOptions& options, int begin, int end,
          GraphRunner& graphs, CopyQueue& queue);
  // cells[i]: of layer begin + i.
  Status allocate(std::span<const int64_t> cells);

  [[nodiscard]] ggml_tensor* k(int layer) const { return k_[layer - begin_]; }
  [[nodiscard]] ggml_tensor* v(int layer) const { return v_[layer - begin_]; }
  // Rows [cell, cell + n) of one of them.
  static ggml_tensor* rows(ggml_context* ctx, ggml_tensor* arena, int64_t cell, int64_t n);

  // The same as whole numbers of as many bytes: backends copy rows of floats and of these from and
  // to any cell. Of blocks they may want the first at an aligned address (Vulkan: the offset of
  // what a shader is bound to is passed to it in blocks, and the rest of it is lost).
  static ggml_tensor* words(ggml_context* ctx, ggml_tensor* arena, int64_t cell, int64_t n);

  // Moves rows of a layer; source and target may overlap.
  Status move_rows(int layer, const ExtentAllocator::Move& move);
  // Re-rotates K of cells [cell, cell + n) of a layer, max_batch_rows at most. `deltas`: I32, by
  // how many positions each.
  Status shift_k(int layer, int64_t cell, int64_t n, ggml_tensor* deltas);

  // Host to arena, through the copy queue: n rows of K and of V.
  CopyQueue::Ticket upload(int layer, int64_t cell, int n, const std::byte* k, const std::byte* v);
  // The last upload into any of layers [begin, end).
  [[nodiscard]] CopyQueue::Ticket last_upload(int begin, int end) const;
  // Blocks until no upload is under way.
  void wait_for_uploads();
  // Arena to host, at once; what was enqueued must be complete.
  void read(int layer, int64_t cell, int n, std::byte* k, std::byte* v) const;

  [[nodiscard]] size_t row_bytes() const;  // of K, and of V
  // Of a part's heads: where their bytes begin within a row of all heads.
  [[nodiscard]] size_t row_offset() const;
  [[nodiscard]] size_t n_bytes() const { return pool_.n_bytes(); }

 private:
  const model::Model& model_;
  const EngineOptions& options_;
  int begin_;
  int end_;
  GraphRunner& graphs_;
  CopyQueue& queue_;
  TensorPool pool_;
  std::vector<ggml_tensor*> k_;  // per layer
  std::vector<ggml_tensor*> v_;
  ggml_tensor* turned_ = nullptr;  // rows of blocks while they are rotated, see words()
  std::vector<CopyQueue::Ticket> last_upload_;  // per layer
};

}  // namespace hcache::engine
