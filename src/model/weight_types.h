// What ggml's matrix product does with each weight type.
#pragma once

#include <ggml.h>

#include <span>

namespace hcache::model {

struct WeightType {
  ggml_type type;
  // The type in which the CPU's product consumes its right-hand side (ggml's vec_dot_type).
  ggml_type cpu_activation;
  bool is_float;  // F32, F16, BF16: nothing is quantised
  // From how many rows on the CPU's product takes the kernel that it takes for many: a row's result
  // then does not depend on the others. 1: one kernel, or the same bits from all.
  int cpu_least_rows;
};

// Every type a weight matrix may have: those whose rows ggml can multiply and widen to F32.
std::span<const WeightType> weight_types();
// nullptr for a type no product takes.
const WeightType* find_weight_type(ggml_type type);

}  // namespace hcache::model
