// How long a step of the batch engine takes: layers outside, mini-batches inside, the link beside
// computation (HybridServe §4.2.2, Fig. 8b). docs/planner.md, "Hybrid cache".
//
// Pure functions. Units: seconds. Threading: plain values.
#pragma once

#include <algorithm>
#include <vector>

#include "policy/hybrid_cache.h"

namespace hcache::policy {

// One mini-batch in one layer.
struct MiniBatchTimes {
  double load_s = 0;     // link: its KV and ACT blocks
  double compute_s = 0;  // KV generation, attention, feed-forward
  double store_s = 0;    // link: its new rows, when it has computed
};
// `step_rows`: of all mini-batches of the step, whose rows share the layer's products.
[[nodiscard]] MiniBatchTimes mini_batch_times(const HybridCosts& costs, const MiniBatch& batch,
                                              int64_t step_rows);
// What its part of the products takes.
[[nodiscard]] double products_s(const HybridCosts& costs, int64_t rows, int64_t step_rows);

// Context that is kept as tokens alone and computed again in every step, in the first layers: of
// each request the first `share` of its tokens, in layers [0, layers). The last of these layers
// only generates K and V; layer 0 takes its rows from the embeddings, so 1 layer costs T_kv_gen.
struct Recompute {
  int32_t layers = 0;
  double share = 1;  // 1 and all layers: token recomputation of everything (§3.2)
};
// A mini-batch in a layer that recomputes: without that share's loads and stores, with its
// computation; `last` as above.
[[nodiscard]] MiniBatchTimes recomputing_times(const HybridCosts& costs, const MiniBatch& batch,
                                               int64_t step_rows, double share, bool last);

struct PipelineStep {
  int32_t n_layer = 1;
  double load_weights_s = 0;  // one layer's; 0: resident
  double step_s = 0;          // compute behind the last layer
  // In the order in which the engine takes them; all three of the same size.
  std::vector<MiniBatchTimes> layer;
  std::vector<MiniBatchTimes> recomputing;       // layers [0, recompute_layers - 1)
  std::vector<MiniBatchTimes> last_recomputing;  // layer recompute_layers - 1
  int32_t recompute_layers = 0;
};
[[nodiscard]] PipelineStep pipeline_step(const HybridCosts& costs,
                                         const std::vector<MiniBatch>& batches,
                                         const Recompute& recompute);

struct StepTimes {
  double step_s = 0;
  double link_s = 0;     // of it the link is busy
  double compute_s = 0;  // … and computation
  [[nodiscard]] double link_idle() const { return idle(link_s); }
  [[nodiscard]] double compute_idle() const { return idle(compute_s); }

 private:
  [[nodiscard]] double idle(double busy_s) const {
    return step_s > 0 ? std::max(0.0, 1 - busy_s / step_s) : 0;
  }
};

// The link moves, one after the other: a mini-batch's blocks, the new rows of the one before the
// last, and an even part of the next layer's weights. A mini-batch's blocks wait for one of two
// buffers, until the mini-batch two before it has computed; weights for one of two slots, until the
// layer before has. A mini-batch computes when its blocks and its layer's weights are there, in
// order. Fill and drain count: a step begins with nothing on the device and ends when its last rows
// are stored.
[[nodiscard]] StepTimes step_times(const PipelineStep& step);
// The same behind an equal step, in whose last layer the first weights and blocks were loaded.
[[nodiscard]] StepTimes following_step_times(const PipelineStep& step);

}  // namespace hcache::policy
