// Runs a step layer by layer, and within a layer mini-batch by mini-batch, while the blocks of the
// mini-batches that follow are loaded and new rows are stored (HybridServe §4.2).
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "batch_buffers.h"
#include "block_io.h"
#include "block_store.h"
#include "engine/hybrid_engine.h"
#include "engine/weight_stream.h"
#include "hidden_types.h"
#include "layer_graphs.h"
#include "model/model.h"
#include "stage.h"
#include "step_plan.h"
#include "store_ring.h"

namespace hcache::engine {

// A step to run: its plan, and the blocks of each request that a member may name.
struct StepInput {
  using Tables = std::vector<const std::vector<BlockStore::Id>*>;
  StepPlan plan;
  Tables tables;         // by StepMember::request
  std::vector<float> x;  // the plan's rows before the first layer; of the step to run alone
  int64_t n_wanted = 0;  // members that want logits
};

// What a loop works with; all of it outlives the loop.
struct StepLoopParts {
  const model::Model& model;
  const HybridOptions& options;
  const BlockLayout& layout;
  Stage& stage;
  CopyQueue& queue;
  WeightStream& weights;
  BlockStore& store;
  BlockIo* io;  // null where no block lies on disk
  BatchBuffers& buffers;
  LayerGraphs& graphs;
  StoreRing& ring;
  int least_rows = 1;
  bool times_graphs = false;  // samples say what graphs take
  bool waits = false;         // each graph and upload is waited for, so that its time is known
  bool far = false;           // the device has memory of its own: host memory is behind a link too
};

// Threading: the engine's thread.
class StepLoop {
 public:
  explicit StepLoop(const StepLoopParts& parts) : p_(parts) {}
  ~StepLoop() { drop_loads(); }
  StepLoop(const StepLoop&) = delete;
  StepLoop& operator=(const StepLoop&) = delete;

  // Runs all layers. The rows of logits are put one behind the other into `logits`, in the order of
  // `logits_of`, the requests. `next` is what the step after this one is likely to be: its first
  // loads begin before this step ends. When it fails, nothing is under way any more.
  Status run(const StepInput& step, const StepInput& next, std::vector<float>* logits,
             std::vector<int>* logits_of, StepTimes* times);
  // What was loaded for a step that will not come as expected is not used.
  void drop_loads();

 private:
  // A (layer, mini-batch) whose loads have begun.
  struct Loading {
    LayerLoad load;
    std::vector<BlockIo::Ticket> tickets;
  };
  struct Run {
    const StepInput& step;
    std::vector<float>* logits;
    std::vector<int>* logits_of;
    StepTimes* times;
  };

  static StepInput::Tables tables_of(const StepInput& step, const MiniBatch& batch);
  LayerLoad load_of(const StepInput& step, int64_t task, uint64_t number);
  void begin_load(const StepInput& step, int64_t task, uint64_t number);
  void begin_reads(Loading& loading, const std::vector<PageLoad>& act,
                   const std::vector<PageLoad>& kv);
  void adopt_loads(const StepInput& step);
  bool adopt(Loading& loading, LayerLoad needed);
  Status run_tasks(const Run& run, const StepInput& next);
  Status run_task(const Run& run, int64_t task);
  Status generate(const Run& run, int layer, int batch, BatchBuffer& buffer, const LayerLoad& load,
                  BatchSample* sample);
  // A mini-batch's pieces: the products of their group come before the first of its pieces, and
  // behind the last.
  Status forward(const Run& run, int layer, const MiniBatch& batch, BatchBuffer& buffer);
  Status forward(const Run& run, int layer, int piece, BatchBuffer& buffer);
  Status project(const Run& run, int layer, const RowGroup& group);
  Status output(const Run& run, int layer, const RowGroup& group);
  // Of a layer that comes by halves: the second one, for all mini-batches together.
  Status second_half(const Run& run, int layer);
  Status feed_forward(const Run& run, int layer);
  Status finish(const Run& run);
  Status acquire(const Run& run, int layer, model::LayerPart part);
  // Whether what is recomputed of the context goes through the layer, and no further.
  [[nodiscard]] bool recomputes(int layer) const {
    return p_.layout.first_layer == 0 || !keeps(layer);
  }
  [[nodiscard]] bool ends_context(int layer) const {
    return layer + 1 == (p_.layout.first_layer == 0 ? p_.layout.n_layer : p_.layout.first_layer);
  }
  [[nodiscard]] bool is_last(int layer) const { return layer == p_.layout.n_layer - 1; }
  // Whether it ends with K and V: what is recomputed of the context needs no more there.
  [[nodiscard]] bool kv_only(int layer, const RowGroup& group) const {
    return group.is_context && ends_context(layer);
  }
  [[nodiscard]] CaptureLayout capture_layout(const StepInput& step, int layer,
                                             const RowGroup& group) const;
  [[nodiscard]] std::vector<StoreRing::Target> targets(const StepInput& step, int layer,
                                                       const RowGroup& group,
                                                       const CaptureLayout& layout) const;
  // Of a group's rows, those whose logits are wanted, and whose they are.
  static std::vector<int32_t> wanted_rows(const Run& run, const RowGroup& group);
  // Counts what products of the group took, since then, to its mini-batches by their rows.
  void count(const Run& run, const RowGroup& group, int64_t begin_ns);
  // For what was given to the device, where its time is to be known.
  void settle() const {
    if (p_.waits) p_.stage.graphs().synchronize();
  }
  // Sends loaded pages to the buffer; adds what that took to `*seconds_of`, where it is known.
  void upload(BatchBuffer& buffer, const std::vector<PageLoad>& loads, double* seconds_of);
  // Waits for a load, and counts the time.
  Status wait(const Run& run, Loading& loading, bool all, BatchSample* sample);
  [[nodiscard]] int64_t now_ns() const { return p_.options.env->monotonic_ns(); }
  [[nodiscard]] bool keeps(int layer) const { return layer >= p_.layout.first_layer; }

  const StepLoopParts p_;
  uint64_t first_number_ = 0;       // of the step's first task: tasks are numbered through steps
  std::deque<Loading> loading_;     // of tasks that have not been computed, in order
  std::vector<int32_t> wanted_;     // rows of the step whose logits its last half is to make
  uint64_t counted_bytes_ = 0;      // that had been read when the last step ended
  int act_inputs_of_ = -1;          // the mini-batch whose ACT rows' inputs the device has
  std::vector<double> products_s_;  // of the layer's mini-batches: their share of groups' products
};

}  // namespace hcache::engine
