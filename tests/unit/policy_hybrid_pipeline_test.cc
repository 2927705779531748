// A step's time, against closed forms and against the longest path through its tasks.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "hybrid_testing.h"
#include "policy/hybrid_pipeline.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

using testing::multi_head_costs;
using testing::Random;

PipelineStep uniform(int32_t layers, size_t batches, MiniBatchTimes times, double weights_s = 0) {
  PipelineStep step{.n_layer = layers,
                    .load_weights_s = weights_s,
                    .layer = {},
                    .recomputing = {},
                    .last_recomputing = {}};
  step.layer.assign(batches, times);
  return step;
}

TEST(HybridPipeline, TheSlowerOfLinkAndComputeDecides) {
  // 4 layers of 3: every load but the first hides a computation, and the last computes alone.
  EXPECT_DOUBLE_EQ(step_times(uniform(4, 3, {.load_s = 5, .compute_s = 2})).step_s, 12 * 5 + 2);
  EXPECT_DOUBLE_EQ(step_times(uniform(4, 3, {.load_s = 2, .compute_s = 5})).step_s, 2 + 12 * 5);
  EXPECT_DOUBLE_EQ(step_times(uniform(4, 3, {.compute_s = 5})).step_s, 60);
  // Weights of 6 go beside the blocks; the first layer's come first.
  EXPECT_DOUBLE_EQ(step_times(uniform(4, 3, {.load_s = 5, .compute_s = 2}, 6)).step_s,
                   4 * 6 + 12 * 5 + 2);
  // Without state: layer 0's weights, then each layer's beside the layer before.
  EXPECT_DOUBLE_EQ(step_times(uniform(3, 1, {.compute_s = 4}, 6)).step_s, 3 * 6 + 4);
  EXPECT_DOUBLE_EQ(step_times(uniform(3, 1, {.compute_s = 6}, 4)).step_s, 4 + 3 * 6);
}

TEST(HybridPipeline, StoresShareTheLinkAndTheLastOnesDrain) {
  // Two of four stores go between loads; the last two wait for the end, in which loads have paused.
  EXPECT_DOUBLE_EQ(step_times(uniform(2, 2, {.load_s = 5, .compute_s = 2, .store_s = 1})).step_s,
                   4 * 5 + 4 * 1);
  EXPECT_DOUBLE_EQ(step_times(uniform(2, 2, {.load_s = 1, .compute_s = 5, .store_s = 2})).step_s,
                   1 + 4 * 5 + 2);
}

TEST(HybridPipeline, OneBufferAheadAndNoMore) {
  // The third load waits until the first mini-batch has computed, at 21.
  PipelineStep step = uniform(1, 3, {.load_s = 1, .compute_s = 1});
  step.layer[0].compute_s = 20;
  EXPECT_DOUBLE_EQ(step_times(step).step_s, 21 + 2);
  step.layer[2].load_s = 9;
  EXPECT_DOUBLE_EQ(step_times(step).step_s, 21 + 9 + 1);
}

TEST(HybridPipeline, SharesOfIdleTime) {
  const StepTimes times = step_times(uniform(4, 3, {.load_s = 5, .compute_s = 2}));
  EXPECT_DOUBLE_EQ(times.link_s, 60);
  EXPECT_DOUBLE_EQ(times.compute_s, 24);
  EXPECT_DOUBLE_EQ(times.link_idle(), 2.0 / 62);
  EXPECT_DOUBLE_EQ(times.compute_idle(), 38.0 / 62);
}

TEST(HybridPipeline, AFollowingStepHasNeitherFillNorDrain) {
  EXPECT_DOUBLE_EQ(following_step_times(uniform(4, 3, {.load_s = 5, .compute_s = 2}, 6)).step_s,
                   4 * 6 + 12 * 5);
  EXPECT_DOUBLE_EQ(following_step_times(uniform(4, 3, {.load_s = 2, .compute_s = 5}, 3)).step_s,
                   60);
}

// A step as tasks with predecessors; what runs on one resource runs in the order of its list.
class Tasks {
 public:
  struct Task {
    double seconds = 0;
    std::vector<size_t> after;
  };
  size_t add(std::vector<size_t>& resource, double seconds, std::vector<size_t> after) {
    if (!resource.empty()) after.push_back(resource.back());
    tasks_.push_back({seconds, std::move(after)});
    resource.push_back(tasks_.size() - 1);
    return tasks_.size() - 1;
  }
  // Predecessors always come earlier in the list.
  [[nodiscard]] double longest_path() const {
    std::vector<double> end(tasks_.size());
    double longest = 0;
    for (size_t i = 0; i < tasks_.size(); ++i) {
      double start = 0;
      for (const size_t before : tasks_[i].after) start = std::max(start, end[before]);
      end[i] = start + tasks_[i].seconds;
      longest = std::max(longest, end[i]);
    }
    return longest;
  }

 private:
  std::vector<Task> tasks_;
};

double reference_s(const PipelineStep& step) {
  Tasks tasks;
  std::vector<size_t> link;
  std::vector<size_t> compute;
  std::vector<size_t> computed;  // by mini-batch, over all layers
  std::vector<double> stores;
  std::vector<size_t> weights = {tasks.add(link, step.load_weights_s, {})};
  for (int32_t l = 0; l < step.n_layer; ++l) {
    const auto& jobs = l >= step.recompute_layers      ? step.layer
                       : l + 1 < step.recompute_layers ? step.recomputing
                                                       : step.last_recomputing;
    std::vector<size_t> next_weights;
    const size_t first = computed.size();
    for (const MiniBatchTimes& job : jobs) {
      const size_t j = computed.size();
      std::vector<size_t> needs = weights;
      if (job.load_s > 0) {
        needs.push_back(tasks.add(link, job.load_s,
                                  j >= 2 ? std::vector{computed[j - 2]} : std::vector<size_t>()));
      }
      if (j >= 2 && stores[j - 2] > 0) tasks.add(link, stores[j - 2], {computed[j - 2]});
      if (l + 1 < step.n_layer && step.load_weights_s > 0) {
        next_weights.push_back(
            tasks.add(link, step.load_weights_s / static_cast<double>(jobs.size()),
                      first > 0 ? std::vector{computed[first - 1]} : std::vector<size_t>()));
      }
      computed.push_back(tasks.add(compute, job.compute_s, needs));
      stores.push_back(job.store_s);
    }
    weights = next_weights;
  }
  for (size_t j = computed.size() - std::min<size_t>(2, computed.size()); j < computed.size();
       ++j) {
    if (stores[j] > 0) tasks.add(link, stores[j], {computed[j]});
  }
  tasks.add(compute, step.step_s, {});
  return tasks.longest_path();
}

TEST(HybridPipeline, IsTheLongestPathThroughItsTasks) {
  Random random(17);
  const auto times = [&] {
    return MiniBatchTimes{random.coin(0.8) ? random.real(0, 5) : 0, random.real(0, 5),
                          random.coin() ? random.real(0, 1) : 0};
  };
  for (int round = 0; round < 2000; ++round) {
    PipelineStep step = uniform(static_cast<int32_t>(random.integer(1, 6)), 0, {},
                                random.coin() ? random.real(0, 8) : 0);
    step.step_s = random.coin() ? random.real(0, 3) : 0;
    step.recompute_layers = static_cast<int32_t>(random.integer(0, step.n_layer));
    for (int64_t n = random.integer(1, 5); n > 0; --n) {
      step.layer.push_back(times());
      step.recomputing.push_back(times());
      step.last_recomputing.push_back(times());
    }
    const StepTimes found = step_times(step);
    ASSERT_NEAR(found.step_s, reference_s(step), 1e-9);
    // Never faster than either resource, never slower than both one after the other.
    ASSERT_GE(found.step_s + 1e-9, std::max(found.link_s, found.compute_s));
    ASSERT_LE(found.step_s, found.link_s + found.compute_s + 1e-9);
    ASSERT_LE(following_step_times(step).step_s, found.step_s + step.load_weights_s + 1e-9);
  }
}

TEST(HybridPipeline, MiniBatchTimesCountEveryToken) {
  HybridCosts costs = multi_head_costs(2);
  costs.forward = {.slope = 10e-6, .intercept = 5e-6};
  costs.attend = {.slope = 0.1e-6};
  costs.store_kv = {.slope = 1e-6};
  costs.store_act = {.slope = 0.5e-6};
  const MiniBatch batch{.rows = 4,
                        .kv_tokens = 100,
                        .act_tokens = 60,
                        .act_device_tokens = 20,
                        .kv_rows = 3,
                        .act_rows = 1};
  const MiniBatchTimes times = mini_batch_times(costs, batch, batch.rows);
  EXPECT_NEAR(times.load_s, (100 + 40 * 0.5) * 1e-6, 1e-15);
  EXPECT_NEAR(times.compute_s, (60 * 2 + 4 * 10 + 5 + 164 * 0.1) * 1e-6, 1e-15);
  EXPECT_NEAR(times.store_s, 3.5e-6, 1e-15);
}

TEST(HybridPipeline, MiniBatchesShareTheProductsOfAStep) {
  HybridCosts costs = multi_head_costs(2);
  costs.forward = {.slope = 10e-6, .intercept = 50e-6};
  EXPECT_NEAR(products_s(costs, 1, 64), 60e-6, 1e-15) << "each by itself";
  costs.pass_rows = 32;
  // 64 rows in two passes.
  EXPECT_NEAR(products_s(costs, 1, 64), (64 * 10 + 2 * 50) * 1e-6 / 64, 1e-15);
  EXPECT_NEAR(products_s(costs, 64, 64), (64 * 10 + 2 * 50) * 1e-6, 1e-15);
  EXPECT_NEAR(products_s(costs, 33, 33), (33 * 10 + 2 * 50) * 1e-6, 1e-15);
  EXPECT_EQ(products_s(costs, 0, 33), 0);
  const std::vector<MiniBatch> batches(8, MiniBatch{.rows = 4, .kv_tokens = 400});
  EXPECT_NEAR(step_times(pipeline_step(costs, batches, {})).compute_s,
              costs.n_layer * (32 * 10 + 50) * 1e-6 + 8 * costs.n_layer * costs.attend.at(404),
              1e-12);
}

TEST(HybridPipeline, RecomputingTradesLoadsForComputation) {
  HybridCosts costs = multi_head_costs(2);
  costs.forward = {.slope = 12e-6};
  costs.attend_prompt = {.slope = 0.01e-6};
  const MiniBatch batch{.rows = 1, .kv_tokens = 100, .kv_rows = 1, .squared_tokens = 1e4};
  const MiniBatchTimes all = recomputing_times(costs, batch, batch.rows, 1, false);
  EXPECT_EQ(all.load_s, 0);
  EXPECT_NEAR(all.compute_s, (101 * 12 + 5000 * 0.01) * 1e-6, 1e-15);
  const MiniBatchTimes last = recomputing_times(costs, batch, batch.rows, 1, true);
  EXPECT_NEAR(last.compute_s, (12 + 100 * 2) * 1e-6, 1e-15);
  const MiniBatchTimes half = recomputing_times(costs, batch, batch.rows, 0.5, false);
  EXPECT_NEAR(half.load_s, 50e-6, 1e-15);
  EXPECT_NEAR(half.compute_s, (51 * 12 + 1250 * 0.01) * 1e-6, 1e-15);
  const MiniBatchTimes none = recomputing_times(costs, batch, batch.rows, 0, false);
  EXPECT_DOUBLE_EQ(none.load_s, mini_batch_times(costs, batch, batch.rows).load_s);
  EXPECT_DOUBLE_EQ(none.compute_s, mini_batch_times(costs, batch, batch.rows).compute_s);
}

}  // namespace
}  // namespace hcache::policy
