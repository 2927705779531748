#include <gtest/gtest.h>

#include <limits>

#include "policy_testing.h"

namespace hcache::policy {
namespace {

TEST(CostCurve, DefaultIsFree) {
  CostCurve c;
  EXPECT_EQ(c.at(0), 0);
  EXPECT_EQ(c.at(1000), 0);
}

TEST(CostCurve, AffineChargesTheBaseOnlyForWork) {
  CostCurve c = CostCurve::affine(2, 0.5);
  EXPECT_EQ(c.at(0), 0);
  EXPECT_EQ(c.at(-3), 0);
  EXPECT_DOUBLE_EQ(c.at(4), 4);
  EXPECT_DOUBLE_EQ(c.scaled(3).at(4), 12);
}

TEST(CostCurve, TableInterpolatesAndContinuesItsEnds) {
  CostCurve c = CostCurve::table({{64, 1.0}, {128, 1.5}, {256, 3.5}}).value();
  EXPECT_DOUBLE_EQ(c.at(64), 1.0);
  EXPECT_DOUBLE_EQ(c.at(96), 1.25);
  EXPECT_DOUBLE_EQ(c.at(128), 1.5);
  EXPECT_DOUBLE_EQ(c.at(192), 2.5);
  EXPECT_DOUBLE_EQ(c.at(256), 3.5);
  EXPECT_DOUBLE_EQ(c.at(384), 5.5);
  EXPECT_DOUBLE_EQ(c.at(32), 0.75);
  EXPECT_EQ(c.at(0), 0);
  EXPECT_DOUBLE_EQ(c.scaled(2).at(192), 5.0);
}

TEST(CostCurve, NeverFallsBelowZero) {
  CostCurve c = CostCurve::table({{100, 1.0}, {101, 3.0}}).value();
  EXPECT_EQ(c.at(1), 0);
}

TEST(CostCurve, OnePointIsProportional) {
  EXPECT_DOUBLE_EQ(CostCurve::table({{100, 5.0}}).value().at(20), 1.0);
}

TEST(CostCurve, RejectsNonsense) {
  EXPECT_EQ(CostCurve::table({}).code(), Code::kInvalidArgument);
  EXPECT_EQ(CostCurve::table({{0, 1.0}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(CostCurve::table({{5, 1.0}, {5, 2.0}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(CostCurve::table({{5, -1.0}}).code(), Code::kInvalidArgument);
  EXPECT_EQ(CostCurve::table({{5, std::numeric_limits<double>::quiet_NaN()}}).code(),
            Code::kInvalidArgument);
}

TEST(PrefillLayer, IsTheSumOfItsBatches) {
  testing::Random random(1);
  for (int i = 0; i < 200; ++i) {
    RestoreCosts costs = random.costs(1);
    int64_t rows = random.integer(0, 300);
    int64_t history = random.integer(0, 1000);
    double sum = 0;
    for (int64_t at = 0; at < rows; at += costs.batch_rows) {
      sum += prefill_layer_s(costs.layers[0], std::min(costs.batch_rows, rows - at), history + at,
                             costs.batch_rows);
    }
    EXPECT_NEAR(prefill_layer_s(costs.layers[0], rows, history, costs.batch_rows), sum,
                1e-12 + sum * 1e-12);
  }
}

TEST(PrefillLayer, AttentionIsQuadratic) {
  LayerCosts layer;
  layer.attn_per_key = CostCurve::affine(0, 1);
  // 10 rows behind 100 tokens see 101, 102, ... 110 keys.
  EXPECT_DOUBLE_EQ(prefill_layer_s(layer, 10, 100, 512), 1055);
  // In batches the sum of keys is the same where the cost is proportional.
  EXPECT_DOUBLE_EQ(prefill_layer_s(layer, 10, 100, 3), 1055);
}

TEST(Link, SlowerOfReadAndUploadSetsThePace) {
  LinkCosts link;
  link.bytes_per_s = 1000;
  link.request_s = 0.25;
  link.request_bytes = 400;
  EXPECT_EQ(link_s(link, 0), 0);
  EXPECT_DOUBLE_EQ(link_s(link, 400), 0.65);
  EXPECT_DOUBLE_EQ(link_s(link, 1000), 1.75);
  link.upload_bytes_per_s = 100;
  EXPECT_DOUBLE_EQ(link_s(link, 1000), 10);
}

TEST(Validate, NamesWhatIsWrong) {
  RestoreCosts good = testing::multi_head(4, 1);
  EXPECT_TRUE(validate(good).ok());
  auto broken = [&](auto change) {
    RestoreCosts costs = good;
    change(costs);
    return validate(costs);
  };
  EXPECT_EQ(broken([](auto& c) { c.n_layer = 0; }).code(), Code::kInvalidArgument);
  EXPECT_NE(broken([](auto& c) { c.layers.resize(3); }).message().find("3 entries"),
            std::string::npos);
  EXPECT_NE(broken([](auto& c) { c.link.bytes_per_s = 0; }).message().find("link"),
            std::string::npos);
  EXPECT_NE(broken([](auto& c) { c.slice_rows = 0; }).message().find("slice_rows"),
            std::string::npos);
  EXPECT_NE(broken([](auto& c) { c.batch_rows = 0; }).message().find("batch_rows"),
            std::string::npos);
  EXPECT_NE(broken([](auto& c) { c.finish_s = -1; }).message().find("finish_s"), std::string::npos);
  EXPECT_NE(broken([](auto& c) { c.layers[0].project = CostCurve::affine(-1, 0); })
                .message()
                .find("project"),
            std::string::npos);
}

}  // namespace
}  // namespace hcache::policy
