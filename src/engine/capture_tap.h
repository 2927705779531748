// Copies what the layers of a step compute into a block of device memory, inside the step's graphs,
// and brings the block to the sink's host memory: stage one of the two-stage saving (HCache
// §4.2.2).
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/status.h"
#include "engine/copy_queue.h"
#include "engine/engine.h"
#include "hidden_types.h"
#include "model/model.h"
#include "stage.h"
#include "step_state.h"
#include "tensor_pool.h"

namespace hcache::engine {

// Each stage has a block for its own layers' part of a step; the parts lie one behind the other in
// the host's block. Where stages share the layers, each brings the rows of its own heads to memory
// of the tap, and whole rows are put together in the host's block. Threading: the engine's thread.
class CaptureTap {
 public:
  CaptureTap(const model::Model& model, const EngineOptions& options, const Stages& stages,
             HiddenTypes& types);

  // See Engine::set_capture().
  Status set(CaptureSink* sink, const CaptureOptions& options);

  // Lays the step's block out by the rows it really has, so that one copy takes all of a stage's
  // part. Nothing when the tap is off.
  void lay_out(StepState& step);
  // Before a graph of `stage` writes the step's part of its block: the rows of the last owner leave
  // it first.
  void own_block(Stage& stage, StepState& step);
  // How the step's rows of a layer lie in the stage's block; null where nothing is captured.
  [[nodiscard]] static const CapturedLayer* layout(const Stage& stage, const StepState& step,
                                                   int layer) {
    if (step.capture.empty()) return nullptr;
    return step.capture_shares.empty() ? &step.capture[layer]
                                       : &step.capture_shares[stage.index()].layers[layer];
  }
  // Where a part of the step lies: for graphs of layers of `stage`.
  ggml_tensor* tensor(ggml_context* ctx, const Stage& stage, const StepState& step, ggml_type type,
                      int64_t width, int64_t offset) const;
  // The step goes on without being captured.
  void abandon(StepState& step);
  // The step's layers are all computed: its block goes to the sink when the copies are through.
  void publish(StepState& step);
  // Hands complete blocks to the sink, oldest first; `all` waits for the rest.
  void poll(bool all);
  // Blocks until what was copied has left the device.
  void wait();

  [[nodiscard]] size_t n_bytes() const;

 private:
  struct Block {  // of a stage
    TensorPool pool;
    ggml_tensor* bytes = nullptr;  // I8
    CopyQueue::Ticket ticket = 0;  // the last copy out of it
    StepState* owner = nullptr;    // whose layers it holds
  };
  struct Pending {
    std::vector<CopyQueue::Ticket> tickets;  // per stage
    std::byte* block = nullptr;
    std::vector<CapturedLayer> layers;
    std::vector<CapturedRows> rows;
    std::vector<CapturedShare> shares;  // to be put together
    StepCapture capture;
  };

  Status choose_types(const CaptureOptions& options);
  Status allocate(Stage& stage);
  void download(Stage& stage, StepState& step);
  void lay_out(int n_rows, bool with_hidden, size_t kv_row_bytes,
               std::vector<CapturedLayer>& layers, std::vector<size_t>& ends) const;
  [[nodiscard]] size_t kv_row_bytes() const;  // of all heads
  void put_together(const Pending& p) const;
  // Where the rows of the stage's layers from `layer` on begin, in what the stage captures.
  [[nodiscard]] static size_t layer_begin(const Stage& stage, const StepState& step, int layer) {
    const std::vector<size_t>& ends =
        step.capture_shares.empty() ? step.capture_ends : step.capture_shares[stage.index()].ends;
    return layer == 0 ? 0 : ends[layer - 1];
  }
  // Hidden rows are the same on all stages that share a layer.
  [[nodiscard]] bool has_hidden(const Stage& stage) const {
    return !stages_.shares_layers() || stage.index() == 0;
  }

  const model::Model& model_;
  const EngineOptions& options_;
  const Stages& stages_;
  HiddenTypes& types_;
  CaptureSink* sink_ = nullptr;
  std::vector<uint8_t> masks_;                  // per layer
  std::vector<ggml_type> hidden_types_;         // per layer
  std::vector<std::unique_ptr<Block>> blocks_;  // per stage
  std::deque<Pending> pending_;
  std::vector<StepState*> steps_;  // laid out, not yet ended
};

}  // namespace hcache::engine
