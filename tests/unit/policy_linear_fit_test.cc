#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "policy/linear_fit.h"

namespace hcache::policy {
namespace {

TEST(LinearFit, FindsTheLineThroughExactSamples) {
  const std::vector<SizedTime> samples = {{64, 1.5}, {128, 2.5}, {512, 8.5}};
  const auto fit = fit_linear(samples);
  ASSERT_TRUE(fit.ok()) << fit.status().to_string();
  EXPECT_NEAR(fit->slope, 1.0 / 64, 1e-12);
  EXPECT_NEAR(fit->intercept, 0.5, 1e-12);
  EXPECT_NEAR(fit->r2, 1, 1e-12);
  EXPECT_NEAR(fit->at(256), 4.5, 1e-12);
  EXPECT_EQ(fit->at(0), 0);
}

// No other line has smaller squares, and R² says how much of the scatter the line explains.
TEST(LinearFit, IsTheLeastSquaresLine) {
  std::mt19937 random(3);
  std::normal_distribution<double> noise(0, 0.3);
  for (int round = 0; round < 50; ++round) {
    std::vector<SizedTime> samples;
    for (int i = 1; i <= 12; ++i) samples.push_back({64.0 * i, 5 + 0.01 * 64 * i + noise(random)});
    const auto fit = fit_linear(samples);
    ASSERT_TRUE(fit.ok());
    const auto squares = [&](double slope, double intercept) {
      double sum = 0;
      for (const SizedTime& s : samples) sum += std::pow(s.seconds - intercept - slope * s.size, 2);
      return sum;
    };
    const double least = squares(fit->slope, fit->intercept);
    for (const double d : {-1e-3, 1e-3}) {
      EXPECT_GT(squares(fit->slope + d, fit->intercept), least);
      EXPECT_GT(squares(fit->slope, fit->intercept + d), least);
    }
    EXPECT_LT(fit->r2, 1);
    EXPECT_GT(fit->r2, 0.9);
  }
}

TEST(LinearFit, ScatterThatIsNoLineHasALowR2) {
  const std::vector<SizedTime> samples = {{1, 1}, {2, 9}, {3, 1}, {4, 9}, {5, 2}};
  EXPECT_LT(fit_linear(samples)->r2, 0.3);
}

TEST(LinearFit, ALineBelowZeroGoesThroughTheOrigin) {
  const std::vector<SizedTime> samples = {{1, 0.5}, {2, 2}, {3, 3.5}};
  const auto fit = fit_linear(samples);
  ASSERT_TRUE(fit.ok());
  EXPECT_EQ(fit->intercept, 0);
  EXPECT_NEAR(fit->slope, (0.5 + 4 + 10.5) / 14, 1e-12);
  EXPECT_LT(fit->r2, 1);
}

TEST(LinearFit, InverseIsTheMostWithinATime) {
  const LinearFit fit{.slope = 0.5, .intercept = 2};
  EXPECT_DOUBLE_EQ(fit.most_within(7), 10);
  EXPECT_DOUBLE_EQ(fit.at(fit.most_within(7)), 7);
  EXPECT_EQ(fit.most_within(1.9), 0);
  EXPECT_TRUE(std::isinf(LinearFit{}.most_within(0)));
}

TEST(LinearFit, RefusesWhatIsNoLine) {
  EXPECT_EQ(fit_linear({}).code(), Code::kInvalidArgument);
  const std::vector<SizedTime> one_size = {{64, 1}, {64, 2}};
  EXPECT_EQ(fit_linear(one_size).code(), Code::kInvalidArgument);
  const std::vector<SizedTime> falling = {{64, 2}, {128, 1}};
  EXPECT_EQ(fit_linear(falling).code(), Code::kInvalidArgument);
  const std::vector<SizedTime> negative = {{64, -1}, {128, 1}};
  EXPECT_EQ(fit_linear(negative).code(), Code::kInvalidArgument);
  const std::vector<SizedTime> endless = {{64, std::nan("")}, {128, 1}};
  EXPECT_EQ(fit_linear(endless).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache::policy
