// Rows of a text to its vector, and what a file says of it.
#include <gtest/gtest.h>

#include "model/pooling.h"
#include "model_fixtures.h"

namespace hcache::model {
namespace {

using Vectors = std::vector<std::vector<float>>;

Vectors pooled(Pooling pooling) {
  Pooler pooler(pooling, 3);
  const Vectors rows = {{1, 2}, {3, 4}, {8, 9}};
  for (int64_t row = pooler.first_row(); row < 3; ++row) {
    pooler.take(row, rows[static_cast<size_t>(row)]);
  }
  return std::move(pooler).vectors();
}

TEST(Pooling, MakesOneVectorOfAllRows) {
  EXPECT_EQ(pooled(Pooling::kMean), (Vectors{{4, 5}}));
  EXPECT_EQ(pooled(Pooling::kFirst), (Vectors{{1, 2}}));
  EXPECT_EQ(pooled(Pooling::kLast), (Vectors{{8, 9}}));
  EXPECT_EQ(pooled(Pooling::kNone), (Vectors{{1, 2}, {3, 4}, {8, 9}}));
}

TEST(Pooling, OfTheLastRowNeedsThatRowAlone) {
  EXPECT_EQ(Pooler(Pooling::kLast, 7).first_row(), 6);
  EXPECT_EQ(Pooler(Pooling::kMean, 7).first_row(), 0);
}

TEST(Pooling, HasNames) {
  EXPECT_EQ(pooling_named("cls").value(), Pooling::kFirst);
  EXPECT_EQ(pooling_named("rank").value(), Pooling::kRank);
  EXPECT_EQ(pooling_named("sum").status().message(),
            "'sum' is none of none, mean, cls, last, rank");
}

TEST(Pooling, IsWhatTheFileSays) {
  const test::TempDir dir;
  auto options = test::tiny_options("qwen3", 2, GGML_TYPE_F32);
  EXPECT_FALSE(pooling_of_file(test::make_tiny(dir, options)).value());
  const auto of = [&](uint32_t number) {
    options.extra_integers = {{"qwen3.pooling_type", number}};
    return pooling_of_file(test::make_tiny(dir, options));
  };
  EXPECT_EQ(of(0).value(), Pooling::kNone);
  EXPECT_EQ(of(1).value(), Pooling::kMean);
  EXPECT_EQ(of(2).value(), Pooling::kFirst);
  EXPECT_EQ(of(3).value(), Pooling::kLast);
  EXPECT_EQ(of(4).value(), Pooling::kRank);
  EXPECT_EQ(of(5).code(), Code::kDataLoss);
  EXPECT_EQ(pooling_of_file(dir.file("none")).code(), Code::kNotFound);
}

TEST(Pooling, OfADecoderMakesItNoEncoder) {
  const test::TempDir dir;
  auto options = test::tiny_options("qwen3", 2, GGML_TYPE_F32);
  options.extra_integers = {{"qwen3.pooling_type", 3}};
  const EncoderFacts facts = encoder_facts(test::make_tiny(dir, options)).value();
  EXPECT_FALSE(facts.encodes);
  EXPECT_EQ(facts.pooling, Pooling::kLast);
  EXPECT_FALSE(facts.has_head);
}

}  // namespace
}  // namespace hcache::model
