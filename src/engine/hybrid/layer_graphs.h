// Builds and runs the graphs of one layer for one mini-batch: K and V from activation rows, and the
// forward pass of a piece's rows.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention_op.h"
#include "base/status.h"
#include "batch_buffers.h"
#include "hidden_types.h"
#include "model/graph.h"
#include "model/model.h"
#include "stage.h"
#include "step_plan.h"
#include "store_ring.h"
#include "tensor_pool.h"

namespace hcache::engine {

// What of a piece's rows a graph captures, and where in the capture.
struct CaptureLayout {
  int64_t act_offset = -1;  // -1: not captured
  int64_t k_offset = -1;
  int64_t v_offset = -1;
  size_t n_bytes = 0;
};

// Threading: the engine's thread.
class LayerGraphs {
 public:
  // What is passed must outlive it. `stage` provides the device's queues and graphs.
  LayerGraphs(const model::Model& model, Stage& stage, HiddenTypes& types, bool own_attention)
      : model_(model), stage_(stage), types_(types), own_attention_(own_attention) {}

  struct Capacity {
    int64_t buffer_tokens = 0;
    int max_batch_rows = 0;
    int least_rows = 1;
    int64_t pad_cell = 0;  // the first of least_rows cells that padding rows write
  };
  Status allocate(const Capacity& capacity);

  // The rows of a step before its first layer: F32 [n_embd, n].
  Status set_rows(const std::vector<float>& rows);
  // Positions and cells of a mini-batch's ACT rows.
  void set_act_rows(const std::vector<int32_t>& positions, const std::vector<int64_t>& cells);
  // K and V of the first n_rows activation rows of the buffer, and copies of device blocks before.
  Status generate(int layer, BatchBuffer& buffer, int64_t n_rows,
                  std::span<const PageLoad> act_loads, std::span<const PageLoad> kv_loads);

  // Runs a layer for a piece's rows, which stay on the device for the next layer. With kv_only it
  // ends with K and V; with attention_only behind the attention block, where in the last layer the
  // wanted rows are the piece's first ones. `capture`, unless null, is where rows are captured to.
  // Logits of `wanted` (rows of the piece) when it is the last layer and there are any, valid until
  // the next graph; else nullptr.
  struct Forward {
    int layer = 0;
    const MiniBatch* batch = nullptr;
    const Piece* piece = nullptr;
    bool kv_only = false;
    bool attention_only = false;
    ggml_tensor* capture = nullptr;
    CaptureLayout layout;
    std::vector<int32_t> wanted;
  };
  Result<ggml_tensor*> forward(BatchBuffer& buffer, const Forward& forward);
  // The rest of a layer that ran with attention_only, for rows of the step.
  Status feed_forward(int layer, int64_t first_row, int64_t n_rows);
  // The same of the last layer for any rows of the step: their logits, valid until the next graph.
  Result<ggml_tensor*> finish(const std::vector<int32_t>& rows);

  // A piece begins to be used by another step.
  void new_step() { inputs_of_ = -1; }
  [[nodiscard]] CaptureLayout capture_layout(int layer, int64_t n_rows, bool act, bool kv) const;

 private:
  Status set_piece(const Forward& forward);
  ggml_tensor* build_kv(const Graph& g, const Forward& forward, BatchBuffer& buffer,
                        ggml_tensor* hidden);
  void capture(const Graph& g, const Forward& forward, ggml_type type, ggml_tensor* rows,
               int64_t offset, ggml_tensor** written);
  ggml_tensor* build_outputs(const Graph& g, const Forward& forward, ggml_tensor* x,
                             ggml_tensor* hidden, ggml_tensor* attention);
  void keep_attention(const Graph& g, const Forward& forward, ggml_tensor* x,
                      ggml_tensor* attention);
  [[nodiscard]] ggml_tensor* step_rows(const Graph& g, int64_t first_row, int64_t n_rows) const;
  [[nodiscard]] int last_layer() const { return model_.hparams().n_layer - 1; }
  static void add_copies(const Graph& g, std::span<const PageLoad> loads);

  const model::Model& model_;
  Stage& stage_;
  HiddenTypes& types_;
  const bool own_attention_;
  Capacity capacity_;

  TensorPool rows_pool_;
  ggml_tensor* rows_ = nullptr;  // F32 [n_embd, n]: between two layers, all pieces
  TensorPool inputs_;
  ggml_tensor* act_positions_ = nullptr;                 // I32
  ggml_tensor* act_cells_ = nullptr;                     // I64
  ggml_tensor* cells_ = nullptr;                         // I64, of a piece
  std::vector<std::unique_ptr<AttentionOp>> attention_;  // per piece of the step
  int inputs_of_ = -1;  // the piece whose positions and cells the device has
};

}  // namespace hcache::engine
