// Builds and runs the graph of a step's layer range within one stage.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "base/status.h"
#include "capture_tap.h"
#include "engine/engine.h"
#include "graph_runner.h"
#include "hidden_types.h"
#include "model/graph.h"
#include "sequences.h"
#include "stage.h"
#include "step_state.h"
#include "token_table.h"

namespace hcache::engine {

// What a step's graphs end with; nullptr: nobody wants it, or they have not ended.
struct StepOutputs {
  ggml_tensor* logits = nullptr;
  ggml_tensor* hidden = nullptr;
};

// Threading: the engine's thread.
class StepGraphs {
 public:
  StepGraphs(const model::Model& model, const EngineOptions& options, const Sequences& sequences,
             const Stages& stages, HiddenTypes& types, CaptureTap& tap, TokenTable& table)
      : model_(model),
        options_(options),
        sequences_(sequences),
        types_(types),
        tap_(tap),
        table_(table),
        last_(stages.size()) {}

  // Runs layers [begin, end), which are `stage`'s; the step is loaded there. With kv_only_last the
  // last of them computes K and V alone. `part` is kAll, or one half of the one layer of the range,
  // the attention first. What it makes of the wanted rows is the device's until its next graph;
  // nothing where the range does not end the model.
  Result<StepOutputs> run(Stage& stage, const StepState& step, int begin, int end,
                          bool kv_only_last, model::LayerPart part);
  // A shared layer's piece on one of its devices, see SharedLayers: the device's part of the sum
  // over all, F32 [n_embd, n], or the logits; the device's until its next graph. nullptr with
  // kv_only, which computes no more than the part's K and V. The step is loaded there.
  enum class Piece { kAttention, kFeedForward, kLogits };
  Result<ggml_tensor*> run_piece(Stage& stage, const StepState& step, int layer, Piece piece,
                                 bool kv_only);
  // The next graphs are built anew: what is captured has changed.
  void forget_last();

 private:
  // What the graph depends on besides tensors that live with the engine.
  struct Key {
    int begin = 0;
    int end = 0;
    int n_rows = 0;
    size_t n_outputs = 0;
    size_t n_logits = 0;
    bool kv_only_last = false;
    model::LayerPart part = model::LayerPart::kAll;
    bool capture = false;
    size_t x_size = 0;  // smaller where x holds what the token table lacks
    std::vector<bool> adapters{};
    friend bool operator==(const Key&, const Key&) = default;
  };
  // A stage's last graph, when another step may run it again: decoding builds one graph, not one
  // per token.
  struct Last {
    std::unique_ptr<Graph> graph;
    Key key;
    uint64_t n_allocated = 0;  // the runner's; another graph has its memory otherwise
    uint64_t attention = 0;    // layouts of the stage's
    StepOutputs outputs;
  };
  // What the layers of one graph share.
  struct Range {
    Stage& stage;
    const Graph& g;
    const StepState& step;
    int begin = 0;
    int end = 0;
    bool kv_only_last = false;
    model::LayerPart part = model::LayerPart::kAll;
    int64_t n_x = 0;  // rows of x
    ggml_tensor* positions = nullptr;
    ggml_tensor* order = nullptr;  // 0, 1, ... n_rows
    // Of the step's rows, and of those whose logits are wanted; empty: none counts.
    std::vector<ggml_tensor*> adapters{};
    std::vector<ggml_tensor*> wanted_adapters{};
    [[nodiscard]] bool ends_with_kv_of(int layer) const { return kv_only_last && layer == end - 1; }
  };

  [[nodiscard]] static size_t most_nodes(Stage& stage, const StepState& step, int n_layers);
  // Parts of the graph for the step's rows: positions, their order, scales of adapters.
  static void add_inputs(Range& range);
  StepOutputs build(const Range& range);
  ggml_tensor* build_piece(const Range& range, Piece piece);
  // Adds K and V of a layer, and what is captured of it.
  void build_kv(const Range& range, int layer, ggml_tensor* hidden);
  ggml_tensor* build_attention(const Range& range, int layer, ggml_tensor* hidden);
  StepOutputs build_last_layer(const Range& range, int layer, ggml_tensor* x, ggml_tensor* hidden,
                               ggml_tensor* attention);
  // Of the wanted rows behind the last layer.
  StepOutputs build_outputs(const Range& range, ggml_tensor* rows);
  // Of the rows whose logits, or final norm, are wanted.
  static ggml_tensor* wanted_rows(const Range& range, ggml_tensor* rows);
  // The halves of a layer: rows from the stage's rows to these.
  void build_attention_half(const Range& range, int layer, ggml_tensor* x, ggml_tensor* attention);
  StepOutputs build_feed_forward_half(const Range& range, int layer);
  // The first n of the rows that the stage keeps between two graphs.
  static ggml_tensor* kept_rows(const Range& range, int64_t n);
  [[nodiscard]] bool is_last(int layer) const { return layer == model_.hparams().n_layer - 1; }
  ggml_tensor* capture(const Range& range, ggml_type type, ggml_tensor* rows, int64_t offset);

  const model::Model& model_;
  const EngineOptions& options_;
  const Sequences& sequences_;
  HiddenTypes& types_;
  CaptureTap& tap_;
  TokenTable& table_;
  std::vector<Last> last_;  // per stage
};

}  // namespace hcache::engine
