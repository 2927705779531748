// In which types hidden states can be saved and projected on this device, and by which product K
// and V come from them.
#pragma once

#include <ggml.h>

#include <cstdint>
#include <map>
#include <set>

#include "base/status.h"
#include "model/graph.h"
#include "model/model.h"
#include "stage.h"

namespace hcache::engine {

// F32 rows converted to the type that they are saved in, as capture does it. `order`: 0, 1, ...
ggml_tensor* saved_as(ggml_context* ctx, ggml_type type, ggml_tensor* rows, ggml_tensor* order);

// The product with at least n_rows rows: rows of zeros are added and their results left out.
ggml_tensor* padded_product(ggml_context* ctx, ggml_tensor* weight, ggml_tensor* x, int64_t n_rows);

// Threading: the engine's thread.
class HiddenTypes {
 public:
  HiddenTypes(const model::Model& model, const EngineOptions& options, const Stages& stages)
      : model_(model), options_(options), stages_(stages) {}

  // What the products of K and V consume; F16 where they differ.
  [[nodiscard]] ggml_type native() const;
  [[nodiscard]] size_t row_bytes(ggml_type type) const {
    return ggml_row_size(type, model_.hparams().n_embd);
  }
  // Whether rows saved as `type` can be projected; tried out by a round trip when first asked.
  bool can_project(ggml_type type);
  [[nodiscard]] Status cannot_project(ggml_type type) const;

  // What ggml's product takes for rows of `hidden`'s type: exactly the native type, or F32.
  ggml_tensor* product_input(ggml_context* ctx, int layer, const ggml_tensor* weight,
                             ggml_tensor* hidden) const;
  // From how many rows on K and V of a layer come from the kernels that restoration uses.
  [[nodiscard]] int64_t least_rows(int layer) const;
  // By those kernels, whatever the number of rows.
  [[nodiscard]] model::Product padded_product(int layer) const;
  // Ours where it is known to give ggml's bits, else ggml's.
  [[nodiscard]] model::Product product(int layer) const;
  // Whether both K and V of a layer come from our product, given native rows.
  [[nodiscard]] bool has_fast_products(int layer) const;

 private:
  [[nodiscard]] bool has_fast_product(int layer, const ggml_tensor* weight, ggml_type rows) const;
  [[nodiscard]] bool takes_fast_product(int layer, const ggml_tensor* weight, ggml_type rows) const;
  [[nodiscard]] bool is_supported(ggml_type type) const;
  bool survives_round_trip(ggml_type type);
  // Which of K's and V's weights may take our product with rows of `type`. The stage's rows() hold
  // n_rows rows to try with.
  void check_fast_products(ggml_type type, int n_rows);

  const model::Model& model_;
  const EngineOptions& options_;
  const Stages& stages_;
  std::map<ggml_type, bool> projectable_;
  std::set<ggml_type> fast_equals_;  // weight types whose fast product was seen to be ggml's
};

}  // namespace hcache::engine
