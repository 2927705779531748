#include <gtest/gtest.h>

#include "policy/restore_plan.h"
#include "policy/restore_record.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

using testing::multi_head;
using testing::Random;

constexpr Mode kAllModes[] = {Mode::kPlan,      Mode::kHidden,      Mode::kKv,
                              Mode::kRecompute, Mode::kNaiveHybrid, Mode::kTokenPartition};

RestoreRequest everything_saved(int64_t tokens, int32_t n_layer, int64_t new_tokens = 0) {
  RestoreRequest request;
  request.available = Availability::uniform(tokens, n_layer, kHasBoth);
  request.new_tokens = new_tokens;
  return request;
}

Plan plan_of(const RestoreCosts& costs, const RestoreRequest& request) {
  return plan_restore(costs, request).value();
}

double makespan(const RestoreCosts& costs, const RestoreRequest& request) {
  return plan_of(costs, request).predicted.makespan_s;
}

TEST(PlanRestore, FillsComputeBoundPipelineWithKv) {
  // A projection takes 1.5 times the read: the rest of the link's time carries KV (§4.1.1).
  Plan plan = plan_of(multi_head(32, 1.5), everything_saved(1024, 32));
  // The closed form says 26 + 6 (25.6 rounded up); with the pipeline's fill 25 + 7 ends earlier.
  EXPECT_EQ(plan.schedule, "H:25 KV:7");
  for (int32_t l = 0; l < 25; ++l) {
    EXPECT_EQ(plan.runs[0].layers[static_cast<size_t>(l)], Method::kHidden);
  }
}

TEST(PlanRestore, FillsIoBoundPipelineWithRecomputation) {
  Plan plan = plan_of(multi_head(48, 0.4), everything_saved(1024, 48));
  // The closed form says 39 H + 9 RE (38.4 rounded up); trading two H for RE + KV uses what the
  // rounding leaves over.
  EXPECT_EQ(plan.schedule, "RE:10 H:37 KV:1");
  EXPECT_EQ(plan.recompute_layers, 10);
  EXPECT_GT(plan.predicted.io_busy_s, 0.95 * plan.predicted.makespan_s);
  EXPECT_GT(plan.predicted.compute_busy_s, 0.95 * plan.predicted.makespan_s);
}

TEST(PlanRestore, LongHistoriesRecomputeLess) {
  RestoreCosts costs = multi_head(48, 0.4);
  costs.layers[0].attn_per_key = CostCurve::affine(0, 2e-9);
  int32_t last = 48;
  for (int64_t history : {256, 1024, 4096, 16384, 65536}) {
    int32_t recompute = plan_of(costs, everything_saved(history, 48)).recompute_layers;
    EXPECT_LE(recompute, last) << history;
    last = recompute;
  }
  EXPECT_LE(last, 3);  // §6.2.3: falls back to hidden states alone
}

TEST(PlanRestore, ExtremesUseOneMethod) {
  RestoreCosts slow_link = multi_head(8, 1);
  slow_link.link.bytes_per_s = 1e6;
  Plan plan = plan_of(slow_link, everything_saved(256, 8));
  EXPECT_EQ(plan.schedule, "RE:8");
  EXPECT_EQ(plan.restored_tokens, 0);
  EXPECT_EQ(plan.prefill_tokens, 256);

  RestoreCosts fast_link = multi_head(8, 1);
  fast_link.link.bytes_per_s = 1e13;
  EXPECT_EQ(plan_of(fast_link, everything_saved(256, 8)).schedule, "KV:8");
}

TEST(PlanRestore, LoadsWhatItWouldComputeWhereOthersComputeToo) {
  RestoreCosts costs = multi_head(32, 0.4);
  const RestoreRequest request = everything_saved(1024, 32);
  const Plan idle = plan_of(costs, request);
  EXPECT_GT(idle.recompute_layers, 0);
  costs.compute_share = 0.2;
  const Plan beside = plan_of(costs, request);
  EXPECT_EQ(beside.recompute_layers, 0);
  EXPECT_GT(beside.predicted.bytes_read, idle.predicted.bytes_read);
  // What the device computes is what it would compute alone; it takes longer.
  const Prediction slowed = simulate(costs, idle).value().total;
  EXPECT_NEAR(slowed.compute_busy_s, idle.predicted.compute_busy_s, 1e-12);
  EXPECT_NEAR(slowed.project_busy_s, idle.predicted.project_busy_s, 1e-12);
  EXPECT_GT(slowed.makespan_s, idle.predicted.makespan_s);
  EXPECT_LT(beside.predicted.makespan_s, slowed.makespan_s);
  costs.compute_share = 0;
  EXPECT_EQ(plan_restore(costs, request).code(), Code::kInvalidArgument);
}

TEST(PlanRestore, NoHistoryIsAPrefill) {
  RestoreRequest request;
  request.new_tokens = 100;
  for (Mode mode : kAllModes) {
    request.mode = mode;
    Plan plan = plan_of(multi_head(4, 1), request);
    EXPECT_EQ(plan.schedule, "RE:4");
    EXPECT_TRUE(plan.runs.empty());
    EXPECT_EQ(plan.prefill_tokens, 100);
    EXPECT_NEAR(plan.predicted.makespan_s, 4 * 600e-6, 1e-12);
  }
}

TEST(PlanRestore, NothingToDoTakesNoTime) {
  Plan plan = plan_of(multi_head(4, 1), {});
  EXPECT_EQ(plan.predicted.makespan_s, 0);
  EXPECT_EQ(plan.prefill_tokens, 0);
}

TEST(PlanRestore, GroupedQueryModelsNeverReadHidden) {
  // 8 query heads share one: hidden states are four times the KV.
  for (double projection : {0.05, 0.3, 1.0, 4.0}) {
    RestoreCosts costs = multi_head(32, projection);
    costs.layers[0].hidden_bytes = 8192;
    costs.layers[0].kv_bytes = 2048;
    for (double link : {1e7, 1e8, 1e9, 1e10}) {
      costs.link.bytes_per_s = link;
      Plan plan = plan_of(costs, everything_saved(1024, 32));
      EXPECT_EQ(plan.schedule.find("H:"), std::string::npos) << plan.schedule;
    }
  }
}

TEST(PlanRestore, PartialLastChunkCountsItsRowsOnly) {
  RestoreCosts costs = multi_head(4, 1);
  Plan plan = plan_of(costs, everything_saved(64 * 3 + 40, 4));
  EXPECT_EQ(plan.restored_tokens, 232);
  EXPECT_EQ(plan.runs.size(), 1u);
  Timeline t = simulate(costs, plan).value();
  EXPECT_EQ(t.total.bytes_read, plan.predicted.bytes_read);
  EXPECT_EQ(t.total.bytes_read % 232, 0);
}

// --- availability ---

TEST(Availability, LackingPrefixLayersAreRecomputed) {
  RestoreCosts costs = multi_head(6, 1);
  RestoreRequest request = everything_saved(128, 6);
  request.available.runs.push_back(
      {64, {kNoEncoding, kNoEncoding, kHasHidden, kHasHidden, kHasKv, kHasHidden}});
  Plan plan = plan_of(costs, request);
  EXPECT_EQ(plan.restored_tokens, 192);
  EXPECT_GE(plan.recompute_layers, 2);
  for (const PlanRun& run : plan.runs) {
    for (int32_t l = 0; l < plan.recompute_layers; ++l) {
      EXPECT_EQ(run.layers[static_cast<size_t>(l)], Method::kRecompute);
    }
  }
}

TEST(Availability, HoleDeepInTheModelEndsTheRestorablePrefix) {
  RestoreCosts costs = multi_head(6, 1);
  costs.link.bytes_per_s = 1e10;
  RestoreRequest request = everything_saved(1024, 6);
  request.available.runs.push_back({64, {kHasKv, kHasKv, kHasKv, kHasKv, kHasKv, kNoEncoding}});
  request.available.runs.push_back({512, std::vector<Encoding>(6, kHasBoth)});
  Plan plan = plan_of(costs, request);
  EXPECT_EQ(plan.restored_tokens, 1024);
  EXPECT_EQ(plan.prefill_tokens, 576);
  EXPECT_EQ(plan.new_tokens, 0);
  request.mode = Mode::kHidden;
  EXPECT_EQ(plan_of(costs, request).restored_tokens, 1024);
}

TEST(Availability, RunsMayBeDroppedWhenPrefillIsFaster) {
  // The second run would force almost every layer to be recomputed for all tokens.
  RestoreCosts costs = multi_head(6, 1);
  costs.link.bytes_per_s = 1e10;
  RestoreRequest request = everything_saved(4096, 6);
  request.available.runs.push_back(
      {64, {kNoEncoding, kNoEncoding, kNoEncoding, kNoEncoding, kNoEncoding, kHasKv}});
  Plan plan = plan_of(costs, request);
  EXPECT_EQ(plan.restored_tokens, 4096);
  EXPECT_EQ(plan.schedule, "KV:6");
}

// Of six layers five see a window: what comes before it is read for one.
TEST(Availability, LayersDoWithoutRowsThatTheyDoNotNeed) {
  RestoreCosts costs = Random(3).costs(6);
  costs.layers = {costs.layers.front()};
  costs.layers.front().kv_bytes = 100;
  costs.layers.front().hidden_bytes = 100;
  costs.layers.front().load_kv = CostCurve::affine(0, 1e-9);
  costs.layers.front().project = CostCurve::affine(0, 1e-6);
  costs.layers.front().dense = CostCurve::affine(0, 1e-5);
  RestoreRequest request;
  request.whole = true;
  request.or_nothing = true;
  request.new_tokens = 10;
  request.available.runs = {
      {7168, {kNotNeeded, kNotNeeded, kNotNeeded, kNotNeeded, kNotNeeded, kHasKv}},
      {1024, std::vector<Encoding>(6, kHasBoth)}};
  for (const Mode mode : {Mode::kKv, Mode::kHidden, Mode::kTokenPartition}) {
    request.mode = mode;
    const Plan plan = plan_restore(costs, request).value();
    EXPECT_EQ(plan.restored_tokens, 8192);
    EXPECT_EQ(plan.recompute_layers, 0);
    EXPECT_EQ(plan.predicted.bytes_read, 100 * (7168 + 6 * 1024));
    ASSERT_EQ(plan.runs.size(), 2U);
    EXPECT_EQ(plan.runs[0].layers,
              (std::vector<Method>{Method::kNone, Method::kNone, Method::kNone, Method::kNone,
                                   Method::kNone, Method::kKv}));
    EXPECT_NEAR(simulate(costs, plan).value().total.makespan_s, plan.predicted.makespan_s,
                1e-9 * plan.predicted.makespan_s);
  }
  request.mode = Mode::kKv;
  EXPECT_EQ(plan_restore(costs, request)->schedule, "7168t KV:1 | 1024t KV:6");
  const RestoreRecord record = planned_record(plan_restore(costs, request).value(), 6);
  EXPECT_EQ(record.layers.front().method, Method::kKv);
  EXPECT_EQ(record.kv_tokens, 8192);

  // Nothing, where computing is faster; then too it is never a part of it.
  request.mode = Mode::kPlan;
  costs.link.bytes_per_s = 1;
  EXPECT_EQ(plan_restore(costs, request)->restored_tokens, 0);
  request.or_nothing = false;
  EXPECT_EQ(plan_restore(costs, request)->restored_tokens, 8192);
  costs.link.bytes_per_s = 1e15;
  request.or_nothing = true;
  EXPECT_EQ(plan_restore(costs, request)->restored_tokens, 8192);
}

// Rows of a sequence that was cut: all of them from pages, or nothing.
TEST(Availability, WholeOrNothingRecomputesNoRow) {
  Random random(8);
  int nothing = 0;
  int without_first = 0;
  for (int round = 0; round < 300; ++round) {
    const auto n_layer = static_cast<int32_t>(random.integer(1, 6));
    RestoreCosts costs = random.costs(n_layer);
    costs.re_tail_projects = random.coin(0.5);
    RestoreRequest request;
    request.whole = true;
    request.new_tokens = random.integer(0, 100);
    request.mode = static_cast<Mode>(random.integer(0, 5));
    int32_t missing = 0;  // layers up to the last one that lacks pages
    for (int64_t run = random.integer(1, 4); run > 0; --run) {
      AvailableRun& added = request.available.runs.emplace_back();
      added.tokens = random.integer(1, 300);
      for (int32_t l = 0; l < n_layer; ++l) {
        const auto saved = static_cast<Encoding>(random.coin(0.02) ? 0 : random.integer(1, 3));
        added.layers.push_back(saved);
        if (saved == kNoEncoding) missing = std::max(missing, l + 1);
      }
    }
    const Result<Plan> plan = plan_restore(costs, request);
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    const bool can =
        missing <= (costs.re_tail_projects ? 1 : 0) && request.mode != Mode::kRecompute;
    EXPECT_EQ(plan->recompute_layers, can ? missing : 0);
    EXPECT_EQ(plan->restored_tokens, can ? request.available.tokens() : 0);
    nothing += can ? 0 : 1;
    without_first += can && missing == 1 ? 1 : 0;
  }
  EXPECT_GT(nothing, 30);
  EXPECT_GT(without_first, 1);
}

TEST(Availability, ForcedModesUseTheOtherEncodingWhereTheirsIsMissing) {
  RestoreCosts costs = multi_head(4, 1);
  RestoreRequest request;
  request.available.runs.push_back({64, {kHasHidden, kHasKv, kHasBoth, kHasBoth}});
  request.mode = Mode::kHidden;
  EXPECT_EQ(plan_of(costs, request).runs[0].layers,
            (std::vector<Method>{Method::kHidden, Method::kKv, Method::kHidden, Method::kHidden}));
  request.mode = Mode::kKv;
  EXPECT_EQ(plan_of(costs, request).schedule, "H:1 KV:3");
}

TEST(Availability, RunsWithDifferentMethodsAreNamedOneByOne) {
  RestoreRequest request;
  request.available.runs.push_back({512, std::vector<Encoding>(4, kHasHidden)});
  request.available.runs.push_back({230, std::vector<Encoding>(4, kHasKv)});
  request.mode = Mode::kHidden;
  Plan plan = plan_of(multi_head(4, 1), request);
  EXPECT_EQ(plan.schedule, "512t H:4 | 230t KV:4");
  ASSERT_EQ(plan.runs.size(), 2u);
  EXPECT_EQ(plan.runs[1].begin, 512);
}

TEST(Availability, EqualRunsAreMerged) {
  RestoreRequest request;
  for (int64_t tokens : {64, 64, 10}) {
    request.available.runs.push_back({tokens, std::vector<Encoding>(4, kHasKv)});
  }
  request.mode = Mode::kKv;
  Plan plan = plan_of(multi_head(4, 1), request);
  ASSERT_EQ(plan.runs.size(), 1u);
  EXPECT_EQ(plan.runs[0].tokens, 138);
  EXPECT_EQ(plan.schedule, "KV:4");
}

TEST(Availability, RecomputedTailOnlyProjectsWhenTheRestorerStopsThere) {
  RestoreCosts costs = multi_head(6, 1);
  RestoreRequest request;
  request.available.runs.push_back(
      {64, {kNoEncoding, kNoEncoding, kHasKv, kHasKv, kHasKv, kHasKv}});
  request.mode = Mode::kKv;
  EXPECT_NEAR(simulate(costs, plan_of(costs, request)).value().layers[1].compute_end, 768e-6,
              1e-12);
  costs.re_tail_projects = true;
  EXPECT_NEAR(simulate(costs, plan_of(costs, request)).value().layers[1].compute_end, 448e-6,
              1e-12);
}

// --- forced modes ---

TEST(Modes, NamesRoundTrip) {
  for (Mode mode : kAllModes) EXPECT_EQ(parse_mode(mode_name(mode)).value(), mode);
  EXPECT_EQ(parse_mode("fast").code(), Code::kInvalidArgument);
  EXPECT_NE(parse_mode("fast").status().message().find("naive-hybrid"), std::string::npos);
}

TEST(Modes, BaselinesAreWhatTheyAreCalled) {
  RestoreCosts costs = multi_head(32, 0.7);
  RestoreRequest request = everything_saved(1024, 32);
  auto schedule = [&](Mode mode) {
    request.mode = mode;
    return plan_of(costs, request).schedule;
  };
  EXPECT_EQ(schedule(Mode::kHidden), "H:32");
  EXPECT_EQ(schedule(Mode::kKv), "KV:32");
  EXPECT_EQ(schedule(Mode::kRecompute), "RE:32");
  EXPECT_EQ(schedule(Mode::kNaiveHybrid), "RE:10 KV:22");
}

TEST(Modes, TokenPartitionBalancesTokensInEveryLayer) {
  RestoreCosts costs = multi_head(40, 1 / 3.0);  // §6.3.2's balance: 13B, one A100, one SSD
  costs.batch_rows = 512;                        // the recomputed tokens follow in one batch
  RestoreRequest request = everything_saved(1024, 40);
  request.mode = Mode::kTokenPartition;
  Plan plain = plan_of(costs, request);
  EXPECT_EQ(plain.restored_tokens + plain.prefill_tokens, 1024);
  EXPECT_GT(plain.restored_tokens, 700);
  EXPECT_LT(plain.restored_tokens, 850);
  EXPECT_EQ(plain.schedule, "H:40");
  request.token_rounding = 256;
  Plan rounded = plan_of(costs, request);
  EXPECT_EQ(rounded.restored_tokens % 256, 0);
  EXPECT_GE(rounded.predicted.makespan_s, plain.predicted.makespan_s);
  request.mode = Mode::kPlan;
  EXPECT_LE(makespan(costs, request), plain.predicted.makespan_s * 1.01);
}

TEST(Modes, TokenPartitionUsesKvWhereComputeIsSlow) {
  RestoreCosts costs = multi_head(40, 1.6);
  RestoreRequest request = everything_saved(1000, 40);
  request.mode = Mode::kTokenPartition;
  request.token_rounding = 64;
  Plan plan = plan_of(costs, request);
  ASSERT_EQ(plan.runs.size(), 2u);
  EXPECT_EQ(plan.runs[0].tokens % 64, 0);
  EXPECT_EQ(plan.runs[1].layers[0], Method::kKv);
  EXPECT_EQ(plan.restored_tokens, 1000);
}

TEST(Modes, SteppedProductsPunishOddTokenPartitions) {
  // Figure 13b: a product over 700 rows costs what one over 768 does.
  RestoreCosts costs = multi_head(40, 1 / 3.0);
  std::vector<CostCurve::Point> steps;
  for (int64_t rows = 256; rows <= 2048; rows += 256) {
    steps.push_back({rows - 255, static_cast<double>(rows) / 3e6});
    steps.push_back({rows, static_cast<double>(rows) / 3e6});
  }
  costs.layers[0].project = CostCurve::table(steps).value();
  costs.slice_rows = 1024;
  RestoreRequest request = everything_saved(1024, 40);
  request.mode = Mode::kTokenPartition;
  const double plain = makespan(costs, request);
  request.token_rounding = 256;
  const double rounded = makespan(costs, request);
  request.mode = Mode::kPlan;
  EXPECT_LE(makespan(costs, request), std::min(plain, rounded) * (1 + 1e-9));
}

// --- tiers of different speed ---

TEST(Tiers, HostMemoryNeedsNoLinkAndASlowTierIsAvoided) {
  RestoreCosts costs = multi_head(24, 1.0);
  RestoreRequest request = everything_saved(1024, 24, 33);
  const Plan disk = plan_of(costs, request);
  EXPECT_GT(std::count(disk.runs[0].layers.begin(), disk.runs[0].layers.end(), Method::kHidden), 0);
  // In memory everything is there at once: nothing is projected that could be loaded.
  request.available.runs[0].slowness.assign(24, 0);
  const Plan memory = plan_of(costs, request);
  EXPECT_EQ(memory.schedule, "KV:24");
  EXPECT_EQ(memory.predicted.bytes_read, 0);
  EXPECT_EQ(memory.predicted.io_busy_s, 0);
  EXPECT_LT(memory.predicted.makespan_s, disk.predicted.makespan_s);
  // Its second half lies so far away that computing it is faster.
  request.available.runs[0].tokens = 512;
  request.available.runs.push_back(request.available.runs[0]);
  request.available.runs[1].slowness.assign(24, 1e6);
  const Plan half = plan_of(costs, request);
  EXPECT_EQ(half.restored_tokens, 512);
  EXPECT_EQ(half.schedule, "KV:24");
  // Some layers here, some there: those that are near need no reading.
  RestoreRequest mixed = everything_saved(1024, 24, 33);
  mixed.available.runs[0].slowness.assign(24, 1);
  for (size_t l = 0; l < 12; ++l) mixed.available.runs[0].slowness[l] = 0;
  const Plan both = plan_of(costs, mixed);
  EXPECT_LT(both.predicted.makespan_s, disk.predicted.makespan_s);
  EXPECT_GT(both.predicted.makespan_s, memory.predicted.makespan_s);
  EXPECT_TRUE(std::all_of(both.runs[0].layers.begin(), both.runs[0].layers.begin() + 6,
                          [](Method m) { return m == Method::kKv; }))
      << both.schedule;
  mixed.available.runs[0].slowness[3] = -1;
  EXPECT_EQ(plan_restore(costs, mixed).code(), Code::kInvalidArgument);
}

// --- the search against all there is ---

TEST(Search, EqualsBruteForce) {
  Random random(4);
  for (int i = 0; i < 1500; ++i) {
    const auto n_layer = static_cast<int32_t>(random.integer(1, 5));
    RestoreCosts costs = random.costs(n_layer);
    RestoreRequest request;
    const int64_t runs = random.integer(1, n_layer <= 3 ? 3 : 2);
    request.available = random.availability(n_layer, runs, random.coin() ? 0 : 0.1);
    request.new_tokens = random.integer(0, 30);
    Plan plan = plan_of(costs, request);
    EXPECT_NEAR(plan.predicted.makespan_s, testing::brute_force(costs, request),
                1e-9 * plan.predicted.makespan_s + 1e-15)
        << i << " " << plan.schedule;
    EXPECT_NEAR(plan.predicted.makespan_s, testing::reference_makespan(costs, plan), 1e-12);
  }
}

TEST(Search, EqualsBruteForceOverEveryOrderOfDeeperModels) {
  Random random(5);
  for (int i = 0; i < 60; ++i) {
    const int32_t n_layer = 9;
    RestoreCosts costs = random.costs(n_layer);
    RestoreRequest request = everything_saved(random.integer(1, 120), n_layer);
    request.new_tokens = random.integer(0, 40);
    EXPECT_NEAR(makespan(costs, request), testing::brute_force(costs, request), 1e-12) << i;
  }
}

TEST(Search, PaperShapesNeedNoOtherOrderThanHiddenThenKv) {
  // Johnson's rule: a cheaper read with a dearer computation goes first.
  for (double projection : {0.2, 0.8, 1.1, 1.5, 2.5}) {
    Plan plan = plan_of(multi_head(24, projection), everything_saved(777, 24, 33));
    const std::vector<Method>& layers = plan.runs.at(0).layers;
    EXPECT_TRUE(std::is_sorted(layers.begin(), layers.end())) << plan.schedule;
  }
}

TEST(Search, NoModeBeatsThePlan) {
  Random random(6);
  for (int i = 0; i < 400; ++i) {
    const auto n_layer = static_cast<int32_t>(random.integer(1, 24));
    RestoreCosts costs = random.costs(n_layer);
    if (random.coin(0.3)) costs.ring_bytes = random.integer(1, 200'000);
    RestoreRequest request;
    request.available = random.availability(n_layer, random.integer(1, 4), 0.02);
    request.new_tokens = random.integer(0, 60);
    const double best = makespan(costs, request);
    for (Mode mode : {Mode::kHidden, Mode::kKv, Mode::kRecompute, Mode::kNaiveHybrid}) {
      request.mode = mode;
      EXPECT_LE(best, makespan(costs, request) * (1 + 1e-9)) << i << " " << mode_name(mode);
    }
  }
}

TEST(Search, FasterResourcesNeverHurt) {
  Random random(7);
  for (int i = 0; i < 300; ++i) {
    const auto n_layer = static_cast<int32_t>(random.integer(1, 16));
    RestoreCosts costs = random.costs(n_layer);
    RestoreRequest request;
    request.available = random.availability(n_layer, random.integer(1, 4), 0.02);
    request.new_tokens = random.integer(0, 60);
    const double before = makespan(costs, request) * (1 + 1e-9);
    RestoreCosts link = costs;
    link.link.bytes_per_s *= random.real(1, 4);
    EXPECT_LE(makespan(link, request), before) << i;
    RestoreCosts device = costs;
    for (LayerCosts& layer : device.layers) {
      layer.project = layer.project.scaled(0.7);
      layer.dense = layer.dense.scaled(0.9);
    }
    EXPECT_LE(makespan(device, request), before) << i;
  }
}

TEST(Search, MorePagesNeverHurt) {
  Random random(8);
  for (int i = 0; i < 500; ++i) {
    const auto n_layer = static_cast<int32_t>(random.integer(1, 12));
    RestoreCosts costs = random.costs(n_layer);
    RestoreRequest request;
    request.available = random.availability(n_layer, random.integer(1, 4), 0.1);
    request.new_tokens = random.integer(0, 60);
    const double before = makespan(costs, request) * (1 + 1e-9);
    for (int more = 0; more < 3; ++more) {
      auto& run = request.available.runs[static_cast<size_t>(
          random.integer(0, static_cast<int64_t>(request.available.runs.size()) - 1))];
      auto& cell = run.layers[static_cast<size_t>(random.integer(0, n_layer - 1))];
      cell = static_cast<Encoding>(cell | random.integer(1, 3));
      EXPECT_LE(makespan(costs, request), before) << i;
    }
  }
}

TEST(Search, DoesNotDependOnTheUnitOfTime) {
  Random random(9);
  for (int i = 0; i < 100; ++i) {
    RestoreCosts costs = random.costs(12);
    RestoreRequest request;
    request.available = random.availability(12, 2, 0);
    request.new_tokens = 20;
    RestoreCosts slow = costs;
    for (LayerCosts& layer : slow.layers) {
      layer.project = layer.project.scaled(1000);
      layer.load_kv = layer.load_kv.scaled(1000);
      layer.dense = layer.dense.scaled(1000);
      layer.attn_per_key = layer.attn_per_key.scaled(1000);
    }
    slow.link.bytes_per_s /= 1000;
    slow.link.upload_bytes_per_s /= 1000;
    for (LayerCosts& layer : slow.layers) layer.upload_bytes_per_s /= 1000;
    slow.link.request_s *= 1000;
    slow.link.start_s *= 1000;
    slow.finish_s *= 1000;
    const double expected = 1000 * makespan(costs, request);
    EXPECT_NEAR(makespan(slow, request), expected, 1e-9 * expected);
  }
}

TEST(Search, RingPlansAreSimulatedAndNoWorseThanTheSplitsWithoutIt) {
  Random random(10);
  for (int i = 0; i < 200; ++i) {
    const auto n_layer = static_cast<int32_t>(random.integer(1, 10));
    RestoreCosts costs = random.costs(n_layer);
    RestoreRequest request = everything_saved(random.integer(1, 150), n_layer);
    request.new_tokens = random.integer(0, 30);
    const double unlimited = makespan(costs, request);
    costs.ring_bytes = random.integer(1, 200'000);
    Plan plan = plan_of(costs, request);
    EXPECT_NEAR(plan.predicted.makespan_s, testing::reference_makespan(costs, plan), 1e-12);
    EXPECT_GE(plan.predicted.makespan_s, unlimited * (1 - 1e-9));
    double contiguous = testing::reference_makespan(
        costs, testing::make_plan(costs, request, 0, 0, [](size_t) { return false; }));
    for (int32_t a = 0; a < n_layer; ++a) {
      for (int32_t split = a; split <= n_layer; ++split) {
        for (bool hidden_first : {true, false}) {
          Plan p = testing::make_plan(costs, request, 1, a, [&](size_t cell) {
            return (a + static_cast<int32_t>(cell) < split) != hidden_first;
          });
          contiguous = std::min(contiguous, testing::reference_makespan(costs, p));
        }
      }
    }
    EXPECT_LE(plan.predicted.makespan_s, contiguous * (1 + 1e-9)) << i;
  }
}

// --- several devices

TEST(Devices, TwoProjectTwiceAsMuchBesideTheSameReads) {
  RestoreCosts costs = multi_head(32, 1.5);
  const double one = makespan(costs, everything_saved(1024, 32));
  costs.device_layers = {16, 16};
  const Plan plan = plan_of(costs, everything_saved(1024, 32));
  // One has to load layers as K and V; two are as fast as the link with hidden states alone.
  EXPECT_LT(plan.predicted.makespan_s, 0.85 * one);
  EXPECT_EQ(std::count(plan.runs[0].layers.begin(), plan.runs[0].layers.end(), Method::kKv), 0)
      << plan.schedule;
  EXPECT_GT(plan.predicted.io_busy_s, 0.95 * plan.predicted.makespan_s);
}

// The slower one's layers are loaded, the faster one's are projected.
TEST(Devices, EachHasItsOwnSplit) {
  RestoreCosts costs = multi_head(16, 1);
  costs.layers.assign(16, costs.layers[0]);
  for (size_t l = 8; l < 16; ++l) costs.layers[l].project = CostCurve::affine(0, 6e-6);
  costs.device_layers = {8, 8};
  const Plan plan = plan_of(costs, everything_saved(1024, 16));
  const std::vector<Method>& layers = plan.runs.at(0).layers;
  const auto n_kv = [&](size_t from) {
    const auto begin = layers.begin() + static_cast<std::ptrdiff_t>(from);
    return std::count(begin, begin + 8, Method::kKv);
  };
  EXPECT_EQ(n_kv(0), 0) << plan.schedule;
  EXPECT_GT(n_kv(8), 3) << plan.schedule;
}

// Against every contiguous split of each device's layers behind every RE prefix.
TEST(Devices, TheClimbComesCloseToTheBestOfAllSplits) {
  Random random(12);
  double worst = 1;
  double sum = 0;
  int n = 0;
  for (int i = 0; i < 300; ++i) {
    const auto n_first = static_cast<int32_t>(random.integer(1, 5));
    const auto n_second = static_cast<int32_t>(random.integer(1, 5));
    const int32_t n_layer = n_first + n_second;
    RestoreCosts costs = random.costs(n_layer);
    if (random.coin()) costs.ring_bytes = random.integer(1, 300'000);
    costs.device_layers = {n_first, n_second};
    RestoreRequest request = everything_saved(random.integer(1, 150), n_layer);
    request.new_tokens = random.integer(0, 30);
    const Plan plan = plan_of(costs, request);
    EXPECT_EQ(plan.predicted.makespan_s, simulate(costs, plan).value().total.makespan_s);
    double best =
        simulate(costs, testing::make_plan(costs, request, 0, 0, [](size_t) { return false; }))
            .value()
            .total.makespan_s;
    for (int32_t a = 0; a < n_layer; ++a) {
      for (int32_t one = 0; one <= n_first; ++one) {
        for (int32_t two = 0; two <= n_second; ++two) {
          for (const bool hidden_first : {true, false}) {
            const Plan p = testing::make_plan(costs, request, 1, a, [&](size_t cell) {
              const int32_t l = a + static_cast<int32_t>(cell);
              const bool first = l < n_first ? l < one : l - n_first < two;
              return first != hidden_first;
            });
            best = std::min(best, simulate(costs, p).value().total.makespan_s);
          }
        }
      }
    }
    EXPECT_GE(plan.predicted.makespan_s, best * (1 - 1e-9)) << i;
    if (best == 0) continue;
    worst = std::max(worst, plan.predicted.makespan_s / best);
    sum += plan.predicted.makespan_s / best;
    ++n;
    for (const Mode mode : {Mode::kHidden, Mode::kKv, Mode::kRecompute}) {
      request.mode = mode;
      EXPECT_LE(plan.predicted.makespan_s, makespan(costs, request) * (1 + 1e-9))
          << i << " " << mode_name(mode);
    }
  }
  EXPECT_LE(worst, 1.1);
  EXPECT_LE(sum / n, 1.002);
}

TEST(Devices, TheirLayersMustBeTheModels) {
  RestoreCosts costs = multi_head(4, 1);
  for (const std::vector<int32_t>& layers :
       {std::vector<int32_t>{2, 1}, std::vector<int32_t>{4, 0}, std::vector<int32_t>{5, -1}}) {
    costs.device_layers = layers;
    EXPECT_EQ(plan_restore(costs, everything_saved(64, 4)).code(), Code::kInvalidArgument);
  }
}

TEST(Search, ManyRunsStillGiveAValidPlan) {
  Random random(11);
  RestoreCosts costs = random.costs(20);
  RestoreRequest request;
  request.available = random.availability(20, 60, 0);
  request.new_tokens = 10;
  Plan plan = plan_of(costs, request);
  EXPECT_NEAR(plan.predicted.makespan_s, testing::reference_makespan(costs, plan), 1e-12);
  request.mode = Mode::kKv;
  EXPECT_LE(plan.predicted.makespan_s, makespan(costs, request) * (1 + 1e-9));
}

TEST(PlanRestore, RejectsBadRequests) {
  RestoreCosts costs = multi_head(4, 1);
  RestoreRequest request = everything_saved(64, 4);
  request.new_tokens = -1;
  EXPECT_EQ(plan_restore(costs, request).code(), Code::kInvalidArgument);
  request = everything_saved(64, 3);
  EXPECT_EQ(plan_restore(costs, request).code(), Code::kInvalidArgument);
  request = everything_saved(64, 4);
  request.available.runs[0].tokens = 0;
  EXPECT_EQ(plan_restore(costs, request).code(), Code::kInvalidArgument);
  request = everything_saved(64, 4);
  request.token_rounding = 0;
  EXPECT_EQ(plan_restore(costs, request).code(), Code::kInvalidArgument);
}

TEST(ScheduleString, LeavesOutWhatIsNotUsed) {
  EXPECT_EQ(schedule_string({Method::kRecompute, Method::kHidden, Method::kKv, Method::kKv}),
            "RE:1 H:1 KV:2");
  EXPECT_EQ(paper_schedule_string(31, 1, 0), "31H+1KV");
  EXPECT_EQ(paper_schedule_string(40, 0, 8), "40H+8RE");
  EXPECT_EQ(paper_schedule_string(32, 0, 0), "32H");
}

}  // namespace
}  // namespace hcache::policy
