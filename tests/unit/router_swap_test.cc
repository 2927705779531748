// Which models are loaded and unloaded when.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "swap_plan.h"

namespace hcache::router {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr std::int64_t kSecond = 1'000'000'000;

ModelView unloaded() { return {}; }
ModelView wanted(std::int64_t since_ns, std::uint64_t bytes = 100) {
  ModelView m;
  m.waiting = 1;
  m.waits_since_ns = since_ns;
  m.bytes = bytes;
  return m;
}
ModelView loaded(std::int64_t used_ns, std::int64_t running = 0, std::uint64_t bytes = 100) {
  ModelView m;
  m.state = ModelState::kLoaded;
  m.used_ns = used_ns;
  m.running = running;
  m.bytes = bytes;
  return m;
}
ModelView in_state(ModelState state) {
  ModelView m = loaded(0);
  m.state = state;
  return m;
}

SwapSnapshot at(std::int64_t now_ns, std::vector<ModelView> models) {
  SwapSnapshot out;
  out.models = std::move(models);
  out.now_ns = now_ns;
  return out;
}

SwapLimits at_most(std::int64_t models) {
  SwapLimits limits;
  limits.max_loaded = models;
  return limits;
}

TEST(SwapPlan, LoadsWhatIsWantedWhereThereIsRoom) {
  const SwapPlan plan = plan_swap(at(9, {unloaded(), wanted(7), wanted(5), loaded(1)}), at_most(4));
  EXPECT_THAT(plan.load, ElementsAre(2, 1));  // who came first is first
  EXPECT_THAT(plan.unload, IsEmpty());
  EXPECT_FALSE(plan.hold.has_value());
}

TEST(SwapPlan, TheIdleOneThatWasUsedLeastRecentlyMakesRoom) {
  const SwapPlan plan =
      plan_swap(at(9, {loaded(3), loaded(1, 1), loaded(2), wanted(5)}), at_most(3));
  EXPECT_THAT(plan.unload, ElementsAre(2));  // not 1, which answers
  EXPECT_THAT(plan.load, IsEmpty());         // until that one has gone
}

TEST(SwapPlan, WhatIsOnItsWayOutIsEnough) {
  const SwapPlan plan =
      plan_swap(at(9, {in_state(ModelState::kUnloading), loaded(1), wanted(5)}), at_most(2));
  EXPECT_THAT(plan.unload, IsEmpty());
  EXPECT_THAT(plan.load, IsEmpty());
}

TEST(SwapPlan, NobodyIsOvertakenByWhoCameLater) {
  // The first is too large for what is left; the second would fit.
  SwapLimits limits = at_most(0);
  limits.memory_bytes = 1000;
  const SwapPlan plan =
      plan_swap(at(9, {wanted(1, 900), wanted(2, 100), loaded(0, 1, 500)}), limits);
  EXPECT_THAT(plan.load, IsEmpty());
  EXPECT_THAT(plan.unload, IsEmpty());
}

TEST(SwapPlan, BusyModelsAreWaitedForUntilPatienceEnds) {
  SwapSnapshot snapshot = at(5 * kSecond, {loaded(4, 2), loaded(3, 1), wanted(0)});
  snapshot.models[0].loaded_ns = 1;
  snapshot.models[1].loaded_ns = 2;
  EXPECT_FALSE(plan_swap(snapshot, at_most(2)).hold.has_value());
  snapshot.now_ns = 10 * kSecond;
  SwapPlan plan = plan_swap(snapshot, at_most(2));
  EXPECT_EQ(plan.hold, 0U);  // the one that has been there for longest
  EXPECT_THAT(plan.unload, IsEmpty());
  // Its requests have ended, others wait for it already.
  snapshot.models[0].running = 0;
  snapshot.models[0].waiting = 3;
  plan = plan_swap(snapshot, at_most(2));
  EXPECT_EQ(plan.hold, 0U);
  EXPECT_THAT(plan.unload, ElementsAre(0));
  // Who wanted the room has left.
  snapshot.models[2].waiting = 0;
  plan = plan_swap(snapshot, at_most(2));
  EXPECT_FALSE(plan.hold.has_value());
  EXPECT_THAT(plan.unload, IsEmpty());
}

TEST(SwapPlan, IdleModelsLeave) {
  SwapLimits limits = at_most(4);
  EXPECT_THAT(plan_swap(at(1000 * kSecond, {loaded(0)}), limits).unload, IsEmpty());
  limits.idle_ns = 60 * kSecond;
  const SwapPlan plan = plan_swap(
      at(100 * kSecond, {loaded(40 * kSecond), loaded(41 * kSecond), loaded(0, 1)}), limits);
  EXPECT_THAT(plan.unload, ElementsAre(0));
}

TEST(SwapPlan, WhatIsAskedToLeaveLeavesOnceItAnswersNothing) {
  SwapSnapshot snapshot = at(9, {loaded(1, 1)});
  snapshot.models[0].unload_asked = true;
  EXPECT_THAT(plan_swap(snapshot, at_most(4)).unload, IsEmpty());
  snapshot.models[0].running = 0;
  snapshot.models[0].waiting = 2;  // they get it loaded anew
  EXPECT_THAT(plan_swap(snapshot, at_most(4)).unload, ElementsAre(0));
}

TEST(SwapPlan, FreeMemoryCountsWhatLoadingModelsWillTake) {
  SwapLimits limits = at_most(0);
  limits.reserve_bytes = 10;
  SwapSnapshot snapshot = at(9, {loaded(1), in_state(ModelState::kLoading), wanted(2, 200)});
  snapshot.free_bytes = 310;
  EXPECT_THAT(plan_swap(snapshot, limits).load, ElementsAre(2));
  snapshot.free_bytes = 309;
  const SwapPlan plan = plan_swap(snapshot, limits);
  EXPECT_THAT(plan.load, IsEmpty());
  EXPECT_THAT(plan.unload, ElementsAre(0));
}

TEST(SwapPlan, WhatDidNotFitIsTriedBesideFewer) {
  SwapSnapshot snapshot = at(9, {loaded(2), loaded(1), wanted(3)});
  snapshot.models[2].most_beside = 1;
  SwapPlan plan = plan_swap(snapshot, at_most(4));
  EXPECT_THAT(plan.load, IsEmpty());
  EXPECT_THAT(plan.unload, ElementsAre(1));
  snapshot.models[1] = unloaded();
  plan = plan_swap(snapshot, at_most(4));
  EXPECT_THAT(plan.load, ElementsAre(2));
  EXPECT_THAT(plan.unload, IsEmpty());
}

TEST(SwapPlan, AloneAModelMayHaveAllThereIs) {
  SwapLimits limits = at_most(1);
  limits.memory_bytes = 50;
  SwapSnapshot snapshot = at(9, {wanted(2, 200), wanted(3, 200)});
  snapshot.free_bytes = 10;
  EXPECT_THAT(plan_swap(snapshot, limits).load, ElementsAre(0));
}

// Models that load, answer and leave at random: whatever is wanted is loaded in the end, the limit
// holds, and nothing that answers leaves.
TEST(SwapPlan, EverybodyIsServedInTheEnd) {
  std::mt19937 random(7);
  const auto chance = [&](unsigned one_in) { return random() % one_in == 0; };
  for (int run = 0; run < 50; ++run) {
    SwapLimits limits = at_most(1 + static_cast<std::int64_t>(random() % 3));
    limits.patience_ns = 20;
    std::vector<ModelView> models(5);
    for (ModelView& m : models) m = wanted(0);
    std::vector<int> loads(models.size());
    for (std::int64_t now = 0; now < 3000; ++now) {
      const SwapSnapshot snapshot = at(now, models);
      const SwapPlan plan = plan_swap(snapshot, limits);
      for (const std::size_t i : plan.unload) {
        ASSERT_EQ(models[i].running, 0);
        models[i].state = ModelState::kUnloading;
      }
      for (const std::size_t i : plan.load) models[i].state = ModelState::kLoading;
      std::int64_t in_memory = 0;
      for (std::size_t i = 0; i < models.size(); ++i) {
        ModelView& m = models[i];
        in_memory += m.state == ModelState::kUnloaded ? 0 : 1;
        if (m.state == ModelState::kUnloading && chance(5)) m.state = ModelState::kUnloaded;
        if (m.state == ModelState::kLoading && chance(5)) {
          m.state = ModelState::kLoaded;
          m.loaded_ns = m.used_ns = now;
          loads[i]++;
        }
        if (m.state == ModelState::kLoaded && plan.hold != i) {
          m.running += m.waiting;
          m.waiting = 0;
        }
        // The first model's clients never stop asking.
        if (i == 0 ? m.running + m.waiting < 3 : chance(10)) {
          if (m.state == ModelState::kLoaded && plan.hold != i) {
            m.running++;
            m.used_ns = now;
          } else if (m.waiting++ == 0) {
            m.waits_since_ns = now;
          }
        }
        if (m.running > 0 && chance(2)) m.running--;
      }
      ASSERT_LE(in_memory, limits.max_loaded);
    }
    for (const int n : loads) EXPECT_GE(n, 2) << "run " << run;
  }
}

}  // namespace
}  // namespace hcache::router
