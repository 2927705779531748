// Layers that several devices share (tensor parallelism, HCache §5): each device computes its heads
// and its feed-forward columns, and what they give is added up on the host.
#pragma once

#include <ggml.h>

#include <vector>

#include "base/status.h"
#include "model/model.h"
#include "stage.h"
#include "step_graphs.h"
#include "step_state.h"

namespace hcache::engine {

// A layer is two pieces, attention and feed-forward, or one where the architecture computes both
// from the same rows. Behind each the devices' results are summed in the order of the parts, so
// that a run gives the same bits each time, and the sum goes to all of them.
//
// Threading: the engine's thread.
class SharedLayers {
 public:
  SharedLayers(const model::Model& model, const Stages& stages, StepGraphs& graphs)
      : model_(model), stages_(stages), graphs_(graphs) {}

  // Runs layers [begin, end) of the step; with kv_only_last the last of them computes K and V
  // alone. The step's rows are on the host before and behind. Returns the logits, which are the
  // first stage's until its next graph, or nullptr where the range has none.
  Result<ggml_tensor*> run(StepState& step, int begin, int end, bool kv_only_last);

 private:
  Status run_piece(StepState& step, int layer, StepGraphs::Piece piece, bool kv_only);
  void add_up(StepState& step, int layer, const std::vector<ggml_tensor*>& results);

  const model::Model& model_;
  const Stages& stages_;
  StepGraphs& graphs_;
  std::vector<std::vector<float>> results_;  // of the devices behind the first
};

}  // namespace hcache::engine
