// In which types a layer's hidden states can be saved and projected on its device, and by which
// product K and V come from them.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "engine/weight_stream.h"
#include "hidden_rows.h"
#include "model/graph.h"
#include "model/model.h"
#include "stage.h"

namespace hcache::engine {

// Threading: the engine's thread.
class HiddenTypes {
 public:
  // The stages must have their memory.
  HiddenTypes(const model::Model& model, const EngineOptions& options, const Stages& stages,
              WeightStream& weights);

  // What loses nothing that the products of K and V would have kept: what both consume; Q8_1 where
  // one consumes Q8_0, which is part of it. COUNT where there is no such type whose rows are
  // smaller than those of K and V.
  [[nodiscard]] ggml_type native(int layer) const { return native_[layer]; }
  [[nodiscard]] size_t row_bytes(ggml_type type) const {
    return ggml_row_size(type, model_.hparams().n_embd);
  }
  // Whether the layer's rows saved as `type` can be projected; tried out by a round trip when first
  // asked.
  bool can_project(ggml_type type, int layer);
  [[nodiscard]] Status cannot_project(ggml_type type, int layer) const;

  // What the product takes for rows of `hidden`'s type: exactly the weight's native type, or F32.
  static ggml_tensor* product_input(ggml_context* ctx, const model::Device& device,
                                    const ggml_tensor* weight, ggml_tensor* hidden);
  // From how many rows on K and V of a layer come from the kernels that restoration uses.
  [[nodiscard]] int64_t least_rows(const model::Device& device, int layer) const;
  // By those kernels, whatever the number of rows.
  [[nodiscard]] static model::Product padded_product(const model::Device& device);

 private:
  [[nodiscard]] ggml_type find_native(int layer) const;
  [[nodiscard]] bool is_supported(ggml_type type, const model::Device& device,
                                  const ggml_tensor* weight) const;
  bool can_project(ggml_type type, Stage& stage, int layer);
  bool survives_round_trip(ggml_type type, Stage& stage, ggml_tensor* weight);
  void load_sample(Stage& stage) const;
  [[nodiscard]] ggml_tensor* sample(ggml_context* ctx, const Stage& stage) const;
  [[nodiscard]] bool derives_q8_0() const;

  const model::Model& model_;
  const EngineOptions& options_;
  const Stages& stages_;
  WeightStream& weights_;
  bool derives_q8_0_ = false;      // the integers of Q8_1 rows are those of Q8_0 rows
  std::vector<ggml_type> native_;  // per layer
  using Tried = std::tuple<const Stage*, ggml_type, ggml_type>;  // of rows, of the weight
  std::map<Tried, bool> projectable_;
};

}  // namespace hcache::engine
