// A run of consecutive layers on one device, with what runs there: the compute queue's graphs, the
// copy queue, the KV arena, and a step's inputs. A step passes its rows from stage to stage. Where
// devices share every layer, each has a stage of all layers, which computes that device's part.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "attention_op.h"
#include "base/status.h"
#include "engine/compute_queue.h"
#include "engine/copy_queue.h"
#include "engine/engine.h"
#include "graph_runner.h"
#include "kv_arena.h"
#include "model/model.h"
#include "step_state.h"
#include "tensor_pool.h"

namespace hcache::engine {

struct StageOptions {
  int index = 0;  // among the stages
  int begin = 0;  // first layer
  int end = 0;    // behind the last
  model::Device* device = nullptr;
  DeviceQueues queues;
  bool own_attention = false;
  int n_groups = 1;                // of rows, see Sequences
  std::vector<int64_t> windows{};  // of each group's attention; empty: none has one
  std::vector<int64_t> cells{};    // of each layer's arena, from `begin` on
};

// Threading: the engine's thread.
class Stage {
 public:
  // `model`: a part of the engine's where devices share every layer.
  Stage(const model::Model& model, const EngineOptions& options, StageOptions stage);
  ~Stage() { close(); }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

  // What the stage computes: the model, or the part of it that the device has.
  [[nodiscard]] const model::Model& model() const { return model_; }

  // Device memory for the arena and a step's inputs.
  Status allocate();
  // Ends all computing and copying; nothing may be asked of the stage after that.
  void close();

  // Puts the step's rows and inputs on the device unless they are there; rows of another step that
  // is between two layer ranges go to the host. `placed` must be the arena's present state.
  Status load(StepState& step);
  // The step's rows, if they are here, go to another stage's device.
  void pass_rows_to(Stage& next, StepState& step);
  // The rows that wait between two layer ranges, if any, go to the host; rows() is free then.
  void spill_rows();
  // Nothing of the step is needed any more.
  void forget(const StepState& step);
  // Waits for what was computed before the last call of this: a step whose results nobody reads
  // runs on while the host prepares the next one, but the host is never two steps ahead.
  void wait_for_step_before();
  // positions() or cells() were overwritten.
  void inputs_overwritten() { loaded_ = nullptr; }
  void set_rows_owner(StepState* step) { rows_owner_ = step; }
  // Whether no other step's graph was given to the device since this step's.
  [[nodiscard]] bool computed_last(const StepState& step) const { return computed_last_ == &step; }
  void set_computed_last(const StepState* step) { computed_last_ = step; }

  [[nodiscard]] int index() const { return options_.index; }
  [[nodiscard]] int begin() const { return options_.begin; }
  [[nodiscard]] int end() const { return options_.end; }
  [[nodiscard]] model::Device& device() const { return *options_.device; }
  [[nodiscard]] CopyQueue& queue() const { return *options_.queues.copy; }
  [[nodiscard]] GraphRunner& graphs() { return graphs_; }
  [[nodiscard]] KvArena& arena() { return arena_; }
  [[nodiscard]] AttentionOp& attention(int group) { return *attention_[group]; }
  [[nodiscard]] const EngineOptions& engine_options() const { return engine_options_; }
  // AttentionOp::layout() of all groups together.
  [[nodiscard]] uint64_t attention_layout() const;

  [[nodiscard]] ggml_tensor* rows() const { return rows_; }                    // F32 [n_embd, n]
  [[nodiscard]] ggml_tensor* positions() const { return positions_; }          // I32 [n]
  [[nodiscard]] ggml_tensor* cells(int group) const { return cells_[group]; }  // I64 [n]
  [[nodiscard]] ggml_tensor* output_rows() const { return output_rows_; }      // I32 [n]
  [[nodiscard]] ggml_tensor* token_rows() const { return token_rows_; }        // I32 [n]
  [[nodiscard]] ggml_tensor* table_rows() const { return table_rows_; }        // I64 [n]
  // Of the step that is loaded, by how much each adapter counts for each row; see StepState.
  [[nodiscard]] ggml_tensor* adapter_scales() const { return adapter_scales_; }  // F32
  // The first n numbers: 0, 1, 2, ... (I64).
  [[nodiscard]] ggml_tensor* order(ggml_context* ctx, int64_t n) const {
    return ggml_view_1d(ctx, order_, n, 0);
  }

  [[nodiscard]] size_t n_bytes() const;

 private:
  const model::Model& model_;
  const EngineOptions engine_options_;
  StageOptions options_;
  GraphRunner graphs_;
  KvArena arena_;
  std::vector<std::unique_ptr<AttentionOp>> attention_;  // per row group

  // Of max_batch_rows rows each.
  TensorPool inputs_;
  ggml_tensor* rows_ = nullptr;  // between two layer ranges, or two stages
  ggml_tensor* positions_ = nullptr;
  std::vector<ggml_tensor*> cells_;
  ggml_tensor* order_ = nullptr;
  ggml_tensor* output_rows_ = nullptr;
  ggml_tensor* token_rows_ = nullptr;
  ggml_tensor* table_rows_ = nullptr;
  ggml_tensor* adapter_scales_ = nullptr;  // null: the model has none
  const StepState* loaded_ = nullptr;      // whose inputs the device holds
  uint64_t loaded_epoch_ = 0;              // and as of which placed_epoch
  const StepState* computed_last_ = nullptr;
  CopyQueue::Mark not_waited_for_ = 0;  // behind the last step that finished without waiting
  StepState* rows_owner_ = nullptr;     // the step between two layer ranges whose rows rows_ holds
};

// The stages of an engine, in the layers' order; where devices share every layer, in the order of
// the parts.
class Stages {
 public:
  explicit Stages(std::vector<std::unique_ptr<Stage>> stages);
  // The stage that computes a layer; of several that share it the first, which has the rows that
  // all of them have.
  [[nodiscard]] Stage& of(int layer) const { return *members(layer).front(); }
  // All stages that compute a layer.
  [[nodiscard]] std::span<Stage* const> members(int layer) const {
    return shares_layers_ ? std::span<Stage* const>(by_layer_)
                          : std::span<Stage* const>(by_layer_).subspan(layer, 1);
  }
  // Whether each stage computes its part of every layer.
  [[nodiscard]] bool shares_layers() const { return shares_layers_; }
  [[nodiscard]] Stage& front() const { return *stages_.front(); }
  [[nodiscard]] size_t size() const { return stages_.size(); }
  [[nodiscard]] auto begin() const { return stages_.begin(); }
  [[nodiscard]] auto end() const { return stages_.end(); }
  void synchronize() const;
  void wait_for_uploads() const;

 private:
  std::vector<std::unique_ptr<Stage>> stages_;
  bool shares_layers_ = false;
  std::vector<Stage*> by_layer_;  // each stage once where they share the layers
};

}  // namespace hcache::engine
