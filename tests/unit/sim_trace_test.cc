#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sim/trace.h"

namespace hcache::sim {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Trace, IsReadInOrderOfArrival) {
  const auto trace = read_trace(
      R"({"timestamp": 27000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]})"
      "\r\n\n"
      R"({"timestamp": 500, "input_length": 100, "output_length": 3, "hash_ids": [0]})");
  ASSERT_TRUE(trace.ok()) << trace.status().to_string();
  ASSERT_EQ(trace->size(), 2U);
  EXPECT_DOUBLE_EQ((*trace)[0].arrival_s, 0.5);
  EXPECT_EQ((*trace)[1].prompt_tokens, 600);
  EXPECT_EQ((*trace)[1].reply_tokens, 5);
  EXPECT_THAT((*trace)[1].blocks, ElementsAre(0U, 7U));
  EXPECT_TRUE(read_trace("")->empty());
}

TEST(Trace, NamesTheLineThatIsWrong) {
  const std::string good =
      "{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [4]}\n";
  for (const char* bad :
       {"{", "[]", R"({"timestamp": 1, "input_length": 1, "output_length": 1})",
        R"({"timestamp": 1, "input_length": -1, "output_length": 1, "hash_ids": []})",
        R"({"timestamp": "x", "input_length": 1, "output_length": 1, "hash_ids": []})"}) {
    const auto trace = read_trace(good + bad);
    EXPECT_EQ(trace.code(), Code::kInvalidArgument) << bad;
    EXPECT_THAT(trace.status().message(), HasSubstr("line 2")) << bad;
  }
}

}  // namespace
}  // namespace hcache::sim
