// Which rows are kept: budgets over layers, and each policy's choice.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "policy/compression.h"

namespace hcache::policy {
namespace {

constexpr int64_t kRows = 200;

RowScores scores_of_one_layer(int n_head_kv = 2) {
  RowScores scores{.n_layer = 1, .n_head_kv = n_head_kv, .n_rows = kRows};
  scores.sum.assign(static_cast<size_t>(kRows * n_head_kv), 0.0F);
  scores.top = scores.sum;
  return scores;
}

// The rows of one head.
std::vector<int32_t> of_head(const std::vector<int32_t>& kept, int head, int n_heads) {
  const auto n = static_cast<int64_t>(kept.size()) / n_heads;
  return {kept.begin() + head * n, kept.begin() + (head + 1) * n};
}

bool has(const std::vector<int32_t>& rows, int32_t row) {
  return std::binary_search(rows.begin(), rows.end(), row);
}

TEST(Compression, EveryPolicyKeepsSinksAndWhatWasSaidLast) {
  std::mt19937 random(1);
  RowScores scores = scores_of_one_layer();
  for (auto* values : {&scores.sum, &scores.top}) {
    for (float& x : *values) x = static_cast<float>(random() % 1000);
  }
  for (const CompressionInfo& info : compressions()) {
    EXPECT_EQ(parse_compression(info.name).value(), info.policy);
    EXPECT_EQ(compression_info(info.policy).name, info.name);
    for (const double budget : {0.01, 0.25, 0.5, 0.99, 1.0}) {
      const std::vector<int32_t> kept = choose_rows(info.policy, scores, 0, budget, 7);
      const bool all = info.policy == Compression::kNone || budget == 1;
      const int64_t n = all ? kRows : kept_rows(kRows, budget);
      ASSERT_EQ(kept.size(), static_cast<size_t>(2 * n)) << info.name;
      for (int head = 0; head < 2; ++head) {
        const std::vector<int32_t> rows = of_head(kept, head, 2);
        EXPECT_EQ(std::adjacent_find(rows.begin(), rows.end(), std::greater_equal<>()), rows.end())
            << info.name << ": ascending, none twice";
        for (int32_t row = 0; row < kSinks; ++row) EXPECT_TRUE(has(rows, row)) << info.name;
        for (int64_t row = kRows - kWindow; row < kRows; ++row) {
          EXPECT_TRUE(has(rows, static_cast<int32_t>(row))) << info.name;
        }
        EXPECT_LT(rows.back(), kRows);
      }
    }
  }
  EXPECT_FALSE(parse_compression("best").ok());
}

TEST(Compression, ScoresDecide) {
  RowScores scores = scores_of_one_layer();
  scores.sum[50] = 3;           // head 0
  scores.sum[kRows + 90] = 2;   // head 1
  scores.top[70] = 1;           // head 0
  scores.top[kRows + 110] = 1;  // head 1
  const double budget = static_cast<double>(kSinks + kWindow + 2) / kRows;
  const auto rows = [&](Compression policy, int head) {
    return of_head(choose_rows(policy, scores, 0, budget, 1), head, 2);
  };
  for (int head = 0; head < 2; ++head) {
    EXPECT_TRUE(has(rows(Compression::kCar, head), 50)) << "of all heads together";
    EXPECT_TRUE(has(rows(Compression::kCar, head), 90));
  }
  EXPECT_TRUE(has(rows(Compression::kSelf, 0), 70));
  EXPECT_FALSE(has(rows(Compression::kSelf, 0), 110)) << "that is the other head's";
  EXPECT_TRUE(has(rows(Compression::kSelf, 1), 110));
  EXPECT_TRUE(has(rows(Compression::kRecent, 0), kRows - kWindow - 2));

  // Neighbours have a row's score: two of seven fit.
  const std::vector<int32_t> snap = rows(Compression::kSnap, 1);
  EXPECT_TRUE(has(snap, 93));
  EXPECT_TRUE(has(snap, 92));
  EXPECT_FALSE(has(snap, 86));
  EXPECT_FALSE(has(snap, 94));
}

TEST(Compression, RandomRowsFollowTheSeed) {
  const RowScores scores = scores_of_one_layer();
  const auto rows = [&](uint64_t seed) {
    return choose_rows(Compression::kRandom, scores, 0, 0.5, seed);
  };
  EXPECT_EQ(rows(1), rows(1));
  EXPECT_NE(rows(1), rows(2));
  EXPECT_NE(of_head(rows(1), 0, 2), of_head(rows(1), 1, 2));
}

TEST(Compression, LayersShareTheBudget) {
  const auto mean = [](const std::vector<double>& shares) {
    return std::accumulate(shares.begin(), shares.end(), 0.0) / static_cast<double>(shares.size());
  };
  const std::vector<double> density = {0.4, 0.2, 0.1, 0.1};
  EXPECT_EQ(layer_budgets(LayerBudgets::kUniform, 0.3, density),
            std::vector<double>({0.3, 0.3, 0.3, 0.3}));
  const std::vector<double> few = layer_budgets(LayerBudgets::kProfile, 0.2, density);
  EXPECT_NEAR(few[0], 0.4, 1e-12);
  EXPECT_NEAR(few[2], 0.1, 1e-12);
  EXPECT_NEAR(mean(few), 0.2, 1e-12);
  // The first would get more than all, then the second with what that leaves.
  const std::vector<double> many = layer_budgets(LayerBudgets::kProfile, 0.75, density);
  EXPECT_EQ(many[0], 1);
  EXPECT_EQ(many[1], 1);
  EXPECT_NEAR(many[2], 0.5, 1e-12);
  EXPECT_NEAR(mean(many), 0.75, 1e-12);
  EXPECT_EQ(layer_budgets(LayerBudgets::kProfile, 1, density), std::vector<double>(4, 1.0));
  // Of layers in which nothing counts all are alike.
  EXPECT_NEAR(layer_budgets(LayerBudgets::kProfile, 0.5, std::vector<double>(3))[1], 0.5, 1e-12);
  EXPECT_EQ(parse_layer_budgets("profile").value(), LayerBudgets::kProfile);
  EXPECT_FALSE(parse_layer_budgets("fair").ok());
}

TEST(Compression, LayersAreRankedTogether) {
  constexpr int64_t kMust = kSinks + kWindow;
  RowScores scores{.n_layer = 3, .n_head_kv = 2, .n_rows = kRows};
  scores.top.resize(static_cast<size_t>(6 * kRows));
  // Of the second layer all rows score, of the third those of one head.
  std::fill_n(scores.top.begin() + 2 * kRows, 2 * kRows, 0.9F);
  std::fill_n(scores.top.begin() + 4 * kRows, kRows, 0.5F);
  const auto shares = [&](double rows) {
    return ranked_budgets(Compression::kSelf, scores, rows / (6.0 * kRows));
  };
  const auto share = [](double rows) { return rows / (2.0 * kRows); };
  // What all keep comes first.
  const double must = 6.0 * kMust;
  const std::vector<double> few = shares(must + 20);
  EXPECT_NEAR(few[0], share(2.0 * kMust), 1e-9);
  EXPECT_NEAR(few[1], share(2.0 * kMust + 20), 1e-9);
  EXPECT_NEAR(few[2], share(2.0 * kMust), 1e-9);
  const double second = 2.0 * (kRows - kMust);
  const std::vector<double> more = shares(must + second + 10);
  EXPECT_NEAR(more[0], share(2.0 * kMust), 1e-9);
  EXPECT_NEAR(more[1], 1, 1e-9);
  EXPECT_NEAR(more[2], share(2.0 * kMust + 10), 1e-9);
  EXPECT_EQ(shares(6.0 * kRows), std::vector<double>(3, 1.0));
  EXPECT_EQ(ranked_budgets(Compression::kRecent, scores, 0.5), std::vector<double>(3, 0.5));
  EXPECT_EQ(parse_layer_budgets("ranked").value(), LayerBudgets::kRanked);
}

TEST(Compression, ABudgetIsChosenByWhatItCosts) {
  const BudgetKl measured[] = {{0.9, 0.01}, {0.7, 0.03}, {0.5, 0.02}, {0.3, 0.4}};
  EXPECT_EQ(choose_budget(measured, 0.001), 1);
  EXPECT_EQ(choose_budget(measured, 0.01), 0.9);
  EXPECT_EQ(choose_budget(measured, 0.02), 0.9) << "a larger share costs more than that";
  EXPECT_EQ(choose_budget(measured, 0.03), 0.5);
  EXPECT_EQ(choose_budget(measured, 1), 0.3);
  EXPECT_EQ(choose_budget({}, 1), 1);
}

TEST(Compression, NoLayerKeepsLessThanSinksAndWindow) {
  EXPECT_EQ(kept_rows(1000, 0.5), 500);
  EXPECT_EQ(kept_rows(1000, 0.001), kSinks + kWindow);
  EXPECT_EQ(kept_rows(20, 0.5), 20) << "of so few all";
}

}  // namespace
}  // namespace hcache::policy
