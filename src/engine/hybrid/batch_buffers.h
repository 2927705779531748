// The buffers that mini-batches are computed in: K and V of one layer for all sequences of a
// mini-batch, and the activation rows that some of them are generated from; and how a layer's
// blocks get there.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "block_io.h"
#include "block_store.h"
#include "engine/copy_queue.h"
#include "host_buffer.h"
#include "model/device.h"
#include "step_plan.h"
#include "tensor_pool.h"

namespace hcache::engine {

struct BatchBuffer {
  TensorPool memory;
  TensorPool tensors;            // in that memory
  ggml_tensor* block = nullptr;  // I8: all of it
  ggml_tensor* k = nullptr;      // [n_embd_kv, cells]
  ggml_tensor* v = nullptr;
  ggml_tensor* act = nullptr;    // I8 [rows * widest row]
  HostBuffer landing;            // where reads arrive, unless they arrive in place
  CopyQueue::Ticket upload = 0;  // the last copy into it
  CopyQueue::Mark used = 0;      // behind the last graph that read it
};

// Where the rows of an ACT block lie in the ACT buffer, and in the KV buffer what comes of them.
struct ActRun {
  int64_t first_pos = 0;  // in the sequence
  int64_t n_rows = 0;
  int64_t first_row = 0;   // of the ACT buffer
  int64_t first_cell = 0;  // of the KV buffer
};

// Rows of one page on their way to a buffer.
struct PageLoad {
  ggml_tensor* target = nullptr;  // k, v or act of the buffer
  size_t offset = 0;              // in bytes
  size_t n_bytes = 0;
  PageTransfer read{};                  // of a block on disk; or
  const std::byte* host = nullptr;      // of one in host memory; or
  const ggml_tensor* device = nullptr;  // of one on the device,
  size_t device_offset = 0;             // from here on

  friend bool operator==(const PageLoad&, const PageLoad&) = default;
};

// What one layer of a mini-batch needs before it is computed.
struct LayerLoad {
  std::vector<PageLoad> act;
  std::vector<PageLoad> kv;
};

// Threading: the engine's thread.
class BatchBuffers {
 public:
  struct Shape {
    int n_buffers = 2;
    int64_t buffer_tokens = 0;
    int64_t n_cells = 0;  // padding included
    int64_t spare_act_rows = 0;
    int64_t n_embd_kv = 0;
    ggml_type kv_type = GGML_TYPE_F16;
    bool in_place = false;  // reads arrive in the buffers themselves
    bool from_disk = false;
  };
  // What is passed must outlive it.
  BatchBuffers(model::Device& device, CopyQueue& queue, const BlockStore& store,
               const BlockLayout& layout)
      : device_(device), queue_(queue), store_(store), layout_(layout) {}
  Status allocate(const Shape& shape);

  [[nodiscard]] BatchBuffer& at(uint64_t task) { return *buffers_[task % buffers_.size()]; }
  [[nodiscard]] size_t size() const { return buffers_.size(); }

  // The ACT blocks of a mini-batch in the order of its buffer. `blocks`: per member.
  [[nodiscard]] std::vector<ActRun> act_runs(
      const MiniBatch& batch, std::span<const std::vector<BlockStore::Id>* const> blocks) const;
  // The pages that a layer needs in `buffer`; none in layers that are recomputed.
  [[nodiscard]] LayerLoad loads(BatchBuffer& buffer, int layer, const MiniBatch& batch,
                                std::span<const std::vector<BlockStore::Id>* const> blocks) const;
  // The reads among them; neighbours on disk and in the buffer become one.
  [[nodiscard]] static std::vector<PageTransfer> reads(const std::vector<PageLoad>& loads);
  // Copies pages in host memory, and those that have been read, into the buffer, behind the graphs
  // that used it last.
  void upload(BatchBuffer& buffer, const std::vector<PageLoad>& loads);
  // Makes the graphs that are built from here on wait for the uploads.
  void before_compute(BatchBuffer& buffer) { queue_.before_compute(buffer.upload); }
  // Graphs that read the buffer have been given to the queue.
  void used(BatchBuffer& buffer) { buffer.used = queue_.mark_compute(); }
  // Blocks until reads may arrive for the buffer's next mini-batch.
  void wait_for_landing(const BatchBuffer& buffer) { queue_.wait(buffer.upload); }

  [[nodiscard]] size_t n_bytes() const;

 private:
  Status allocate(BatchBuffer& buffer, const Shape& shape);
  // Where what is read for `offset` of a tensor arrives.
  [[nodiscard]] std::byte* landing(const BatchBuffer& buffer, const ggml_tensor* target) const;
  // Visits the ACT blocks of a mini-batch in the order of their rows in the buffer: complete ones
  // first, so that these lie at multiples of a block, where direct reads may arrive.
  template <typename Visit>
  void visit_act(const MiniBatch& batch, std::span<const std::vector<BlockStore::Id>* const> blocks,
                 const Visit& visit) const;
  void add_page(const BatchBuffer& buffer, BlockStore::Id id, int layer, int part, int64_t n_rows,
                ggml_tensor* target, int64_t row, std::vector<PageLoad>* loads) const;

  model::Device& device_;
  CopyQueue& queue_;
  const BlockStore& store_;
  const BlockLayout& layout_;
  Shape shape_;
  std::vector<std::unique_ptr<BatchBuffer>> buffers_;
};

}  // namespace hcache::engine
