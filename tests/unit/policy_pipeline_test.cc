#include <gtest/gtest.h>

#include "pipeline.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

using testing::Random;

TEST(Step, ComposesAsItApplies) {
  Random random(2);
  for (int i = 0; i < 1000; ++i) {
    auto step = [&] {
      double io = random.real(0, 10);
      double work = random.real(0, 10);
      return Step{io, work, io + work + random.real(0, 5)};
    };
    Step a = step();
    Step b = random.coin(0.2) ? Step::compute_only(random.real(0, 10)) : step();
    PipelineState s{random.real(0, 50), random.real(0, 50)};
    PipelineState one_by_one = b.apply(a.apply(s));
    PipelineState at_once = a.then(b).apply(s);
    EXPECT_NEAR(at_once.io, one_by_one.io, 1e-9);
    EXPECT_NEAR(at_once.compute, one_by_one.compute, 1e-9);

    int64_t n = random.integer(1, 20);
    PipelineState looped = s;
    for (int64_t k = 0; k < n; ++k) looped = a.apply(looped);
    PipelineState repeated = a.repeated(n).apply(s);
    EXPECT_NEAR(repeated.io, looped.io, 1e-9);
    EXPECT_NEAR(repeated.compute, looped.compute, 1e-9);
  }
}

TEST(CutSlices, JoinsNeighboursAndKeepsTheTail) {
  RestoreCosts costs = testing::multi_head(1, 1);
  auto groups = cut_slices(costs, costs.layers[0],
                           {{Method::kHidden, 100}, {Method::kHidden, 40}, {Method::kKv, 64}});
  ASSERT_EQ(groups.size(), 3u);
  EXPECT_EQ(groups[0].count, 2);
  EXPECT_EQ(groups[0].bytes, 64'000);
  EXPECT_EQ(groups[1].count, 1);
  EXPECT_EQ(groups[1].bytes, 12'000);
  EXPECT_EQ(groups[2].bytes, 128'000);
  EXPECT_DOUBLE_EQ(groups[2].io, 128e-6);
  EXPECT_EQ(groups[2].compute, 0);
}

Plan two_layers(int64_t tokens, Method first, Method second) {
  Plan plan;
  plan.n_layer = 2;
  plan.restored_tokens = tokens;
  plan.recompute_layers = first == Method::kRecompute ? 1 : 0;
  plan.runs.push_back({0, tokens, {first, second}});
  return plan;
}

TEST(Simulate, OverlapsReadsWithProjections) {
  // Two layers of two slices; a slice reads for 64 us and computes for 32 us.
  RestoreCosts costs = testing::multi_head(2, 0.5);
  Timeline t = simulate(costs, two_layers(128, Method::kHidden, Method::kHidden)).value();
  EXPECT_NEAR(t.layers[0].io_begin, 0, 1e-12);
  EXPECT_NEAR(t.layers[0].io_end, 128e-6, 1e-12);
  EXPECT_NEAR(t.layers[0].compute_begin, 64e-6, 1e-12);
  EXPECT_NEAR(t.layers[0].compute_end, 160e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].io_begin, 128e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].compute_end, 288e-6, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 288e-6, 1e-12);
  EXPECT_NEAR(t.total.restored_s, 288e-6, 1e-12);
  EXPECT_NEAR(t.total.io_busy_s, 256e-6, 1e-12);
  EXPECT_NEAR(t.total.compute_busy_s, 128e-6, 1e-12);
  EXPECT_NEAR(t.total.project_busy_s, 128e-6, 1e-12);
  EXPECT_EQ(t.total.bytes_read, 256'000);
}

TEST(Simulate, RecomputationHidesTheFirstReads) {
  RestoreCosts costs = testing::multi_head(2, 0.5);
  Timeline t = simulate(costs, two_layers(64, Method::kRecompute, Method::kHidden)).value();
  EXPECT_NEAR(t.layers[0].compute_end, 192e-6, 1e-12);
  EXPECT_EQ(t.layers[0].io_end, 0);
  EXPECT_NEAR(t.layers[1].io_begin, 0, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 224e-6, 1e-12);
  EXPECT_NEAR(t.total.project_busy_s, 32e-6, 1e-12);  // layer 0 alone is no whole layer
}

TEST(Simulate, PrefillFollowsLayerByLayer) {
  RestoreCosts costs = testing::multi_head(2, 0.5);
  costs.finish_s = 7e-6;
  Plan plan = two_layers(64, Method::kHidden, Method::kHidden);
  plan.new_tokens = plan.prefill_tokens = 10;  // 30 us a layer
  Timeline t = simulate(costs, plan).value();
  EXPECT_NEAR(t.layers[0].compute_end, 96e-6, 1e-12);
  EXPECT_NEAR(t.layers[0].prefill_end, 126e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].compute_begin, 128e-6, 1e-12);
  EXPECT_NEAR(t.total.restored_s, 160e-6, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 197e-6, 1e-12);
}

TEST(Simulate, RingHoldsReadsBack) {
  RestoreCosts costs = testing::multi_head(2, 2);
  Plan plan = two_layers(64, Method::kHidden, Method::kHidden);
  costs.ring_bytes = 64'000;  // one slice: the second read waits for the first projection
  Timeline t = simulate(costs, plan).value();
  EXPECT_NEAR(t.layers[1].io_begin, 192e-6, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 384e-6, 1e-12);
  costs.ring_bytes = 1;  // smaller than a slice: alone, not never
  EXPECT_NEAR(simulate(costs, plan).value().total.makespan_s, 384e-6, 1e-12);
  costs.ring_bytes = 128'000;
  EXPECT_NEAR(simulate(costs, plan).value().layers[1].io_begin, 64e-6, 1e-12);
}

TEST(Simulate, UploadDelaysBySliceAndPacesWhenSlower) {
  RestoreCosts costs = testing::multi_head(2, 0.5);
  Plan plan = two_layers(64, Method::kHidden, Method::kHidden);
  costs.link.upload_bytes_per_s = 4e9;
  EXPECT_NEAR(simulate(costs, plan).value().total.makespan_s, 128e-6 + 16e-6 + 32e-6, 1e-12);
  costs.link.upload_bytes_per_s = 0.5e9;
  EXPECT_NEAR(simulate(costs, plan).value().total.makespan_s, 256e-6 + 64e-6 + 32e-6, 1e-12);
}

Plan hidden_layers(int64_t tokens, int32_t n_layer) {
  Plan plan;
  plan.n_layer = n_layer;
  plan.restored_tokens = tokens;
  plan.runs.push_back(
      {0, tokens, std::vector<Method>(static_cast<size_t>(n_layer), Method::kHidden)});
  return plan;
}

TEST(SimulateDevices, ComputeAtOnceWhatTheyReadInTurns) {
  // A layer reads for 64 us and computes for 128 us.
  RestoreCosts costs = testing::multi_head(4, 2);
  const Plan plan = hidden_layers(64, 4);
  EXPECT_NEAR(simulate(costs, plan).value().total.makespan_s, 576e-6, 1e-12);
  costs.device_layers = {2, 2};
  const Timeline t = simulate(costs, plan).value();
  EXPECT_NEAR(t.layers[0].io_begin, 0, 1e-12);
  EXPECT_NEAR(t.layers[2].io_begin, 64e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].io_begin, 128e-6, 1e-12);
  EXPECT_NEAR(t.layers[3].io_begin, 192e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].compute_end, 320e-6, 1e-12);
  EXPECT_NEAR(t.layers[3].compute_end, 384e-6, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 384e-6, 1e-12);
  EXPECT_NEAR(t.total.restored_s, 384e-6, 1e-12);
  EXPECT_NEAR(t.total.compute_busy_s, 512e-6, 1e-12);
  costs.device_layers = {4};
  EXPECT_EQ(simulate(costs, plan).value().total.makespan_s,
            simulate(testing::multi_head(4, 2), plan).value().total.makespan_s);
}

TEST(SimulateDevices, ShareTheLink) {
  RestoreCosts costs = testing::multi_head(4, 0.5);
  costs.device_layers = {2, 2};
  EXPECT_NEAR(simulate(costs, hidden_layers(64, 4)).value().total.makespan_s, 288e-6, 1e-12);
}

TEST(SimulateDevices, HaveAnUploadLinkEach) {
  // Uploads take 128 us: four over one link, or two over each of two.
  RestoreCosts costs = testing::multi_head(4, 0.5);
  costs.link.upload_bytes_per_s = 0.5e9;
  const Plan plan = hidden_layers(64, 4);
  EXPECT_NEAR(simulate(costs, plan).value().total.makespan_s, 512e-6 + 64e-6 + 32e-6, 1e-12);
  costs.device_layers = {2, 2};
  const Timeline t = simulate(costs, plan).value();
  EXPECT_NEAR(t.layers[0].io_end, 192e-6, 1e-12);
  EXPECT_NEAR(t.layers[2].io_end, 256e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].io_end, 320e-6, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 416e-6, 1e-12);
  EXPECT_NEAR(t.total.io_busy_s, 256e-6, 1e-12);
}

// The first device's prefill is through after 312 us; the second one has been idle since 256.
TEST(SimulateDevices, PrefillPassesThroughThemInOrder) {
  RestoreCosts costs = testing::multi_head(2, 2);
  costs.finish_s = 7e-6;
  costs.device_layers = {1, 1};
  Plan plan = hidden_layers(64, 2);
  plan.new_tokens = plan.prefill_tokens = 10;  // 120 us a layer
  const Timeline t = simulate(costs, plan).value();
  EXPECT_NEAR(t.layers[0].prefill_end, 312e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].compute_end, 256e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].prefill_end, 432e-6, 1e-12);
  EXPECT_NEAR(t.total.restored_s, 256e-6, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 439e-6, 1e-12);
}

TEST(SimulateDevices, OneRecomputesWhileTheOtherProjects) {
  RestoreCosts costs = testing::multi_head(2, 0.5);
  costs.device_layers = {1, 1};
  const Timeline t = simulate(costs, two_layers(64, Method::kRecompute, Method::kHidden)).value();
  EXPECT_NEAR(t.layers[0].compute_end, 192e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].compute_end, 96e-6, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 192e-6, 1e-12);
}

// Layers that are recomputed on two devices are computed one after the other all the same.
TEST(SimulateDevices, RecomputationPassesThroughThemInOrder) {
  RestoreCosts costs = testing::multi_head(3, 0.5);
  costs.device_layers = {1, 2};
  Plan plan = hidden_layers(64, 3);
  plan.recompute_layers = 2;
  plan.runs[0].layers[0] = plan.runs[0].layers[1] = Method::kRecompute;
  const Timeline t = simulate(costs, plan).value();
  EXPECT_NEAR(t.layers[1].compute_begin, 192e-6, 1e-12);
  EXPECT_NEAR(t.layers[1].compute_end, 384e-6, 1e-12);
  EXPECT_NEAR(t.total.makespan_s, 416e-6, 1e-12);
}

TEST(Simulate, RejectsMalformedPlans) {
  RestoreCosts costs = testing::multi_head(2, 1);
  Plan plan = two_layers(64, Method::kHidden, Method::kRecompute);
  EXPECT_EQ(simulate(costs, plan).code(), Code::kInvalidArgument);
  plan = two_layers(64, Method::kHidden, Method::kHidden);
  plan.restored_tokens = 65;
  EXPECT_EQ(simulate(costs, plan).code(), Code::kInvalidArgument);
  plan = two_layers(64, Method::kHidden, Method::kHidden);
  plan.n_layer = 3;
  EXPECT_EQ(simulate(costs, plan).code(), Code::kInvalidArgument);
}

TEST(Simulate, AgreesWithTheReferenceOnRandomPlans) {
  Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const auto n_layer = static_cast<int32_t>(random.integer(1, 8));
    RestoreCosts costs = random.costs(n_layer);
    if (random.coin()) costs.ring_bytes = random.integer(1, 300'000);
    RestoreRequest request;
    request.available = random.availability(n_layer, random.integer(0, 4), 0);
    request.new_tokens = random.integer(0, 60);
    const auto runs =
        static_cast<size_t>(random.integer(0, static_cast<int64_t>(request.available.runs.size())));
    const auto recompute = static_cast<int32_t>(random.integer(0, n_layer - 1));
    Plan plan =
        testing::make_plan(costs, request, runs, recompute, [&](size_t) { return random.coin(); });
    Timeline t = simulate(costs, plan).value();
    EXPECT_NEAR(t.total.makespan_s, testing::reference_makespan(costs, plan), 1e-12) << i;
    EXPECT_LE(t.total.compute_busy_s, t.total.makespan_s * (1 + 1e-9));
    EXPECT_LE(t.total.project_busy_s, t.total.compute_busy_s * (1 + 1e-9));
    EXPECT_LE(t.total.io_busy_s, t.total.makespan_s * (1 + 1e-9) + 1e-12);
    for (size_t l = 1; l < t.layers.size(); ++l) {
      EXPECT_GE(t.layers[l].compute_end, t.layers[l - 1].compute_end);
    }
  }
}

}  // namespace
}  // namespace hcache::policy
