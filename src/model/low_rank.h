// What low-rank adapters add to products, as parts of a graph. On CPUs a row's result does not
// depend on the other rows.
#pragma once

#include <ggml.h>

#include "model/adapters.h"
#include "model/model.h"

namespace hcache::model {

struct Adapted {
  ggml_context* ctx;
  const Model& model;
  AdapterScales scales;  // of the graph's rows

  // y [n_out, n] = weight times x [n_in, n], with what the adapters add.
  [[nodiscard]] ggml_tensor* add(const ggml_tensor* weight, ggml_tensor* x, ggml_tensor* y) const;
  // The same of experts: x [n_in, 1 or n_used, n], chosen I32 [n_used, n], y [n_out, n_used, n].
  [[nodiscard]] ggml_tensor* add_chosen(const ggml_tensor* weights, ggml_tensor* x,
                                        ggml_tensor* chosen, ggml_tensor* y) const;

 private:
  // Null: the adapter counts for no row.
  [[nodiscard]] ggml_tensor* scale_of(const LowRank& part) const;
};

}  // namespace hcache::model
