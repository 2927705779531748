#include "weight_types.h"

#include <array>

#include "model/model.h"
#include "products.h"

namespace hcache::model {
namespace {

// tests/unit/model_weight_types_test.cc holds this table against ggml.
constexpr std::array kTypes = {
    WeightType{GGML_TYPE_F32, GGML_TYPE_F32, true, 2},
    WeightType{GGML_TYPE_F16, GGML_TYPE_F16, true, 2},
    WeightType{GGML_TYPE_BF16, GGML_TYPE_BF16, true, 2},
    WeightType{GGML_TYPE_Q1_0, GGML_TYPE_Q8_0, false, 1},
    WeightType{GGML_TYPE_Q2_0, GGML_TYPE_Q8_0, false, 1},
    WeightType{GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, false, 1},
    WeightType{GGML_TYPE_Q4_1, GGML_TYPE_Q8_1, false, 1},
    WeightType{GGML_TYPE_Q5_0, GGML_TYPE_Q8_0, false, 1},
    WeightType{GGML_TYPE_Q5_1, GGML_TYPE_Q8_1, false, 1},
    WeightType{GGML_TYPE_Q8_0, GGML_TYPE_Q8_0, false, 1},
    WeightType{GGML_TYPE_MXFP4, GGML_TYPE_Q8_0, false, 1},
    WeightType{GGML_TYPE_NVFP4, GGML_TYPE_Q8_0, false, 1},
    WeightType{GGML_TYPE_Q2_K, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_Q3_K, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_Q4_K, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_Q5_K, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_Q6_K, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_IQ1_S, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_IQ1_M, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_IQ2_XXS, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_IQ2_XS, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_IQ2_S, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_IQ3_XXS, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_IQ3_S, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_IQ4_NL, GGML_TYPE_Q8_0, false, 8},
    WeightType{GGML_TYPE_IQ4_XS, GGML_TYPE_Q8_K, false, 8},
    WeightType{GGML_TYPE_TQ1_0, GGML_TYPE_Q8_K, false, 1},
    WeightType{GGML_TYPE_TQ2_0, GGML_TYPE_Q8_K, false, 1},
};

}  // namespace

std::span<const WeightType> weight_types() { return kTypes; }

const WeightType* find_weight_type(ggml_type type) {
  for (const WeightType& t : kTypes) {
    if (t.type == type) return &t;
  }
  return nullptr;
}

ggml_type native_activation_type(const Device& device, ggml_type weight) {
  const WeightType* t = find_weight_type(weight);
  if (t == nullptr) return GGML_TYPE_F32;
  if (device.is_cpu() || t->is_float) return t->cpu_activation;
  // Elsewhere the quantised products take F32 and row copies can't write Q8_1 or Q8_K: the state
  // is kept as Q8_0 and widened before the product.
  return GGML_TYPE_Q8_0;
}

int64_t least_product_rows(const Device& device, ggml_type weight) {
  const WeightType* t = find_weight_type(weight);
  if (device.is_cpu() && has_own_product(weight)) return 1;
  return device.is_cpu() && t != nullptr ? t->cpu_least_rows : 1;
}

}  // namespace hcache::model
