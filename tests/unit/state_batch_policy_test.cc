// The batch engine under the policies: they are followed, change no bit, and learn from what steps
// took.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "base/fault_env.h"
#include "engine_hybrid_testing.h"
#include "state/batch_policy.h"

namespace hcache::state {
namespace {

using engine::BatchSample;
using engine::BlockKind;
using engine::testing::BatchOfRequests;
using engine::testing::mixed_batch;
using engine::testing::Replies;
using engine::testing::resident_replies;
using engine::testing::same_replies;
using policy::HybridMode;

const model::Model& multi_head() { return engine::testing::tiny_model("llama", 4, GGML_TYPE_F16); }

// Seconds a token, made up: a link on which generating takes 0.85 of loading.
policy::HybridCosts made_up_costs() {
  policy::HybridCosts costs;
  costs.n_layer = 3;
  costs.load_kv.slope = 100e-6;
  costs.load_act.slope = 50e-6;
  costs.kv_gen.slope = 85e-6;
  costs.forward.slope = 600e-6;
  return costs;
}

BatchPolicyOptions options_of(HybridMode mode, double share = 0) {
  return {.costs = made_up_costs(),
          .sizes = {.block_tokens = 64, .kv_bytes = 64 * 3 * 1024, .act_bytes = 64 * 3 * 512},
          .cache_bytes = 64 << 20,
          .buffer_tokens = 512,
          .mode = mode,
          .share = share};
}

engine::HybridOptions engine_options(Env& env) {
  engine::HybridOptions options;
  options.buffer_tokens = 512;
  options.max_batch_rows = 96;
  options.max_step_rows = 700;
  options.host_bytes = 0;
  options.disk_bytes = 16 << 20;
  options.disk_dir = "/blocks";
  options.env = &env;
  return options;
}

TEST(BatchPolicy, EveryModeGivesTheResidentTokens) {
  const BatchOfRequests batch = mixed_batch(multi_head(), 12, 2, 230, 4);
  const Replies expected = resident_replies(multi_head(), batch);
  std::vector<int64_t> contexts;
  for (const auto& prompt : batch.prompts) contexts.push_back(static_cast<int64_t>(prompt.size()));
  for (const policy::HybridModeInfo& info : policy::hybrid_modes()) {
    FaultEnv env;
    BatchPolicy policy(options_of(info.mode, 0.5));
    HCACHE_EXPECT_OK(policy.plan(contexts));
    engine::HybridOptions options = engine_options(env);
    options.recomputed_layers = policy.recomputed_layers();
    options.decisions = policy.decisions();
    const auto made = engine::HybridEngine::create(multi_head(), options).value();
    EXPECT_TRUE(same_replies(expected, engine::testing::hybrid_replies(*made, batch))) << info.name;
  }
}

TEST(BatchPolicy, BlocksFollowThePlansRatio) {
  BatchPolicy policy(options_of(HybridMode::kFixedShare, 0.75));
  HCACHE_EXPECT_OK(policy.plan({400, 400}));
  const auto next = policy.decisions().next_kind;
  engine::BlockQuestion asked{.prompt_tokens = 6400};
  for (int i = 1; i <= 100; ++i) {
    ++(next(asked) == BlockKind::kAct ? asked.n_act : asked.n_kv);
    EXPECT_NEAR(static_cast<double>(asked.n_act), 0.75 * i, 1.0) << "after " << i << " blocks";
  }
}

TEST(BatchPolicy, ASharesOfThePromptsTokensIsRecomputed) {
  BatchPolicy policy(options_of(HybridMode::kTokens, 0.5));
  HCACHE_EXPECT_OK(policy.plan({512}));
  EXPECT_EQ(policy.recomputed_layers(), 0);
  const auto next = policy.decisions().next_kind;
  for (int64_t n = 0; n < 5; ++n) {
    EXPECT_EQ(next({.n_recomputed = n, .prompt_tokens = 640}), BlockKind::kTokens);
  }
  EXPECT_EQ(next({.n_recomputed = 5, .prompt_tokens = 640}), BlockKind::kKv);
}

// A step whose parts all took `slow` times what the costs say.
engine::StepTimes step_that_took(double slow) {
  const policy::HybridCosts costs = made_up_costs();
  engine::StepTimes times;
  for (int layer = 0; layer < 3; ++layer) {
    for (int batch = 0; batch < 4; ++batch) {
      BatchSample s{.layer = layer, .batch = batch};
      s.act_tokens = s.read_act_tokens = 300;
      s.kv_tokens = s.read_kv_tokens = 100;
      s.rows = 4;
      s.cells = 404;
      s.load_act_s = slow * costs.load_act.at(300);
      s.load_kv_s = slow * costs.load_kv.at(100);
      s.generate_s = slow * costs.kv_gen.at(300);
      s.forward_s = slow * costs.forward.at(4);
      times.samples.push_back(s);
      times.total_s += s.generate_s + s.forward_s;
    }
  }
  times.n_batches = 4;
  return times;
}

TEST(BatchPolicy, LearnsWhatStepsTake) {
  BatchPolicy policy(options_of(HybridMode::kSearch));
  HCACHE_EXPECT_OK(policy.plan({400, 400, 400, 400}));
  const StepComparison first = policy.observe(step_that_took(1));
  EXPECT_NEAR(first.predicted_s, first.measured_s, 0.1 * first.measured_s);
  EXPECT_NEAR(policy.scales().kv_gen, 1, 1e-6);
  StepComparison last;
  for (int i = 0; i < 30; ++i) last = policy.observe(step_that_took(1.5));
  EXPECT_NEAR(policy.scales().kv_gen, 1.5, 0.01);
  EXPECT_NEAR(policy.scales().link, 1.5, 0.01);
  EXPECT_NEAR(last.predicted_s, last.measured_s, 0.1 * last.measured_s);
  HCACHE_EXPECT_OK(policy.replan({400, 400, 400, 400}));
}

TEST(BatchPolicy, WantsSizesThatMakeALine) {
  FaultEnv env;
  for (const auto& sizes : std::vector<std::vector<int64_t>>{{}, {64}, {128, 64}, {0, 64}}) {
    EXPECT_EQ(measure_batch_costs(multi_head(), engine_options(env), sizes).code(),
              Code::kInvalidArgument);
  }
  BatchPolicy policy(options_of(HybridMode::kSearch));
  EXPECT_EQ(policy.replan({100}).code(), Code::kFailedPrecondition);
}

}  // namespace
}  // namespace hcache::state
