// Modes of the batch cache, the exact search and its correction while it runs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "hybrid_testing.h"
#include "policy/hybrid_plan.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

using testing::kBlock;
using testing::kSizes;
using testing::multi_head_costs;
using testing::Random;

constexpr int64_t kMany = int64_t{1} << 40;

HybridBatch batch_of(const HybridCosts& costs, std::vector<int64_t> contexts) {
  HybridBatch batch;
  batch.costs = costs;
  batch.sizes = kSizes;
  batch.host_bytes = kMany;
  batch.limits = {.kv_tokens = 4 * 4096, .act_tokens = 4 * 4096, .tokens = 4 * 4096};
  batch.contexts = std::move(contexts);
  return batch;
}

double step_s(const HybridBatch& batch, HybridMode mode, double share = 0) {
  const auto plan = plan_hybrid(batch, mode, share);
  EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  return plan.ok() ? plan->step.step_s : 0;
}

TEST(HybridPlan, NamesAreFoundAgain) {
  for (const HybridModeInfo& info : hybrid_modes()) {
    EXPECT_EQ(*parse_hybrid_mode(info.name), info.mode);
    EXPECT_EQ(hybrid_mode_name(info.mode), info.name);
  }
  EXPECT_NE(parse_hybrid_mode("best").status().message().find("unmanaged"), std::string::npos);
}

// At the paper's balance, r = 0.85: 1.59 times as fast as KV alone, 1.35 times as ACT alone.
TEST(HybridPlan, GainsAreThoseOfTheArithmetic) {
  for (const double r : {0.7, 0.85, 1.0, 1.5}) {
    HybridCosts costs = multi_head_costs(r);
    costs.n_layer = 32;
    const HybridBatch batch = batch_of(costs, std::vector<int64_t>(64, 64 * kBlock));
    const auto best = plan_hybrid(batch, HybridMode::kSearch);
    ASSERT_TRUE(best.ok());
    EXPECT_NEAR(best->ratio.act_share(), std::min(1.0, 1 / (r + 0.5)), 1.0 / 64);
    EXPECT_NEAR(step_s(batch, HybridMode::kKv) / best->step.step_s, (r + 0.5) / r, 0.03) << r;
    EXPECT_NEAR(step_s(batch, HybridMode::kAct) / best->step.step_s, r + 0.5, 0.03) << r;
    EXPECT_LT(best->step.link_idle(), 0.03);
    EXPECT_LT(best->step.compute_idle(), 0.03);
    EXPECT_NEAR(step_s(batch, HybridMode::kPolicies) / best->step.step_s, 1, 0.03);
  }
}

HybridBatch random_batch(Random& random) {
  HybridCosts costs =
      multi_head_costs(random.real(0.2, 4), random.coin() ? random.real(0, 2e-3) : 0);
  costs.n_layer = static_cast<int32_t>(random.integer(1, 6));
  costs.kv_gen.intercept = random.real(0, 2e-5);
  costs.forward = {.slope = random.real(1, 20) * 1e-6, .intercept = random.real(0, 5e-5)};
  costs.attend = {.slope = random.real(0, 0.1) * 1e-6};
  costs.attend_prompt = {.slope = random.real(0, 0.01) * 1e-6};
  costs.store_kv = costs.load_kv;
  costs.store_act = costs.load_act;
  std::vector<int64_t> contexts;
  for (int64_t n = random.integer(1, 12); n > 0; --n) {
    contexts.push_back(random.integer(1, 8 * kBlock));
  }
  HybridBatch batch = batch_of(costs, std::move(contexts));
  batch.limits = {.kv_tokens = 1024, .act_tokens = 1024, .tokens = 1024};
  if (random.coin()) batch.act_on_device = random.integer(0, 10);
  if (random.coin()) batch.carried_tokens = kMany;
  batch.steps_overlap = random.coin();
  return batch;
}

TEST(HybridPlan, NothingIsFasterThanTheSearch) {
  Random random(23);
  for (int round = 0; round < 100; ++round) {
    const HybridBatch batch = random_batch(random);
    const double best_s = step_s(batch, HybridMode::kSearch);
    const int64_t longest =
        (*std::max_element(batch.contexts.begin(), batch.contexts.end()) + kBlock - 1) / kBlock;
    const int32_t most_layers = batch.carried_tokens > 0 ? batch.costs.n_layer : 1;
    for (int64_t act = 0; act <= longest; ++act) {
      for (int32_t layers = 0; layers <= most_layers; ++layers) {
        for (const Packing packing : {Packing::kBalance, Packing::kEven}) {
          const auto other =
              plan_with(batch, {.act = act, .kv = longest - act}, {.layers = layers}, packing);
          ASSERT_TRUE(other.ok()) << other.status().to_string();
          ASSERT_GE(other->step.step_s, best_s * (1 - 1e-9));
        }
      }
    }
    const auto best = plan_hybrid(batch, HybridMode::kSearch);
    const auto again = plan_with(batch, best->ratio, best->recompute, best->packing);
    ASSERT_DOUBLE_EQ(again->step.step_s, best->step.step_s);
    ASSERT_EQ(again->host_bytes, best->host_bytes);
  }
}

// Recomputing layer 0 spares its loads for the price of generating K and V from embeddings.
TEST(HybridPlan, TheFirstLayerNeedsNoBlocks) {
  HybridCosts costs = multi_head_costs(0.5);
  costs.n_layer = 4;
  costs.forward = {.slope = 3e-6};
  const HybridBatch batch = batch_of(costs, std::vector<int64_t>(8, 1024));
  const auto best = plan_hybrid(batch, HybridMode::kSearch);
  ASSERT_TRUE(best.ok());
  EXPECT_EQ(best->recompute.layers, 1);
  const auto without = plan_with(batch, best->ratio, {}, Packing::kBalance);
  EXPECT_LT(best->step.step_s, without->step.step_s);
  EXPECT_EQ(best->host_bytes, without->host_bytes * 3 / 4);
}

TEST(HybridPlan, SlowComputeChoosesNearlyAllKv) {
  HybridCosts costs = multi_head_costs(20);
  costs.n_layer = 32;
  const std::vector<int64_t> contexts(32, 32 * kBlock);
  const auto best = plan_hybrid(batch_of(costs, contexts), HybridMode::kSearch);
  EXPECT_EQ(best->ratio.act, 1);  // of 32: 1 / 20.5, rounded down
  // Weights that take long to load leave compute idle, and activations fill it: of a layer's link
  // time (200 + 64.5 ms) each block of ACT fills 41 ms.
  costs.load_weights_s = 0.2;
  HybridBatch batch = batch_of(costs, contexts);
  batch.steps_overlap = true;
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kSearch)->ratio.act, 6);
  // A step alone has no weights beside its last layer.
  batch.steps_overlap = false;
  EXPECT_LT(plan_hybrid(batch, HybridMode::kSearch)->ratio.act, 6);
}

TEST(HybridPlan, GroupedQueryModelsDeclineActivations) {
  HybridCosts costs = multi_head_costs(0.2);
  costs.n_layer = 4;
  costs.load_act = costs.load_kv;
  HybridBatch batch = batch_of(costs, std::vector<int64_t>(8, 1024));
  batch.sizes.act_bytes = batch.sizes.kv_bytes;
  for (const HybridMode mode : {HybridMode::kSearch, HybridMode::kPolicies}) {
    EXPECT_EQ(plan_hybrid(batch, mode)->ratio.act_share(), 0);
  }
}

TEST(HybridPlan, BaselinesAreWhatTheySay) {
  HybridCosts costs = multi_head_costs(1);
  costs.n_layer = 4;
  costs.forward = {.slope = 6e-6};
  HybridBatch batch = batch_of(costs, {640, 1280, 64});
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kKv)->ratio.act_share(), 0);
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kAct)->ratio.act_share(), 1);
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kUnmanaged)->ratio.act_share(), 0.5);
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kFixedShare, 0.3)->ratio.act_share(), 0.3);
  // Token recomputation costs more than it spares as soon as compute is the slower one.
  batch.carried_tokens = 1984;
  EXPECT_GT(step_s(batch, HybridMode::kTokens, 0.5), step_s(batch, HybridMode::kTokens, 0.1));
  EXPECT_DOUBLE_EQ(step_s(batch, HybridMode::kTokens, 0), step_s(batch, HybridMode::kKv));
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kTokens, 1)->host_bytes, 0);
  batch.carried_tokens = 1983;
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kTokens, 1).code(), Code::kResourceExhausted);
}

TEST(HybridPlan, MemoryBoundsTheRatio) {
  HybridCosts costs = multi_head_costs(4);  // would choose KV for most
  costs.n_layer = 4;
  HybridBatch batch = batch_of(costs, std::vector<int64_t>(8, 16 * kBlock));
  const double free_share = plan_hybrid(batch, HybridMode::kSearch)->ratio.act_share();
  const int64_t all_kv = 8 * 16 * kSizes.kv_bytes;
  batch.host_bytes = all_kv * 5 / 8;
  const auto plan = plan_hybrid(batch, HybridMode::kSearch);
  ASSERT_TRUE(plan.ok());
  EXPECT_LE(plan->host_bytes, batch.host_bytes);
  EXPECT_GT(plan->ratio.act_share(), free_share);
  const auto kv = plan_hybrid(batch, HybridMode::kKv);
  ASSERT_EQ(kv.code(), Code::kResourceExhausted);
  EXPECT_NE(kv.status().message().find("256000 bytes"), std::string::npos);
  batch.host_bytes = all_kv / 4;
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kSearch).code(), Code::kResourceExhausted);
}

TEST(HybridPlan, SharesOutOfRangeAreRefused) {
  const HybridBatch batch = batch_of(multi_head_costs(1), {64});
  EXPECT_EQ(plan_hybrid(batch, HybridMode::kFixedShare, 1.1).code(), Code::kInvalidArgument);
  EXPECT_EQ(plan_with(batch, {1, 1}, {.layers = 1, .share = -0.1}, Packing::kArrival).code(),
            Code::kInvalidArgument);
}

TEST(HybridPlan, PackingPaysWhereRequestsDiffer) {
  // Contexts of one block and of many in turn: by arrival the mini-batches differ in balance.
  HybridCosts costs = multi_head_costs(1);
  costs.n_layer = 16;
  Random random(31);
  double balanced_s = 0;
  double arrival_s = 0;
  double even_s = 0;
  for (int round = 0; round < 20; ++round) {
    std::vector<int64_t> contexts;
    for (int i = 0; i < 48; ++i) contexts.push_back(random.integer(1, 30) * kBlock);
    HybridBatch batch = batch_of(costs, std::move(contexts));
    batch.limits = {.kv_tokens = 2048, .act_tokens = 2048, .tokens = 4096};
    balanced_s += plan_with(batch, {1, 1}, {}, Packing::kBalance)->step.step_s;
    arrival_s += plan_with(batch, {1, 1}, {}, Packing::kArrival)->step.step_s;
    even_s += plan_with(batch, {1, 1}, {}, Packing::kEven)->step.step_s;
  }
  EXPECT_LT(balanced_s, arrival_s);
  EXPECT_LT(even_s, balanced_s);
}

// HybridServe's balance: 32 requests whose mini-batches by balance are three full ones and half a
// one, for which link and computing wait in turn.
TEST(HybridPlan, EvenMiniBatchesKeepBothBusyAtTheBalance) {
  HybridCosts costs = multi_head_costs(0.85);
  costs.n_layer = 8;
  std::vector<int64_t> contexts;
  for (int64_t i = 0; i < 32; ++i) contexts.push_back(272 + 768 * ((11 * i) % 32) / 31);
  HybridBatch batch = batch_of(costs, std::move(contexts));
  batch.limits = {.kv_tokens = 6144, .act_tokens = 6144, .tokens = 6144};
  batch.steps_overlap = true;
  const auto best = plan_hybrid(batch, HybridMode::kSearch);
  ASSERT_TRUE(best.ok()) << best.status().to_string();
  EXPECT_EQ(best->packing, Packing::kEven);
  EXPECT_LE(best->step.step_s, 1.02 * std::max(best->step.link_s, best->step.compute_s));
  EXPECT_GE(step_s(batch, HybridMode::kPolicies), 1.05 * best->step.step_s);
}

TEST(HybridPlan, ScalesFollowWhatIsObserved) {
  double scale = 1;
  observe(scale, 0.1, 0.13);
  EXPECT_NEAR(scale, 1 + 0.3 * 0.3, 1e-12);
  for (int i = 0; i < 40; ++i) observe(scale, 0.1, 0.13);
  EXPECT_NEAR(scale, 1.3, 1e-5);
  observe(scale, 0.1, 1e6);  // counts as a factor of two
  EXPECT_NEAR(scale, 1.69, 1e-4);
  for (int i = 0; i < 100; ++i) observe(scale, 0.1, 1e6);
  EXPECT_EQ(scale, 8);
  for (const double nothing : {0.0, -1.0, std::nan("")}) observe(scale, 0.1, nothing);
  observe(scale, 0, 1);
  EXPECT_EQ(scale, 8);
}

// The link turns out half as fast as it was measured: the share of ACT blocks follows.
TEST(HybridPlan, TheRatioIsCorrectedWhileItRuns) {
  HybridCosts costs = multi_head_costs(2);
  costs.n_layer = 16;
  const HybridBatch batch = batch_of(costs, std::vector<int64_t>(32, 32 * kBlock));
  HybridPlan plan = *plan_hybrid(batch, HybridMode::kSearch);
  EXPECT_NEAR(plan.ratio.act_share(), 1 / 2.5, 1.0 / 32);
  HybridScales scales;
  const HybridCosts real = corrected(costs, {.link = 2});
  for (int step = 0; step < 20; ++step) {
    observe(scales.link, costs.load_kv.at(1000), real.load_kv.at(1000));
    plan = *replan_hybrid(batch, plan, scales);
  }
  EXPECT_NEAR(plan.ratio.act_share(), 1 / 1.5, 2.0 / 32);
}

TEST(HybridPlan, NoiseMovesNoBlocks) {
  HybridCosts costs = multi_head_costs(2);
  costs.n_layer = 16;
  const HybridBatch batch = batch_of(costs, std::vector<int64_t>(32, 32 * kBlock));
  const HybridPlan first = *plan_hybrid(batch, HybridMode::kSearch);
  for (const double link : {0.97, 1.03, 0.99, 1.02}) {
    EXPECT_EQ(replan_hybrid(batch, first, {.link = link})->ratio, first.ratio) << link;
  }
  EXPECT_NE(replan_hybrid(batch, first, {.link = 2})->ratio, first.ratio);
}

}  // namespace
}  // namespace hcache::policy
