// A run of consecutive layers on one device, with what runs there: the compute queue's graphs, the
// copy queue, the KV arena, and a step's inputs. A step passes its rows from stage to stage.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <memory>
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
  int n_groups = 1;     // of rows, see Sequences
  int64_t n_cells = 0;  // of the arena
};

// Threading: the engine's thread.
class Stage {
 public:
  Stage(const model::Model& model, const EngineOptions& options, StageOptions stage);
  ~Stage() { close(); }
  Stage(const Stage&) = delete;
  Stage& operator=(const Stage&) = delete;

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
  // positions() was overwritten.
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

  [[nodiscard]] ggml_tensor* rows() const { return rows_; }                    // F32 [n_embd, n]
  [[nodiscard]] ggml_tensor* positions() const { return positions_; }          // I32 [n]
  [[nodiscard]] ggml_tensor* cells(int group) const { return cells_[group]; }  // I64 [n]
  [[nodiscard]] ggml_tensor* output_rows() const { return output_rows_; }      // I32 [n]
  [[nodiscard]] ggml_tensor* token_rows() const { return token_rows_; }        // I32 [n]
  [[nodiscard]] ggml_tensor* table_rows() const { return table_rows_; }        // I64 [n]
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
  const StepState* loaded_ = nullptr;  // whose inputs the device holds
  uint64_t loaded_epoch_ = 0;          // and as of which placed_epoch
  const StepState* computed_last_ = nullptr;
  StepState* rows_owner_ = nullptr;  // the step between two layer ranges whose rows rows_ holds
};

// The stages of an engine, in the layers' order.
class Stages {
 public:
  explicit Stages(std::vector<std::unique_ptr<Stage>> stages);
  [[nodiscard]] Stage& of(int layer) const { return *by_layer_[layer]; }
  [[nodiscard]] Stage& front() const { return *stages_.front(); }
  [[nodiscard]] size_t size() const { return stages_.size(); }
  [[nodiscard]] auto begin() const { return stages_.begin(); }
  [[nodiscard]] auto end() const { return stages_.end(); }
  void synchronize() const;
  void wait_for_uploads() const;

 private:
  std::vector<std::unique_ptr<Stage>> stages_;
  std::vector<Stage*> by_layer_;
};

}  // namespace hcache::engine
