// The life of a step: prepared over the sequences, run layer range by layer range through the
// stages, and finished.
#pragma once

#include <span>
#include <vector>

#include "arena_rows.h"
#include "base/status.h"
#include "capture_tap.h"
#include "engine/engine.h"
#include "engine/weight_stream.h"
#include "hidden_types.h"
#include "model/model.h"
#include "sequences.h"
#include "shared_layers.h"
#include "stage.h"
#include "step_graphs.h"
#include "step_state.h"
#include "token_table.h"

namespace hcache::engine {

// Threading: the engine's thread.
class StepRunner {
 public:
  StepRunner(const model::Model& model, const EngineOptions& options, Sequences& sequences,
             ArenaRows& rows, const Stages& stages, HiddenTypes& types, CaptureTap& tap,
             TokenTable& table, WeightStream& weights);

  // See Engine.
  Status prepare(std::span<const BatchItem> items, StepState& step);
  Status run_layers(StepState& step, int end);
  Status check_range(const StepState& step, int begin, int end) const;
  Status finish_with_kv(StepState& step, int layer);
  Result<Logits> finish(StepState& step);
  // The step ends without having been finished: the room that was reserved for it is given back.
  void abandon(StepState& step);
  // See Engine.
  [[nodiscard]] Status can_observe() const;
  Status observe(const ObservedRows& rows, AttentionScores* scores);
  // What the tap captures has changed.
  void capture_changed() { graphs_.forget_last(); }

 private:
  Status add_segments(std::span<const BatchItem> items, StepState& step, int64_t& n_new_cells);
  Status add_rows(std::span<const BatchItem> items, StepState& step);
  // Which rows are wanted, and what of them.
  static void add_outputs(std::span<const BatchItem> items, StepState& step);
  void add_adapters(StepState& step) const;
  Status check_room(const StepState& step) const;
  // The rows' windows are there.
  [[nodiscard]] Status check_windows(const StepState& step) const;
  void place(StepState& step);
  // Tells the attention of layers [begin, end) which of the step's rows are observed.
  void observe(const StepState& step, int begin, int end);
  Status run_stage(Stage& stage, StepState& step, int end, bool kv_only_last);
  Status run_shared(StepState& step, int end, bool kv_only_last);
  void fetch(const StepOutputs& outputs, Stage& stage, StepState& step);
  // What of a layer's weights the step needs; more than one half where they come by halves.
  [[nodiscard]] std::vector<model::LayerPart> parts_of(const StepState& step, int layer,
                                                       bool kv_only) const;
  Status run_range(StepState& step, int end, bool kv_only_last);
  void end_step(StepState& step);

  const model::Model& model_;
  const EngineOptions& options_;
  Sequences& sequences_;
  ArenaRows& rows_;
  const Stages& stages_;
  CaptureTap& tap_;
  TokenTable& table_;
  WeightStream& weights_;
  StepGraphs graphs_;
  SharedLayers shared_;
  ObservedRows observed_;
  AttentionScores* scores_ = nullptr;
  std::vector<float> logits_;        // of the step that was finished last
  std::vector<float> hidden_;        // the same
  std::vector<float> spare_x_;       // memory for another step's rows
  std::vector<float> spare_logits_;  // memory for another step's
};

}  // namespace hcache::engine
