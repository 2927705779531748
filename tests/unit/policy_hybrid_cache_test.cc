// Algorithm 1, Eq. 11 and mini-batches, against brute force where there is one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "hybrid_testing.h"
#include "policy/hybrid_cache.h"
#include "policy/hybrid_pipeline.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

using testing::kBlock;
using testing::kSizes;
using testing::multi_head_costs;
using testing::Random;

double link_s(const HybridCosts& c, BlockCounts host) {
  return c.load_weights_s + c.load_kv.at(static_cast<double>(host.kv * kBlock)) +
         c.load_act.at(static_cast<double>(host.act * kBlock));
}
double compute_s(const HybridCosts& c, BlockCounts host, int64_t on_device, double other_s) {
  return c.kv_gen.at(static_cast<double>((host.act + on_device) * kBlock)) + other_s;
}

// With loading of activations and without weights the balanced share is 1 / (r + 1/2); a layer then
// takes r times the share of loading everything as KV.
TEST(HybridCache, ShareOfActBlocksFollowsFromTheRatioOfTimes) {
  for (const double r : {0.5, 0.85, 1.0, 1.5, 2.5, 20.0}) {
    const HybridCosts costs = multi_head_costs(r);
    const auto blocks = allocate_host_blocks(costs, {.sizes = kSizes, .bytes = 200'000'000});
    ASSERT_TRUE(blocks.ok());
    const double share = blocks->total().act_share();
    EXPECT_NEAR(share, std::min(1.0, 1 / (r + 0.5)), 1e-3) << r;
    const auto n = static_cast<double>(blocks->total().total() * kBlock);
    const double hybrid_s =
        std::max(link_s(costs, blocks->total()), compute_s(costs, blocks->total(), 0, 0));
    EXPECT_NEAR(costs.load_kv.at(n) / hybrid_s, (r + 0.5) / r, 2e-3) << r;
    EXPECT_NEAR(costs.kv_gen.at(n) / hybrid_s, r + 0.5, 2e-3) << r;
  }
  // The paper's own terms leave the loading of activations out: 1 / (r + 1).
  HybridCosts costs = multi_head_costs(2);
  costs.load_act = {};
  const auto blocks = allocate_host_blocks(costs, {.sizes = kSizes, .bytes = 200'000'000});
  EXPECT_NEAR(blocks->total().act_share(), 1.0 / 3, 1e-3);
}

TEST(HybridCache, WeightsAreEvenedOutFirst) {
  const HybridCosts costs = multi_head_costs(1.5, 6400e-6);
  const auto slow_link = allocate_host_blocks(costs, {.sizes = kSizes, .bytes = 10'000'000});
  EXPECT_EQ(slow_link->initial, (BlockCounts{.act = 100}));  // 6.4 ms at (1.5 - 0.5) x 64 us
  const auto slow_compute =
      allocate_host_blocks(costs, {.sizes = kSizes, .bytes = 10'000'000, .act_on_device = 100});
  EXPECT_EQ(slow_compute->initial, (BlockCounts{.kv = 50}));  // 9.6 - 6.4 ms at 64 us
  EXPECT_LT(slow_compute->total().act_share(), slow_link->total().act_share());
}

TEST(HybridCache, BlocksFillTheMemoryInBalanceAndNeverExceedIt) {
  Random random(7);
  for (int round = 0; round < 3000; ++round) {
    HybridCosts costs;
    costs.load_weights_s = random.coin() ? random.real(0, 0.01) : 0;
    costs.kv_gen = {random.real(0.3, 4) * 1e-6, random.coin() ? random.real(0, 1e-4) : 0};
    costs.load_kv = {random.real(0.5, 2) * 1e-6, random.coin() ? random.real(0, 1e-4) : 0};
    costs.load_act = costs.load_kv.scaled(0.5);
    const BlockSizes sizes{.block_tokens = kBlock,
                           .kv_bytes = random.integer(1500, 4000),
                           .act_bytes = random.integer(700, 1499)};
    const HostMemory memory{.sizes = sizes,
                            .bytes = random.integer(0, 1'000'000),
                            .act_on_device = random.coin() ? random.integer(0, 100) : 0,
                            .other_compute_s = random.coin() ? random.real(0, 0.005) : 0};
    const auto blocks = allocate_host_blocks(costs, memory);
    ASSERT_TRUE(blocks.ok());
    const BlockCounts total = blocks->total();
    ASSERT_GE(std::min({blocks->initial.act, blocks->initial.kv, blocks->remaining.act,
                        blocks->remaining.kv}),
              0);
    const int64_t used = total.act * sizes.act_bytes + total.kv * sizes.kv_bytes;
    ASSERT_LE(used, memory.bytes);
    ASSERT_GT(used + sizes.act_bytes, memory.bytes);
    if (costs.kv_gen.slope <= costs.load_act.slope) {
      ASSERT_EQ(total.kv, 0);
      continue;
    }
    // Whatever else fills the memory is no better balanced, but for what rounding to whole blocks
    // moves: four blocks of either kind.
    const auto off = [&](BlockCounts b) {
      return std::abs(link_s(costs, b) -
                      compute_s(costs, b, memory.act_on_device, memory.other_compute_s));
    };
    double least = off(total);
    for (int64_t act = 0; act * sizes.act_bytes <= memory.bytes; ++act) {
      const BlockCounts other{act, (memory.bytes - act * sizes.act_bytes) / sizes.kv_bytes};
      if (other.act > 0 && other.kv > 0) least = std::min(least, off(other));
    }
    const double rounding =
        4 * kBlock * (costs.kv_gen.slope + costs.load_kv.slope) + costs.load_act.slope;
    if (total.act > 0 && total.kv > 0) {
      ASSERT_LE(off(total), least + rounding);
    }
  }
}

TEST(HybridCache, DeclinesActivationsThatAreNoSmallerThanKv) {
  const BlockSizes grouped{.block_tokens = kBlock, .kv_bytes = 1000, .act_bytes = 1000};
  EXPECT_FALSE(grouped.act_pays());
  const auto blocks =
      allocate_host_blocks(multi_head_costs(0.1, 1), {.sizes = grouped, .bytes = 10'500});
  EXPECT_EQ(blocks->total(), (BlockCounts{.kv = 10}));
}

TEST(HybridCache, RefusesMemoryThatIsNone) {
  const HybridCosts costs = multi_head_costs(1);
  EXPECT_EQ(allocate_host_blocks(costs, {.sizes = kSizes, .bytes = -1}).code(),
            Code::kInvalidArgument);
  EXPECT_EQ(allocate_host_blocks(costs, {.sizes = {}, .bytes = 1}).code(), Code::kInvalidArgument);
}

TEST(HybridCache, NextBlockKeepsTheHostsRatio) {
  EXPECT_EQ(next_block({.act = 5, .kv = 2}, {.act = 3, .kv = 1}), BlockKind::kAct);  // §4.3.2
  EXPECT_EQ(next_block({}, {}), BlockKind::kKv);
  Random random(11);
  for (int round = 0; round < 300; ++round) {
    const BlockCounts ratio{random.integer(0, 100'000), random.integer(0, 100'000)};
    BlockCounts request;
    for (int64_t n = 1; n <= 400; ++n) {
      ++(next_block(request, ratio) == BlockKind::kAct ? request.act : request.kv);
      const double wanted = static_cast<double>(n) * ratio.act_share();
      ASSERT_LE(std::abs(static_cast<double>(request.act) - wanted), 0.5 + 1e-9);
      ASSERT_EQ(request, first_blocks(n, ratio));
    }
  }
}

TEST(HybridCache, ARequestWithAnotherShareComesBackToTheRatio) {
  const BlockCounts ratio{.act = 1, .kv = 1};
  BlockCounts request{.act = 0, .kv = 10};
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(next_block(request, ratio), BlockKind::kAct);
    ++request.act;
  }
  EXPECT_EQ(request.act_share(), 0.5);
}

TEST(HybridCache, TheLastBlockIsFilledInPart) {
  const BlockCounts ratio{.act = 1, .kv = 1};
  const RequestContext context = split_context(3 * kBlock + 10, kBlock, ratio);
  EXPECT_EQ(context.act_tokens, 2 * kBlock);  // blocks 0 and 2
  EXPECT_EQ(context.kv_tokens, kBlock + 10);
  EXPECT_EQ(context.new_rows, BlockKind::kKv);
  for (int64_t n = 0; n < 1000; ++n) EXPECT_EQ(split_context(n, kBlock, ratio).tokens(), n);
}

std::vector<RequestContext> random_requests(Random& random, size_t n) {
  std::vector<RequestContext> requests;
  for (size_t i = 0; i < n; ++i) {
    RequestContext r{.kv_tokens = random.integer(0, 10) * kBlock,
                     .act_tokens = random.integer(1, 10) * kBlock};
    if (random.coin(0.3)) r.act_device_tokens = random.integer(0, r.act_tokens);
    if (random.coin()) r.new_rows = BlockKind::kAct;
    requests.push_back(r);
  }
  return requests;
}

void expect_whole(const std::vector<RequestContext>& requests, const MiniBatchLimits& limits,
                  const std::vector<MiniBatch>& batches) {
  std::vector<int32_t> all;
  for (const MiniBatch& b : batches) {
    ASSERT_FALSE(b.members.empty());
    ASSERT_LE(b.kv_tokens, limits.kv_tokens);
    ASSERT_LE(b.act_tokens - b.act_device_tokens, limits.act_tokens);
    ASSERT_LE(b.tokens(), limits.tokens);
    const MiniBatch sums = mini_batch_of(requests, b.members);
    ASSERT_EQ(sums.kv_tokens, b.kv_tokens);
    ASSERT_EQ(sums.act_tokens, b.act_tokens);
    ASSERT_EQ(sums.act_rows + sums.kv_rows, static_cast<int64_t>(b.members.size()));
    ASSERT_DOUBLE_EQ(sums.squared_tokens, b.squared_tokens);
    all.insert(all.end(), b.members.begin(), b.members.end());
  }
  std::sort(all.begin(), all.end());
  std::vector<int32_t> expected(requests.size());
  std::iota(expected.begin(), expected.end(), 0);
  ASSERT_EQ(all, expected);
}

// The fewest mini-batches of all partitions, and among those the least sum of imbalances.
std::pair<size_t, double> brute_force(const HybridCosts& costs,
                                      const std::vector<RequestContext>& requests,
                                      const MiniBatchLimits& limits, double target) {
  std::pair<size_t, double> best{requests.size() + 1, 0};
  std::vector<std::vector<int32_t>> parts;
  const std::function<void(size_t)> place = [&](size_t i) {
    if (parts.size() > best.first) return;
    if (i == requests.size()) {
      double sum = 0;
      for (const auto& members : parts) {
        sum += imbalance(balance(costs, mini_batch_of(requests, members)), target);
      }
      best = std::min(best, {parts.size(), sum});
      return;
    }
    const auto fits = [&](const std::vector<int32_t>& members) {
      const MiniBatch b = mini_batch_of(requests, members);
      return b.kv_tokens <= limits.kv_tokens && b.tokens() <= limits.tokens &&
             b.act_tokens - b.act_device_tokens <= limits.act_tokens;
    };
    for (size_t p = 0; p < parts.size(); ++p) {
      parts[p].push_back(static_cast<int32_t>(i));
      if (fits(parts[p])) place(i + 1);
      parts[p].pop_back();
    }
    parts.push_back({static_cast<int32_t>(i)});
    place(i + 1);
    parts.pop_back();
  };
  place(0);
  return best;
}

TEST(HybridCache, EveryRequestLandsInOneMiniBatch) {
  Random random(5);
  const HybridCosts costs = multi_head_costs(1.2);
  for (int round = 0; round < 200; ++round) {
    const auto requests = random_requests(random, static_cast<size_t>(random.integer(0, 60)));
    const MiniBatchLimits limits{random.integer(10, 40) * kBlock, random.integer(10, 40) * kBlock,
                                 random.integer(20, 60) * kBlock};
    for (const Packing packing : {Packing::kArrival, Packing::kBalance, Packing::kEven}) {
      const auto batches = form_mini_batches(costs, requests, limits, packing);
      ASSERT_TRUE(batches.ok()) << batches.status().to_string();
      expect_whole(requests, limits, *batches);
    }
  }
}

TEST(HybridCache, MiniBatchesAreFewAndEven) {
  Random random(9);
  const HybridCosts costs = multi_head_costs(1.2);
  size_t counts = 0;
  size_t least_counts = 0;
  double sum = 0;
  double least_sum = 0;
  double arrival_sum = 0;
  for (int round = 0; round < 150; ++round) {
    const auto requests = random_requests(random, 7);
    const MiniBatchLimits limits{20 * kBlock, 20 * kBlock, 32 * kBlock};
    std::vector<int32_t> all(requests.size());
    std::iota(all.begin(), all.end(), 0);
    const double target = balance(costs, mini_batch_of(requests, all));
    const auto [least, least_imbalance] = brute_force(costs, requests, limits, target);
    const auto mean_imbalance = [&](Packing packing) {
      const auto batches = form_mini_batches(costs, requests, limits, packing);
      double total = 0;
      for (const MiniBatch& b : *batches) total += imbalance(balance(costs, b), target);
      return std::pair{batches->size(), total / static_cast<double>(batches->size())};
    };
    const auto [count, mean] = mean_imbalance(Packing::kBalance);
    EXPECT_LE(count, least + 1);
    counts += count;
    least_counts += least;
    sum += mean;
    least_sum += least_imbalance / static_cast<double>(least);
    arrival_sum += mean_imbalance(Packing::kArrival).second;
  }
  EXPECT_LE(static_cast<double>(counts), 1.15 * static_cast<double>(least_counts));
  EXPECT_LT(sum, arrival_sum);
  EXPECT_LE(sum, 1.25 * least_sum);
}

TEST(HybridCache, EqualRequestsFillAMiniBatch) {
  const std::vector<RequestContext> requests(8, {.kv_tokens = 128, .act_tokens = 128});
  const auto batches =
      form_mini_batches(multi_head_costs(1), requests, {512, 512, 1024}, Packing::kBalance);
  ASSERT_EQ(batches->size(), 2U);
  EXPECT_EQ((*batches)[0].members.size(), 4U);
}

// The mean of what each mini-batch has more than the smallest, of the largest's tokens.
double unevenness(const std::vector<MiniBatch>& batches) {
  const auto [least, most] = std::minmax_element(
      batches.begin(), batches.end(),
      [](const MiniBatch& a, const MiniBatch& b) { return a.tokens() < b.tokens(); });
  const double most_tokens = static_cast<double>(most->tokens());
  double more = 0;
  for (const MiniBatch& b : batches) more += static_cast<double>(b.tokens() - least->tokens());
  return more / most_tokens / static_cast<double>(batches.size());
}

TEST(HybridCache, EvenMiniBatchesAreAsManyAndAlike) {
  Random random(11);
  const HybridCosts costs = multi_head_costs(1.2);
  double filled = 0;
  double even = 0;
  for (int round = 0; round < 50; ++round) {
    const auto requests = random_requests(random, 40);
    const MiniBatchLimits limits{60 * kBlock, 60 * kBlock, 100 * kBlock};
    const auto by_balance = form_mini_batches(costs, requests, limits, Packing::kBalance);
    const auto by_load = form_mini_batches(costs, requests, limits, Packing::kEven);
    ASSERT_EQ(by_load->size(), by_balance->size());
    filled += unevenness(*by_balance);
    even += unevenness(*by_load);
    // What makes a pipeline wait: that one takes longer to load than another does to compute.
    double least_s = std::numeric_limits<double>::infinity();
    double most_s = 0;
    for (const MiniBatch& b : *by_load) {
      const double load_s = mini_batch_times(costs, b, 40).load_s;
      least_s = std::min(least_s, load_s);
      most_s = std::max(most_s, load_s);
    }
    EXPECT_LE(most_s, 1.1 * least_s) << round;
  }
  EXPECT_LT(even, 0.25 * filled);
}

// Where the largest first leaves no room for all, they are those by balance.
TEST(HybridCache, WhatCannotBeEvenIsByBalance) {
  Random random(17);
  const HybridCosts costs = multi_head_costs(1);
  for (int round = 0; round < 200; ++round) {
    const auto requests = random_requests(random, 12);
    int64_t longest = 0;
    for (const RequestContext& r : requests) longest = std::max(longest, r.tokens());
    const MiniBatchLimits limits{longest, longest, longest};
    const auto even = form_mini_batches(costs, requests, limits, Packing::kEven);
    const auto balanced = form_mini_batches(costs, requests, limits, Packing::kBalance);
    expect_whole(requests, limits, *even);
    EXPECT_EQ(even->size(), balanced->size());
  }
  // Two of three blocks and three of two fit into twice six only side by side.
  std::vector<RequestContext> requests;
  for (const int64_t n : {3, 3, 2, 2, 2}) {
    requests.push_back({.kv_tokens = n * kBlock, .act_tokens = n * kBlock});
  }
  const MiniBatchLimits limits{6 * kBlock, 6 * kBlock, 12 * kBlock};
  const auto even = form_mini_batches(costs, requests, limits, Packing::kEven);
  const auto balanced = form_mini_batches(costs, requests, limits, Packing::kBalance);
  ASSERT_EQ(even->size(), 2U);
  EXPECT_EQ((*even)[0].members, (*balanced)[0].members);
  EXPECT_EQ((*even)[1].members, (*balanced)[1].members);
}

TEST(HybridCache, NamesTheRequestThatDoesNotFit) {
  const std::vector<RequestContext> requests = {{.kv_tokens = 64}, {.kv_tokens = 640}};
  const auto batches =
      form_mini_batches(multi_head_costs(1), requests, {128, 128, 1024}, Packing::kBalance);
  ASSERT_EQ(batches.code(), Code::kInvalidArgument);
  EXPECT_NE(batches.status().message().find("request 1 has 640"), std::string::npos);
}

TEST(HybridCache, BalanceIsComputeOverLoading) {
  const HybridCosts costs = multi_head_costs(2);
  EXPECT_DOUBLE_EQ(balance(costs, {.kv_tokens = 100, .act_tokens = 100}), 200.0 / 150);
  EXPECT_DOUBLE_EQ(balance(costs, {.kv_tokens = 100, .act_tokens = 100, .act_device_tokens = 100}),
                   2);
  EXPECT_EQ(balance(costs, {}), 1);
  EXPECT_TRUE(std::isinf(balance(costs, {.act_tokens = 9, .act_device_tokens = 9})));
  EXPECT_DOUBLE_EQ(imbalance(0.5, 1), 2);
  EXPECT_DOUBLE_EQ(imbalance(4, 2), 2);
}

}  // namespace
}  // namespace hcache::policy
