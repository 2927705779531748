// The bootstrap against what is known of it: where it must be narrow, wide, and cover the truth.
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "eval/statistics.h"

namespace hcache::eval {
namespace {

TEST(EvalBootstrap, WeighsGroupsByTheirObservations) {
  const std::vector<Group> groups = {{10, 1}, {30, 9}};
  EXPECT_DOUBLE_EQ(bootstrap_mean(groups).value, 4);
}

TEST(EvalBootstrap, HasNoWidthWithoutSpread) {
  const std::vector<Group> groups(20, Group{6, 3});
  const Estimate e = bootstrap_mean(groups);
  EXPECT_DOUBLE_EQ(e.low, 2);
  EXPECT_DOUBLE_EQ(e.value, 2);
  EXPECT_DOUBLE_EQ(e.high, 2);
}

TEST(EvalBootstrap, SaysNothingOfOneGroup) {
  const std::vector<Group> groups = {{8, 2}};
  const Estimate e = bootstrap_mean(groups);
  EXPECT_DOUBLE_EQ(e.low, 4);
  EXPECT_DOUBLE_EQ(e.high, 4);
  EXPECT_DOUBLE_EQ(bootstrap_mean({}).value, 0);
}

TEST(EvalBootstrap, IsTheSameForTheSameSeed) {
  std::vector<Group> groups;
  for (int i = 0; i < 30; ++i) groups.push_back({static_cast<double>(i * i % 17), 2});
  const Estimate a = bootstrap_mean(groups, 500, 7);
  const Estimate b = bootstrap_mean(groups, 500, 7);
  EXPECT_EQ(a.low, b.low);
  EXPECT_EQ(a.high, b.high);
}

// Normal observations with a known mean: the interval has about the theory's width, and of many
// about 95 % hold the mean (the bootstrap of 40 groups holds a little less).
TEST(EvalBootstrap, CoversTheMean) {
  std::mt19937_64 random(3);
  std::normal_distribution<double> normal(5, 2);
  constexpr int kRuns = 300;
  constexpr int kGroups = 40;
  int covered = 0;
  double width = 0;
  for (int run = 0; run < kRuns; ++run) {
    std::vector<Group> groups;
    for (int i = 0; i < kGroups; ++i) groups.push_back({normal(random), 1});
    const Estimate e = bootstrap_mean(groups, 500, static_cast<uint64_t>(run));
    covered += e.low <= 5 && 5 <= e.high ? 1 : 0;
    width += (e.high - e.low) / kRuns;
  }
  EXPECT_GE(covered, kRuns * 0.90);
  EXPECT_LE(covered, kRuns * 0.98);
  EXPECT_NEAR(width, 2 * 1.96 * 2 / std::sqrt(kGroups), 0.12);
}

TEST(EvalQuantile, Interpolates) {
  EXPECT_DOUBLE_EQ(quantile({3, 1, 2}, 0.5), 2);
  EXPECT_DOUBLE_EQ(quantile({0, 10}, 0.25), 2.5);
  EXPECT_DOUBLE_EQ(quantile({0, 10}, 1), 10);
  EXPECT_DOUBLE_EQ(quantile({4}, 0.9), 4);
  EXPECT_DOUBLE_EQ(quantile({}, 0.5), 0);
}

TEST(EvalExponential, TakesAllThree) {
  const Estimate e = exponential({1, 0, 2});
  EXPECT_DOUBLE_EQ(e.value, std::exp(1.0));
  EXPECT_DOUBLE_EQ(e.low, 1);
  EXPECT_DOUBLE_EQ(e.high, std::exp(2.0));
}

}  // namespace
}  // namespace hcache::eval
