#include <gtest/gtest.h>

#include "policy/hardware_plan.h"
#include "policy/save_plan.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

using testing::multi_head;
using testing::Random;

SavePlan save(const RestoreCosts& costs, const SaveRequest& request = {},
              const SavePlan* previous = nullptr) {
  return plan_save(costs, request, previous).value();
}

// SmolLM2 (9 heads on 3): 648 B of native hidden states against 768 B of F16 KV.
RestoreCosts grouped_3_to_1(double link_bytes_per_s) {
  RestoreCosts costs = multi_head(30, 1);
  costs.layers[0].project = CostCurve::affine(20e-6, 0.25e-6);
  costs.layers[0].load_kv = CostCurve::affine(5e-6, 0.06e-6);
  costs.layers[0].dense = CostCurve::affine(50e-6, 9e-6);
  costs.layers[0].attn_per_key = CostCurve::affine(0, 9e-9);
  costs.layers[0].hidden_bytes = 648;
  costs.layers[0].kv_bytes = 768;
  costs.link.bytes_per_s = link_bytes_per_s;
  costs.slice_rows = 512;
  costs.batch_rows = 512;
  return costs;
}

TEST(SavePlan, NamesRoundTrip) {
  for (SaveMode mode : {SaveMode::kPlan, SaveMode::kHidden, SaveMode::kKv, SaveMode::kAll}) {
    EXPECT_EQ(parse_save_mode(save_mode_name(mode)).value(), mode);
  }
  EXPECT_EQ(parse_save_mode("none").code(), Code::kInvalidArgument);
}

TEST(SavePlan, ForcedModesSaveWhatTheySay) {
  RestoreCosts costs = multi_head(8, 1);
  SaveRequest request;
  request.mode = SaveMode::kHidden;
  EXPECT_EQ(save(costs, request).schedule, "H:8");
  EXPECT_EQ(save(costs, request).bytes_per_token, 8000);
  request.mode = SaveMode::kKv;
  EXPECT_EQ(save(costs, request).schedule, "KV:8");
  EXPECT_EQ(save(costs, request).bytes_per_token, 16000);
  request.mode = SaveMode::kAll;
  EXPECT_EQ(save(costs, request).schedule, "H+KV:8");
  EXPECT_EQ(save(costs, request).bytes_per_token, 24000);
  EXPECT_EQ(save(costs, request).kv_bytes_per_token, 16000);
}

TEST(SavePlan, SavesTheEncodingThatRestoresWillRead) {
  SaveRequest request;
  request.history = 1024;
  request.new_tokens = 0;
  request.tolerance = 0;
  SavePlan plan = save(multi_head(32, 1.5), request);
  EXPECT_EQ(plan.schedule, "H:25 KV:7");
  RestoreRequest restore;
  restore.available = Availability::uniform(1024, 32, kHasBoth);
  EXPECT_NEAR(plan.predicted.makespan_s,
              plan_restore(multi_head(32, 1.5), restore).value().predicted.makespan_s, 1e-12);
}

TEST(SavePlan, ThePapersChoiceLeavesRecomputedLayersUnsaved) {
  SaveRequest request;
  request.history = 1024;
  request.new_tokens = 0;
  request.link_headroom = request.history_headroom = 1;
  EXPECT_EQ(save(multi_head(48, 0.4), request).schedule, "RE:10 H:38");
}

TEST(SavePlan, HeadroomSavesLayersThatFasterLinksWouldRead) {
  SaveRequest request;
  request.history = 1024;
  request.new_tokens = 0;
  SavePlan plan = save(multi_head(48, 0.4), request);
  // With twice the link the projection is near balance: nothing would be recomputed.
  RestoreCosts faster = multi_head(48, 0.4);
  faster.link.bytes_per_s *= 2;
  RestoreRequest restore;
  restore.available = Availability::uniform(1024, 48, kHasBoth);
  const int32_t recompute = plan_restore(faster, restore).value().recompute_layers;
  for (int32_t l = 0; l < 48; ++l) {
    EXPECT_EQ(plan.layers[static_cast<size_t>(l)] == kNoEncoding, l < recompute);
  }
  // The restore still recomputes what is best today.
  restore.available = Availability::uniform(1024, 48, kHasBoth);
  restore.available.runs[0].layers = plan.layers;
  EXPECT_GE(plan_restore(multi_head(48, 0.4), restore).value().recompute_layers, recompute);
}

// Of conversations that may be cut no more than the first layer can be computed again.
TEST(SavePlan, LeavesNoMoreLayersUnsavedThanItMay) {
  const RestoreCosts costs = multi_head(48, 0.4);
  SaveRequest request;
  request.history = 1024;
  request.new_tokens = 0;
  request.link_headroom = request.history_headroom = 1;
  const SavePlan free = save(costs, request);
  const auto unsaved = [](const SavePlan& plan) {
    return std::count(plan.layers.begin(), plan.layers.end(), kNoEncoding);
  };
  ASSERT_GT(unsaved(free), 1);
  request.max_unsaved_layers = 1;
  const SavePlan bound = save(costs, request, &free);  // which does not stay
  EXPECT_LE(unsaved(bound), 1);
  EXPECT_LE(bound.predicted.makespan_s, free.predicted.makespan_s * (1 + request.tolerance));
  request.max_unsaved_layers = 0;
  EXPECT_EQ(unsaved(save(costs, request)), 0);
}

TEST(SavePlan, NeverStoresMoreThanTheKvCacheOnGroupedQueryModels) {
  for (double link = 1e5; link < 1e11; link *= 3) {
    RestoreCosts costs = grouped_3_to_1(link);
    for (int64_t history : {64, 1024, 8192}) {
      SaveRequest request;
      request.history = history;
      SavePlan plan = save(costs, request);
      EXPECT_LE(plan.bytes_per_token, 30 * 768) << link << " " << plan.schedule;
      EXPECT_EQ(plan.kv_bytes_per_token, 30 * 768);
      for (Encoding e : plan.layers) EXPECT_NE(e, kHasBoth);
    }
  }
}

TEST(SavePlan, StaysBelowTheKvCacheWithTheStoresOwnBytesOnTop) {
  for (const bool embeddings : {false, true}) {
    for (double link = 1e5; link < 1e11; link *= 3) {
      RestoreCosts costs = grouped_3_to_1(link);
      costs.re_tail_projects = embeddings;
      SaveRequest request;
      request.overhead_bytes_per_token = 46;
      const SavePlan plan = save(costs, request);
      EXPECT_LE(plan.bytes_per_token + 46, 30 * 768) << link << " " << plan.schedule;
    }
  }
  // With larger hidden states only layer 0 can give way.
  RestoreCosts costs = grouped_3_to_1(1e11);
  costs.layers[0].hidden_bytes = 1152;
  SaveRequest request;
  request.overhead_bytes_per_token = 46;
  EXPECT_EQ(save(costs, request).schedule, "KV:30");  // as far as possible
  costs.re_tail_projects = true;
  const SavePlan plan = save(costs, request);
  EXPECT_EQ(plan.schedule, "RE:1 KV:29");
  EXPECT_EQ(plan.bytes_per_token, 29 * 768);
  // A plan of before that takes too much is given up, however little that gains.
  SavePlan before = plan;
  before.layers.assign(30, kHasKv);
  EXPECT_EQ(save(costs, request, &before).schedule, "RE:1 KV:29");
}

TEST(SavePlan, LayerZeroComesFromEmbeddingsWhereThatCostsNothing) {
  // Reads are all that takes time, so the layer that needs none is a gain.
  RestoreCosts costs = multi_head(8, 0.5);
  costs.re_tail_projects = true;
  SaveRequest request;
  request.history = 1024;
  request.new_tokens = 0;
  request.link_headroom = request.history_headroom = 1;
  const SavePlan plan = save(costs, request);
  EXPECT_EQ(plan.layers[0], kNoEncoding) << plan.schedule;
  costs.re_tail_projects = false;
  EXPECT_LE(plan.predicted.makespan_s, save(costs, request).predicted.makespan_s);
}

TEST(SavePlan, LargerHiddenStatesAreNeverSaved) {
  for (double link = 1e5; link < 1e11; link *= 3) {
    RestoreCosts costs = grouped_3_to_1(link);
    costs.layers[0].hidden_bytes = 1152;  // F16 hidden states of the same model
    SavePlan plan = save(costs);
    EXPECT_EQ(plan.schedule.find("H:"), std::string::npos) << plan.schedule;
    EXPECT_LE(plan.bytes_per_token, plan.kv_bytes_per_token);
  }
}

TEST(SavePlan, EqualSpeedPrefersFewerBytes) {
  // Prefill of the new tokens hides every read.
  RestoreCosts costs = multi_head(8, 0.001);
  costs.layers[0].dense = CostCurve::affine(0, 100e-6);
  costs.link.bytes_per_s = 1e9;
  SaveRequest request;
  request.history = 640;
  request.new_tokens = 640;
  EXPECT_EQ(save(costs, request).schedule, "H:8");
}

TEST(SavePlan, HysteresisKeepsThePlanUnderNoise) {
  SaveRequest request;
  request.history = 1024;
  RestoreCosts costs = multi_head(32, 1.5);
  SavePlan plan = save(costs, request);
  const std::vector<Encoding> before = plan.layers;
  Random random(12);
  for (int i = 0; i < 40; ++i) {
    RestoreCosts noisy = costs;
    noisy.link.bytes_per_s *= random.real(0.93, 1.07);
    plan = save(noisy, request, &plan);
    EXPECT_EQ(plan.layers, before) << i;
  }
}

TEST(SavePlan, HysteresisYieldsToARealChange) {
  SaveRequest request;
  request.history = 1024;
  RestoreCosts costs = multi_head(32, 1.5);
  SavePlan plan = save(costs, request);
  RestoreCosts fast = costs;
  fast.link.bytes_per_s *= 20;
  SavePlan next = save(fast, request, &plan);
  EXPECT_EQ(next.schedule, "KV:32");
  // And back: KV everywhere would be slower and twice the bytes.
  EXPECT_EQ(save(costs, request, &next).schedule, plan.schedule);
}

TEST(SavePlan, HysteresisNeverOscillates) {
  Random random(13);
  for (int i = 0; i < 60; ++i) {
    RestoreCosts a = random.costs(6);
    RestoreCosts b = a;
    b.link.bytes_per_s *= random.real(0.97, 1.03);
    SaveRequest request;
    request.history = random.integer(20, 200);
    SavePlan plan = save(a, request);
    int changes = 0;
    for (int k = 0; k < 6; ++k) {
      SavePlan next = save(k % 2 == 0 ? b : a, request, &plan);
      if (next.layers != plan.layers) ++changes;
      plan = next;
    }
    EXPECT_LE(changes, 1) << i;
  }
}

TEST(SavePlan, KeptPlansArePredictedAnew) {
  SaveRequest request;
  RestoreCosts costs = multi_head(32, 1.5);
  SavePlan plan = save(costs, request);
  RestoreCosts slower = costs;
  slower.link.bytes_per_s *= 0.97;
  SavePlan kept = save(slower, request, &plan);
  EXPECT_EQ(kept.layers, plan.layers);
  EXPECT_GE(kept.predicted.makespan_s, plan.predicted.makespan_s);
}

TEST(SavePlan, PreviousPlanOfAnotherModelOrModeIsIgnored) {
  SaveRequest request;
  SavePlan other = save(multi_head(8, 1.5), request);
  EXPECT_EQ(save(multi_head(32, 1.5), request, &other).layers.size(), 32u);
  SaveRequest all;
  all.mode = SaveMode::kAll;
  SavePlan everything = save(multi_head(32, 1.5), all);
  SavePlan plan = save(multi_head(32, 1.5), request, &everything);
  EXPECT_EQ(plan.mode, SaveMode::kPlan);
  EXPECT_NE(plan.schedule, everything.schedule);
}

TEST(SavePlan, BudgetTradesSpeedForBytes) {
  RestoreCosts costs = multi_head(32, 1.5);
  costs.link.bytes_per_s *= 20;  // KV everywhere is fastest
  SaveRequest request;
  EXPECT_EQ(save(costs, request).schedule, "KV:32");
  request.max_bytes_per_token = 32 * 1000 * 5 / 4;
  SavePlan plan = save(costs, request);
  EXPECT_LE(plan.bytes_per_token, request.max_bytes_per_token);
  EXPECT_EQ(plan.schedule, "H:24 KV:8");
  SavePlan roomy = save(costs, SaveRequest{});
  EXPECT_LE(save(costs, request, &roomy).bytes_per_token, request.max_bytes_per_token);
  request.max_bytes_per_token = 1;  // as far as possible
  EXPECT_EQ(save(costs, request).schedule, "H:32");
}

TEST(SavePlan, MatchesThePapersStorageRatio) {
  HardwareSetup setup;
  setup.device = find_device("a100").value();
  setup.model = find_model("opt-30b").value();
  setup.n_gpu = setup.n_ssd = 4;
  RestoreCosts costs = hardware_costs(setup).value();
  SaveRequest request;
  request.history = 1024;
  request.new_tokens = 0;
  request.link_headroom = request.history_headroom = 1;
  SavePlan plan = save(costs, request);
  EXPECT_GE(
      static_cast<double>(plan.kv_bytes_per_token) / static_cast<double>(plan.bytes_per_token),
      2.3);  // Table 3: 2.40
}

TEST(SavePlan, RejectsBadRequests) {
  auto code = [](auto change) {
    SaveRequest request;
    change(request);
    return plan_save(multi_head(4, 1), request, nullptr).code();
  };
  EXPECT_EQ(code([](auto& r) { r.history = 0; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& r) { r.new_tokens = -1; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& r) { r.min_gain = 1; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& r) { r.tolerance = -0.1; }), Code::kInvalidArgument);
  EXPECT_EQ(code([](auto& r) { r.link_headroom = 0.5; }), Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache::policy
