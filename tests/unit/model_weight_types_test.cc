// Holds our table of weight types against ggml's CPU backend.
#include <ggml-cpu.h>
#include <gtest/gtest.h>

#include "model_fixtures.h"
#include "weight_types.h"

namespace hcache::model {
namespace {

TEST(WeightTypes, TableAgreesWithGgml) {
  const auto device = test::open_cpu();
  for (int i = 0; i < GGML_TYPE_COUNT; i++) {
    const auto type = static_cast<ggml_type>(i);
    const ggml_type_traits_cpu* cpu = ggml_get_type_traits_cpu(type);
    const WeightType* row = find_weight_type(type);
    const bool widens = type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
    EXPECT_EQ(row != nullptr, cpu->vec_dot != nullptr && widens) << ggml_type_name(type);
    if (row == nullptr) continue;
    EXPECT_EQ(row->cpu_activation, cpu->vec_dot_type) << ggml_type_name(type);
    EXPECT_EQ(row->is_float, !ggml_is_quantized(type)) << ggml_type_name(type);
    EXPECT_EQ(native_activation_type(*device, type), cpu->vec_dot_type) << ggml_type_name(type);
  }
}

TEST(WeightTypes, NamesParseInAnyCase) {
  EXPECT_EQ(parse_weight_type("q4_k").value(), GGML_TYPE_Q4_K);
  EXPECT_EQ(parse_weight_type("Q4_K").value(), GGML_TYPE_Q4_K);
  EXPECT_EQ(parse_weight_type("bf16").value(), GGML_TYPE_BF16);
  for (const char* bad : {"", "q8_k", "i32", "q4"}) {
    EXPECT_EQ(parse_weight_type(bad).code(), Code::kInvalidArgument) << bad;
  }
}

}  // namespace
}  // namespace hcache::model
