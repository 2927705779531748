// Builds and runs the graphs of one layer: K and V of a mini-batch from activation rows; queries, K
// and V of a group's rows, the attention of each of its pieces, and the rest of the layer.
#pragma once

#include <ggml.h>

#include <array>
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

// What of a group's rows a graph captures, and where in the capture.
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
  };
  Status allocate(const Capacity& capacity);

  // The rows of a step before its first layer: F32 [n_embd, n].
  Status set_rows(const std::vector<float>& rows);
  // Positions and cells of a mini-batch's ACT rows.
  void set_act_rows(const std::vector<int32_t>& positions, const std::vector<int64_t>& cells);
  // K and V of the first n_rows activation rows of the buffer, and copies of device blocks before.
  Status generate(int layer, BatchBuffer& buffer, int64_t n_rows,
                  std::span<const PageLoad> act_loads, std::span<const PageLoad> kv_loads);

  // --- A layer of a group's rows ---------------------------------------------------------------
  // Queries (unless kv_only), K and V of all rows. `capture`, unless null, is where rows are
  // captured to.
  struct Projection {
    int layer = 0;
    bool kv_only = false;
    ggml_tensor* capture = nullptr;
    CaptureLayout layout;
  };
  Status project(const StepPlan& plan, const RowGroup& group, const Projection& projection);
  // Puts K and V of a piece into its mini-batch's buffer; unless kv_only, its rows then attend to
  // what is there. Behind project(); of the groups of context and of those of new rows, one may be
  // under way each.
  Status attend(const StepPlan& plan, int piece, bool kv_only, BatchBuffer& buffer);
  // The rest of the layer, when all pieces have attended: the rows go on to the next one. With
  // attention_only it ends behind the attention block. In the last layer of `wanted` alone (rows of
  // the group, not none): with attention_only they are the group's first ones from here on, else
  // the result is their logits, valid until the next graph. nullptr in all other cases.
  struct Output {
    int layer = 0;
    bool attention_only = false;
    std::vector<int32_t> wanted;
  };
  Result<ggml_tensor*> output(const RowGroup& group, const Output& output);
  // The rest of a layer that ran with attention_only, for rows of the step.
  Status feed_forward(int layer, int64_t first_row, int64_t n_rows);
  // The same of the last layer for any rows of the step: their logits, valid until the next graph.
  Result<ggml_tensor*> finish(const std::vector<int32_t>& rows);

  // Pieces and groups are those of another plan.
  void new_step();
  [[nodiscard]] CaptureLayout capture_layout(int layer, int64_t n_rows, bool act, bool kv) const;

 private:
  // At most, of a layer without ggml's attention.
  [[nodiscard]] size_t n_nodes() const;

  // Of a group under way, max_batch_rows each.
  struct GroupRows {
    TensorPool pool;
    ggml_tensor* q = nullptr;  // F32 [n_embd_q, n]; behind attend() what the rows attended to
    ggml_tensor* k = nullptr;  // F32 [n_embd_kv, n]
    ggml_tensor* v = nullptr;
    ggml_tensor* cells = nullptr;     // I64: of each row in its mini-batch's buffer
    const RowGroup* group = nullptr;  // whose cells these are
  };
  GroupRows& rows_of(const RowGroup& group) { return group_rows_[group.is_context ? 1 : 0]; }
  Status allocate(GroupRows& rows);
  void set_group(const StepPlan& plan, const RowGroup& group);
  void capture(const Graph& g, const Projection& projection, ggml_type type, ggml_tensor* rows,
               int64_t offset, ggml_tensor** written);
  [[nodiscard]] ggml_tensor* step_rows(const Graph& g, int64_t first_row, int64_t n_rows) const;
  [[nodiscard]] int last_layer() const { return model_.hparams().n_layer - 1; }
  static void add_copies(const Graph& g, std::span<const PageLoad> loads);

  const model::Model& model_;
  Stage& stage_;
  HiddenTypes& types_;
  const bool own_attention_;
  Capacity capacity_;

  TensorPool rows_pool_;
  ggml_tensor* rows_ = nullptr;  // F32 [n_embd, n]: between two layers, all groups
  TensorPool inputs_;
  ggml_tensor* act_positions_ = nullptr;                 // I32
  ggml_tensor* act_cells_ = nullptr;                     // I64
  std::array<GroupRows, 2> group_rows_;                  // of new rows, and of context
  std::vector<std::unique_ptr<AttentionOp>> attention_;  // per piece of the step
  const RowGroup* positions_of_ = nullptr;               // the group whose positions the device has
};

}  // namespace hcache::engine
