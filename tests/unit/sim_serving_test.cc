// The scheduler on simulated hardware: what must follow from the model, whatever its figures are.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "policy/restore_plan.h"
#include "sim/serving.h"

namespace hcache::sim {
namespace {

using ::testing::HasSubstr;

ServingSetup setup_of(ServingMethod method) {
  ServingSetup setup;
  setup.hardware.device = policy::find_device("a100").value();
  setup.hardware.model = policy::find_model("llama2-7b").value();
  setup.hardware.n_ssd = 4;
  setup.method = method;
  return setup;
}

// One conversation of two rounds.
Schedule two_rounds(int64_t first_input, int64_t output, int64_t second_input) {
  Schedule load;
  Session session;
  session.rounds.resize(2);
  session.rounds[0].message = {{1, first_input}};
  session.rounds[0].output_tokens = output;
  session.rounds[1].message = {{2, second_input}};
  session.rounds[1].output_tokens = output;
  session.rounds[1].think_s = 30;
  session.rounds[1].returning = true;
  load.sessions = {session};
  return load;
}

Schedule conversations(int64_t sessions, double rate) {
  LoadOptions options;
  options.sessions = sessions;
  options.rate = rate;
  options.rounds = 4;
  options.think_s = 30;
  options.seed = 3;
  return draw_conversations(options);
}

ServingReport run(const ServingSetup& setup, const Schedule& load) {
  auto report = simulate_serving(setup, load);
  EXPECT_TRUE(report.ok()) << report.status().to_string();
  return report.ok() ? *std::move(report) : ServingReport();
}

double mean_returning_ttft(const ServingReport& report) {
  double sum = 0;
  double n = 0;
  for (const ServedRequest& r : report.requests) {
    if (!r.returning) continue;
    sum += r.ttft_s;
    n += 1;
  }
  return sum / n;
}

TEST(Serving, MethodsHaveNames) {
  for (const char* name : {"plan", "hidden", "kv", "recompute", "ideal"}) {
    const auto method = parse_serving_method(name);
    ASSERT_TRUE(method.ok()) << name;
    EXPECT_EQ(serving_method_name(*method), name);
  }
  EXPECT_THAT(parse_serving_method("magic").status().message(), HasSubstr("recompute"));
}

// Alone, a restore takes what the planner says it takes.
TEST(Serving, ALoneRestoreTakesAsLongAsItsPlanSays) {
  for (const auto& [method, mode, encoding] :
       {std::tuple(ServingMethod::kKv, policy::Mode::kKv, policy::kHasKv),
        std::tuple(ServingMethod::kHidden, policy::Mode::kHidden, policy::kHasHidden)}) {
    ServingSetup setup = setup_of(method);
    setup.keep_resident = false;
    const ServingReport report = run(setup, two_rounds(3000, 73, 100));
    ASSERT_EQ(report.requests.size(), 2U);
    const ServedRequest& second = report.requests[1];
    // Of the first answer's last token there is no state yet.
    EXPECT_EQ(second.restored_tokens, 3072);
    EXPECT_EQ(second.resident_tokens, 0);
    const auto costs = hardware_costs(setup.hardware).value();
    policy::RestoreRequest request;
    request.available = policy::Availability::uniform(3072, costs.n_layer, encoding);
    request.mode = mode;
    const policy::Plan plan = plan_restore(costs, request).value();
    EXPECT_NEAR(second.restore_s, plan.predicted.restored_s,
                1e-6 + 0.02 * plan.predicted.restored_s)
        << serving_method_name(method);
  }
}

TEST(Serving, WhatARequestTakesBeforeTheSchedulerHasItCountsAndHoldsNobodyUp) {
  ServingSetup setup = setup_of(ServingMethod::kPlan);
  const Schedule load = two_rounds(3000, 73, 100);
  const ServingReport without = run(setup, load);
  setup.request_overhead_s = 0.5;
  const ServingReport with = run(setup, load);
  ASSERT_EQ(with.requests.size(), 2U);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_NEAR(with.requests[i].ttft_s, without.requests[i].ttft_s + 0.5, 1e-9);
    EXPECT_NEAR(with.requests[i].tpot_s, without.requests[i].tpot_s, 1e-9);
  }
  EXPECT_NEAR(with.step_s, without.step_s, 1e-9);
}

TEST(Serving, MethodsRankAsTheyShould) {
  const Schedule load = conversations(60, 0.5);
  std::vector<double> ttft;
  for (const auto method : {ServingMethod::kIdeal, ServingMethod::kPlan, ServingMethod::kKv,
                            ServingMethod::kRecompute}) {
    ServingSetup setup = setup_of(method);
    setup.keep_resident = false;
    setup.scheduler.restore.exclusive = true;
    const ServingReport report = run(setup, load);
    EXPECT_EQ(report.requests.size(), 240U);
    EXPECT_EQ(report.too_long + report.failed, 0);
    ttft.push_back(mean_returning_ttft(report));
  }
  EXPECT_TRUE(std::is_sorted(ttft.begin(), ttft.end()))
      << ttft[0] << " " << ttft[1] << " " << ttft[2] << " " << ttft[3];
}

TEST(Serving, ConversationsThatStayAreNotRestored) {
  ServingSetup setup = setup_of(ServingMethod::kPlan);
  const ServingReport report = run(setup, two_rounds(3000, 73, 100));
  ASSERT_EQ(report.requests.size(), 2U);
  EXPECT_EQ(report.requests[1].resident_tokens, 3072);
  EXPECT_EQ(report.requests[1].restored_tokens, 0);
}

TEST(Serving, AnArenaForOneMakesTheOthersReturnFromTheirTier) {
  ServingSetup setup = setup_of(ServingMethod::kKv);
  setup.arena_tokens = 3000;
  setup.tiers = {{"dram", 0, 25e9, {policy::EvictPolicy::kLru}}};
  LoadOptions options;
  options.sessions = 20;
  options.rate = 1;
  options.rounds = 3;
  options.context = 1500;
  const ServingReport report = run(setup, draw_conversations(options));
  EXPECT_EQ(report.requests.size(), 60U);
  int64_t restored = 0;
  for (const ServedRequest& r : report.requests) {
    EXPECT_LE(r.resident_tokens + r.restored_tokens, r.prompt_tokens);
    EXPECT_GT(r.ttft_s, 0);
    restored += r.restored_tokens;
  }
  EXPECT_GT(restored, 0);
  EXPECT_GT(report.tiers[0].link_busy_s, 0);
}

TEST(Serving, ALimitedTierForgets) {
  ServingSetup setup = setup_of(ServingMethod::kKv);
  setup.keep_resident = false;
  setup.tiers = {{"disk", 2e9, 25e9, {policy::EvictPolicy::kLru}}};  // about 4,000 tokens
  const ServingReport report = run(setup, conversations(40, 1));
  EXPECT_GT(report.tiers[0].evictions, 0U);
  EXPECT_EQ(report.requests.size(), 160U);
}

// Too many conversations for the memory, and more requests than are served at a time.
TEST(Serving, ReadingAheadFindsInMemoryWhatWouldLieOnTheDisk) {
  const Schedule load = conversations(80, 4);
  double on_demand = 0;
  for (const auto policy : {policy::FetchPolicy::kOnDemand, policy::FetchPolicy::kSchedulerAware}) {
    ServingSetup setup = setup_of(ServingMethod::kKv);
    setup.keep_resident = false;
    setup.scheduler.batch.max_sequences = 4;
    const bool ahead = policy == policy::FetchPolicy::kSchedulerAware;
    const auto evict = ahead ? policy::EvictPolicy::kSchedulerAware : policy::EvictPolicy::kLru;
    setup.tiers = {{"dram", 10e9, 25e9, {evict}}, {"disk", 0, 5e9, {evict}}};
    setup.scheduler.fetch = policy;
    const ServingReport report = run(setup, load);
    EXPECT_EQ(report.requests.size(), 320U);
    double memory = 0;
    double n = 0;
    for (const ServedRequest& r : report.requests) {
      if (!r.returning) continue;
      EXPECT_GT(r.restored_tokens, r.history_tokens - 64);
      memory += r.memory_share;
      n += 1;
    }
    if (ahead) {
      EXPECT_GT(memory / n, on_demand + 0.5);
    } else {
      on_demand = memory / n;
      EXPECT_LT(on_demand, 0.3);
    }
  }
}

TEST(Serving, AConversationThatIsTooLongIsCutAndItsStateKeptOrNot) {
  for (const auto overflow : {Overflow::kKeep, Overflow::kInvalidate}) {
    ServingSetup setup = setup_of(ServingMethod::kKv);
    setup.keep_resident = false;
    setup.context = 4096;
    setup.overflow = overflow;
    // Half of the history, in chunks, is cut off for the 1,000 of the second message.
    const ServingReport report = run(setup, two_rounds(3000, 73, 1000));
    ASSERT_EQ(report.requests.size(), 2U);
    EXPECT_EQ(report.cut, 1);
    EXPECT_EQ(report.too_long, 0);
    const ServedRequest& second = report.requests[1];
    EXPECT_EQ(second.history_tokens, 3073 - 1536);
    EXPECT_EQ(second.prompt_tokens, 3073 - 1536 + 1000);
    EXPECT_EQ(second.restored_tokens, overflow == Overflow::kKeep ? 3072 - 1536 : 0);
  }
}

TEST(Serving, AMessageThatIsTooLongByItselfIsCutToo) {
  ServingSetup setup = setup_of(ServingMethod::kKv);
  setup.keep_resident = false;
  setup.context = 2048;
  setup.overflow = Overflow::kKeep;
  const ServingReport report = run(setup, two_rounds(3000, 73, 900));
  ASSERT_EQ(report.requests.size(), 2U);
  EXPECT_EQ(report.too_long, 0);
  EXPECT_EQ(report.requests[0].prompt_tokens, 2048 - 73);
  EXPECT_EQ(report.requests[0].output_tokens, 73);
  // 2,048 tokens were there; half of them make room for the second message.
  EXPECT_EQ(report.requests[1].history_tokens, 1024);
  EXPECT_EQ(report.requests[1].restored_tokens, 1023);  // the last one was never computed
}

TEST(Serving, MeasuredCostsTakeTheHardwaresPlace) {
  MeasuredCosts measured;
  policy::LayerCosts layer;
  layer.dense = policy::CostCurve::affine(1e-3, 1e-4);
  layer.project = policy::CostCurve::affine(0, 1e-5);
  layer.hidden_bytes = 100;
  layer.kv_bytes = 1000;
  measured.restore.n_layer = 2;
  measured.restore.layers = {layer};
  measured.restore.link.bytes_per_s = 1e6;
  measured.step_finish_s = 5e-3;
  ServingSetup setup = setup_of(ServingMethod::kKv);
  setup.measured = measured;
  setup.keep_resident = false;
  EXPECT_THAT(simulate_serving(setup, {}).status().message(), HasSubstr("arena_tokens"));
  setup.arena_tokens = 4096;
  const ServingReport report = run(setup, two_rounds(1000, 25, 100));
  ASSERT_EQ(report.requests.size(), 2U);
  // Steps of 512 and 488 rows, the second with logits; then rows one by one.
  EXPECT_NEAR(report.requests[0].ttft_s, 2 * 2 * 1e-3 + 5e-3 + 2 * 1000 * 1e-4, 1e-9);
  EXPECT_NEAR(report.requests[0].tpot_s, 2 * 1.1e-3 + 5e-3, 1e-9);
  // 1,024 rows of KV in two layers over the link, then 101 new rows in one step.
  EXPECT_EQ(report.requests[1].restored_tokens, 1024);
  EXPECT_NEAR(report.requests[1].restore_s, 1024 * 2 * 1000 / 1e6, 1e-3);
  EXPECT_NEAR(report.requests[1].ttft_s,
              report.requests[1].restore_s + 2 * (1e-3 + 101 * 1e-4) + 5e-3, 1e-3);
}

// Of a layer that is recomputed alone only K and V are: its hidden states are the embeddings.
TEST(Serving, ARecomputedFirstLayerCostsItsProjection) {
  policy::LayerCosts layer;
  layer.dense = policy::CostCurve::affine(0, 1e-2);
  layer.project = policy::CostCurve::affine(0, 1e-6);
  layer.hidden_bytes = layer.kv_bytes = 1000;
  MeasuredCosts measured;
  measured.restore.n_layer = 4;
  measured.restore.layers = {layer};
  measured.restore.link.bytes_per_s = 1e7;
  measured.restore.re_tail_projects = true;
  ServingSetup setup = setup_of(ServingMethod::kPlan);
  setup.measured = measured;
  setup.arena_tokens = 4096;
  setup.keep_resident = false;
  const ServingReport report = run(setup, two_rounds(1000, 25, 100));
  ASSERT_EQ(report.requests.size(), 2U);
  EXPECT_THAT(report.save_schedule, HasSubstr("RE:1 "));
  // Three layers of 1,024 rows are read; the first one takes 1 ms meanwhile.
  EXPECT_NEAR(report.requests[1].restore_s, 3 * 1024 * 1000 / 1e7, 0.01);
}

TEST(Serving, EqualSetupsGiveEqualReports) {
  const Schedule load = conversations(40, 2);
  const ServingSetup setup = setup_of(ServingMethod::kPlan);
  const ServingReport a = run(setup, load);
  const ServingReport b = run(setup, load);
  ASSERT_EQ(a.requests.size(), b.requests.size());
  for (size_t i = 0; i < a.requests.size(); ++i) {
    EXPECT_EQ(a.requests[i].session, b.requests[i].session);
    EXPECT_EQ(a.requests[i].ttft_s, b.requests[i].ttft_s);
  }
  EXPECT_EQ(a.duration_s, b.duration_s);
}

TEST(Serving, RefusesWhatCannotBe) {
  ServingSetup setup = setup_of(ServingMethod::kPlan);
  setup.hardware.model = policy::find_model("opt-30b").value();  // 60 GB on a device of 40
  EXPECT_THAT(simulate_serving(setup, {}).status().message(), HasSubstr("no memory for KV"));
  setup = setup_of(ServingMethod::kPlan);
  setup.tiers = {{"disk", 0, 0, {policy::EvictPolicy::kLru}}};
  EXPECT_THAT(simulate_serving(setup, {}).status().message(), HasSubstr("disk: read_bytes_per_s"));
  setup.tiers = {};
  setup.context = 100;
  const ServingReport report = run(setup, two_rounds(80, 30, 10));
  EXPECT_EQ(report.too_long, 1);
  EXPECT_TRUE(report.requests.empty());
  EXPECT_EQ(simulate_serving(setup_of(ServingMethod::kKv), conversations(3, 1),
                             [](double) { return false; })
                .code(),
            Code::kCancelled);
}

}  // namespace
}  // namespace hcache::sim
