// The batch engine's model on published hardware.
#include <gtest/gtest.h>

#include <cmath>

#include "sim/batch.h"

namespace hcache::sim {
namespace {

constexpr double kGiB = 1024.0 * 1024 * 1024;

BatchSetup setup_of(const char* model, policy::HybridMode mode) {
  BatchSetup s;
  s.hardware.device = policy::find_device("rtx4090").value();
  s.hardware.model = policy::find_model(model).value();
  s.hardware.model.gemm_efficiency = 0.45;
  s.host_bytes = 821 * kGiB;
  s.workspace_bytes = 2 * kGiB;
  s.buffer_bytes = 4 * kGiB;
  s.batch = 64;
  s.prompt_tokens = 1024;
  s.output_tokens = 33;
  s.mode = mode;
  return s;
}

BatchReport report_of(const BatchSetup& setup) {
  const auto report = simulate_batch(setup);
  EXPECT_TRUE(report.ok()) << report.status().to_string();
  return report.ok() ? *report : BatchReport();
}

TEST(SimBatch, CostsAreTheHardwares) {
  const BatchSetup s = setup_of("opt-30b", policy::HybridMode::kKv);
  const auto costs = batch_costs(s, 0.25);
  ASSERT_TRUE(costs.ok());
  const double d = 7168;
  EXPECT_NEAR(costs->load_kv.slope, 4 * d / (32e9 * 0.8), 1e-15);
  EXPECT_NEAR(costs->load_act.slope, 2 * d / (32e9 * 0.8), 1e-15);
  EXPECT_NEAR(costs->kv_gen.slope, 4 * d * d / (330e12 * 0.45), 1e-12);
  EXPECT_NEAR(costs->load_weights_s, 0.75 * 24 * d * d / (32e9 * 0.8), 1e-9);
  for (const policy::LinearFit& fit : {costs->kv_gen, costs->load_kv, costs->forward}) {
    EXPECT_GT(fit.r2, 0.999999);
  }
}

// Loading everything as KV is what the link is busy with, in every step.
TEST(SimBatch, KvAloneIsBoundByTheLink) {
  const BatchSetup s = setup_of("opt-30b", policy::HybridMode::kKv);
  const BatchReport r = report_of(s);
  const double bytes_per_token = 2.0 * 2 * 7168 * 48;
  double tokens = 0;
  for (int t = 1; t < 33; ++t) tokens += 64.0 * (1024 + t);
  EXPECT_NEAR(r.kv_bytes, tokens * bytes_per_token, 1);
  EXPECT_NEAR(r.weights_bytes, 32 * policy::layer_weight_bytes(s.hardware.model), 1);
  EXPECT_EQ(r.act_bytes, 0);
  EXPECT_NEAR(r.generate_s, (r.kv_bytes + r.weights_bytes) / (32e9 * 0.8), 0.02 * r.generate_s);
  EXPECT_GT(r.link_busy, 0.98);
  EXPECT_LT(r.compute_busy, 0.1);
  EXPECT_NEAR(r.tokens_per_s, 64 * 33 / (r.prefill_s + r.generate_s), 1e-9);
}

TEST(SimBatch, WhatIsLeftOfTheDeviceHoldsWeightsOrActivations) {
  BatchSetup s = setup_of("opt-30b", policy::HybridMode::kKv);
  const BatchReport streamed = report_of(s);
  s.weights_on_device = true;
  const BatchReport resident = report_of(s);
  EXPECT_GT(resident.resident_weights, 0.2);
  EXPECT_LT(resident.resident_weights, 0.35);
  EXPECT_LT(resident.generate_s, streamed.generate_s);
  const BatchReport act = report_of(setup_of("opt-30b", policy::HybridMode::kAct));
  EXPECT_GT(act.act_on_device, 0);
  const double all_act = streamed.kv_bytes / 2;
  const double on_device = 32.0 * 64 * static_cast<double>(act.act_on_device) * 2 * 7168 * 48;
  EXPECT_NEAR(act.act_bytes, all_act - on_device, 1e-3 * all_act);
  s = setup_of("opt-6.7b", policy::HybridMode::kKv);
  s.weights_on_device = true;
  EXPECT_EQ(report_of(s).resident_weights, 1);
  EXPECT_EQ(report_of(s).weights_bytes, 0);
}

// The order of the paper's Figs. 12 and 15, and nothing faster than the search.
TEST(SimBatch, HybridIsFasterThanEitherKindAlone) {
  for (const char* model : {"opt-6.7b", "opt-13b", "opt-30b", "opt-66b"}) {
    const auto seconds = [&](policy::HybridMode mode) {
      return report_of(setup_of(model, mode)).generate_s;
    };
    const double best = seconds(policy::HybridMode::kSearch);
    const double policies = seconds(policy::HybridMode::kPolicies);
    EXPECT_LT(policies, seconds(policy::HybridMode::kKv)) << model;
    EXPECT_LE(policies, seconds(policy::HybridMode::kAct) * 1.001) << model;
    EXPECT_LE(best, policies * 1.001) << model;
    EXPECT_LE(best, seconds(policy::HybridMode::kUnmanaged) * 1.001) << model;
  }
}

// §3.2: recomputing half of the context from tokens makes a step longer (Fig. 4: 1.45 times).
TEST(SimBatch, TokenRecomputationCostsMoreThanItSpares) {
  BatchSetup s = setup_of("opt-30b", policy::HybridMode::kTokens);
  const BatchReport none = report_of(s);
  s.share = 0.5;
  const BatchReport half = report_of(s);
  EXPECT_GT(half.generate_s, 1.3 * none.generate_s);
  EXPECT_NEAR(half.kv_bytes, none.kv_bytes / 2, 1e-6 * none.kv_bytes);
}

TEST(SimBatch, RefusesWhatDoesNotFit) {
  BatchSetup s = setup_of("opt-66b", policy::HybridMode::kKv);
  s.host_bytes = 100e9;
  EXPECT_EQ(simulate_batch(s).code(), Code::kResourceExhausted);
  s.host_bytes = 200e9;  // the weights, not the blocks
  EXPECT_EQ(simulate_batch(s).code(), Code::kResourceExhausted);
  s = setup_of("opt-66b", policy::HybridMode::kKv);
  s.workspace_bytes = 20 * kGiB;
  EXPECT_EQ(simulate_batch(s).code(), Code::kResourceExhausted);
  s = setup_of("opt-66b", policy::HybridMode::kKv);
  s.output_tokens = 0;
  EXPECT_EQ(simulate_batch(s).code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache::sim
