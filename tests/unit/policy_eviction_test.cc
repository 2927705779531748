#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string_view>

#include "policy/eviction.h"

namespace hcache::policy {
namespace {

using ::testing::HasSubstr;

// Evicts until nothing may go, and says in which order.
std::vector<uint64_t> drain(EvictionOrder& order, double now_s) {
  std::vector<uint64_t> gone;
  const size_t n = order.size();
  while (const auto id = order.victim(now_s)) {
    EXPECT_LT(gone.size(), n) << "a victim is not erased";
    if (gone.size() >= n) break;
    gone.push_back(*id);
    order.erase(*id, now_s);
  }
  return gone;
}

TEST(EvictPolicies, HaveNames) {
  std::set<std::string_view> names;
  for (const auto& [name, keeps] : evict_policies()) {
    const auto policy = parse_evict_policy(name);
    ASSERT_TRUE(policy.ok()) << name;
    EXPECT_EQ(evict_policy_name(*policy), name);
    EXPECT_FALSE(keeps.empty()) << name;
    EXPECT_TRUE(names.insert(name).second) << name;
  }
  EXPECT_EQ(parse_evict_policy("lru").value(), EvictPolicy::kLru);
  EXPECT_EQ(parse_evict_policy("scheduler-aware").value(), EvictPolicy::kSchedulerAware);
  EXPECT_EQ(parse_evict_policy("car-score").value(), EvictPolicy::kCarScore);
  EXPECT_EQ(parse_evict_policy("cost-aware").value(), EvictPolicy::kCostAware);
  EXPECT_EQ(parse_evict_policy("mru").code(), Code::kInvalidArgument);
  EXPECT_THAT(parse_evict_policy("mru").status().message(), HasSubstr("scheduler-aware"));
}

TEST(EvictionOrder, FollowsItsPolicy) {
  const auto filled = [](EvictPolicy policy) {
    EvictionOrder order(policy);
    for (const uint64_t id : {1, 2, 3}) order.insert(id, static_cast<double>(id), {1, 1});
    order.insert(2, 4, {1, 1});  // it is there: used
    order.use(2, 5);
    order.use(1, 6);
    return order;
  };
  EvictionOrder lru = filled(EvictPolicy::kLru);
  EXPECT_EQ(drain(lru, 10), (std::vector<uint64_t>{3, 2, 1}));
  EvictionOrder fifo = filled(EvictPolicy::kFifo);
  EXPECT_EQ(drain(fifo, 10), (std::vector<uint64_t>{1, 2, 3}));
  EvictionOrder lfu = filled(EvictPolicy::kLfu);
  EXPECT_EQ(drain(lfu, 10), (std::vector<uint64_t>{3, 1, 2}));
  EvictionOrder car = filled(EvictPolicy::kCarScore);
  car.set_demand(3, {.first = {}, .score = 2});
  car.set_demand(1, {.first = 4, .score = 1});
  car.set_demand(3, {});
  EXPECT_EQ(drain(car, 10), (std::vector<uint64_t>{3, 2, 1}));
}

TEST(EvictionOrder, KeepsWhatTheQueueWants) {
  for (const EvictPolicy policy : {EvictPolicy::kSchedulerAware, EvictPolicy::kCostAware}) {
    EvictionOrder order(policy);
    for (const uint64_t id : {1, 2, 3, 4}) order.insert(id, static_cast<double>(id), {1, 1});
    order.set_demand(1, {.first = 7});
    order.set_demand(2, {.first = 9});
    order.set_demand(3, {.first = 8});
    order.set_demand(3, {});
    // What nobody wants in the order of use, then the last in the queue.
    EXPECT_EQ(drain(order, 10), (std::vector<uint64_t>{3, 4, 2, 1})) << evict_policy_name(policy);
  }
}

TEST(IdleSequences, ThePolicysFirstThatMayGo) {
  const auto lru = EvictPolicy::kLru;
  const auto ahead = EvictPolicy::kSchedulerAware;
  EXPECT_EQ(choose_eviction({}, lru), -1);
  const std::vector<IdleSequence> idle = {
      {5, true, false}, {1, false, false}, {2, true, true}, {3, true, false}};
  for (const EvictPolicy policy : {lru, EvictPolicy::kFifo, EvictPolicy::kLfu, ahead}) {
    EXPECT_EQ(choose_eviction(idle, policy), 3);
  }
  const std::vector<IdleSequence> none = {{1, false, false}, {2, true, true}};
  EXPECT_EQ(choose_eviction(none, lru), -1);
  std::vector<IdleSequence> wanted = {{1, true, false, {.first = 20, .score = 1}},
                                      {2, true, false, {.first = 30, .score = 2}},
                                      {4, true, false},
                                      {3, true, false}};
  EXPECT_EQ(choose_eviction(wanted, ahead), 3);
  EXPECT_EQ(choose_eviction(wanted, EvictPolicy::kCostAware), 3);
  EXPECT_EQ(choose_eviction(wanted, EvictPolicy::kCarScore), 3);
  EXPECT_EQ(choose_eviction(wanted, lru), 0);
  wanted.resize(2);
  EXPECT_EQ(choose_eviction(wanted, ahead), 1);                   // its turn comes last
  EXPECT_EQ(choose_eviction(wanted, EvictPolicy::kCarScore), 0);  // fewer want it
}

// A long context is dearer per cell; twice as long idle makes up for twice the cost.
TEST(IdleSequences, CostAwareWeighsSecondsAgainstCellsAndTime) {
  const IdleSequence dear = {1, true, false, {}, 30, 1000, 4};
  const IdleSequence cheap = {2, true, false, {}, 20, 1000, 1};
  const IdleSequence large = {3, true, false, {}, 10, 16000, 4};
  const auto aware = EvictPolicy::kCostAware;
  EXPECT_EQ(choose_eviction(std::vector{dear, cheap, large}, aware), 2);
  EXPECT_EQ(choose_eviction(std::vector{dear, cheap}, aware), 1);
  EXPECT_EQ(choose_eviction(std::vector{dear, cheap}, EvictPolicy::kLru), 0);
  IdleSequence wanted = cheap;
  wanted.demand.first = 3;
  EXPECT_EQ(choose_eviction(std::vector{dear, wanted}, aware), 0);
}

TEST(EvictionOrder, HoldsNest) {
  for (const EvictPolicy policy : {EvictPolicy::kLru, EvictPolicy::kCostAware}) {
    EvictionOrder order(policy);
    order.insert(1, 1, {1, 1});
    order.insert(2, 2, {1, 1});
    order.hold(1);
    order.hold(1);
    order.use(1, 3);
    EXPECT_EQ(order.victim(4), 2U);
    order.release(1);
    order.erase(2, 4);
    EXPECT_EQ(order.victim(4), std::nullopt);
    order.release(1);
    EXPECT_EQ(order.victim(4), 1U);
    EXPECT_EQ(order.size(), 1U);
    order.hold(99);  // what is not there is nobody's business
    order.use(99, 5);
    order.erase(99, 5);
    EXPECT_FALSE(order.contains(99));
  }
}

TEST(CostAware, KeepsWhatIsDearToRebuild) {
  EvictionOrder order(EvictPolicy::kCostAware);
  order.insert(1, 0, {1000, 1});   // 1 ms a byte
  order.insert(2, 1, {1000, 64});  // dearer
  order.insert(3, 2, {64000, 1});  // cheaper
  EXPECT_EQ(drain(order, 3), (std::vector<uint64_t>{3, 1, 2}));
}

// Half of the objects come back once, after exactly a minute; the others never do.
TEST(CostAware, LearnsWhenObjectsReturn) {
  EvictionOrder order(EvictPolicy::kCostAware);
  double now_s = 0;
  for (uint64_t i = 0; i < 4000; ++i, now_s += 1) {
    order.insert(2 * i, now_s, {1, 1});
    order.insert(2 * i + 1, now_s, {1, 1});
    if (i >= 60) order.use(2 * (i - 60), now_s);
    for (size_t n = order.size(); n > 300; --n) order.erase(*order.victim(now_s), now_s);
  }
  // What was just used a second time never returns: it goes before what may.
  const auto victim = order.victim(now_s);
  ASSERT_TRUE(victim.has_value());
  EXPECT_TRUE(*victim % 2 == 0 || *victim / 2 + 61 < 4000) << *victim;
  // Of the youngest minute nearly everything is there.
  int kept = 0;
  for (uint64_t i = 3950; i < 4000; ++i) kept += order.contains(2 * i) ? 1 : 0;
  EXPECT_GE(kept, 49);
}

// What is asked for without ever coming in counts as used when it does.
TEST(CostAware, LearnsFromWhatIsNotKept) {
  EvictionOrder order(EvictPolicy::kCostAware);
  double now_s = 0;
  for (uint64_t i = 0; i < 2000; ++i, now_s += 1) {
    order.miss(i, now_s);  // comes back after ten seconds, five times
    for (uint64_t n = 1; n < 5 && i >= 10 * n; ++n) order.miss(i - 10 * n, now_s);
    order.insert(1'000'000 + i, now_s, {1, 1});  // never again
    for (size_t n = order.size(); n > 20; --n) order.erase(*order.victim(now_s), now_s);
  }
  order.insert(2'000'000, now_s, {1, 1});
  order.insert(1995, now_s, {1, 1});
  EXPECT_NE(order.victim(now_s), 1995U);
  order.miss(1995, now_s);  // it is here: not missed
  EXPECT_TRUE(order.contains(1995));
  EvictionOrder lru(EvictPolicy::kLru);
  lru.miss(1, 0);
  EXPECT_EQ(lru.size(), 0U);
}

TEST(ReturnModel, SpansAndClassesCoverEverything) {
  for (int age = 0; age < ReturnModel::kAges; ++age) {
    const double begin = ReturnModel::age_begin_s(age);
    EXPECT_EQ(ReturnModel::age_of(begin + 1e-6 * (begin + 1)), age);
    if (age > 0) {
      EXPECT_EQ(ReturnModel::age_of(begin * (1 - 1e-6)), age - 1);
    }
  }
  EXPECT_EQ(ReturnModel::age_of(-1), 0);
  EXPECT_EQ(ReturnModel::age_of(1e300), ReturnModel::kAges - 1);
  int last = -1;
  for (const uint32_t uses : {1U, 2U, 3U, 4U, 5U, 9U, 17U, 33U}) {
    EXPECT_EQ(ReturnModel::class_of(uses), last + 1) << uses;
    last = ReturnModel::class_of(uses);
  }
  EXPECT_EQ(ReturnModel::class_of(8), ReturnModel::class_of(5));
  EXPECT_EQ(ReturnModel::class_of(UINT32_MAX), ReturnModel::kClasses - 1);
}

TEST(ReturnModel, IndexIsTheRateWhereTheRateIsConstant) {
  ReturnModel model;
  std::mt19937_64 random(1);
  std::exponential_distribution<double> after(1 / 50.0);
  for (int i = 0; i < 50000; ++i) {
    const double age = after(random);
    model.watched(0, 0, age);
    model.returned(0, age);
  }
  model.learn();
  for (const double age : {0.0, 10.0, 60.0}) {
    EXPECT_NEAR(model.index(0, ReturnModel::age_of(age)), 1 / 50.0, 0.1 / 50.0) << age;
  }
}

TEST(ReturnModel, IndexLooksAheadToThePeak) {
  ReturnModel model;
  for (int i = 0; i < 20000; ++i) {
    model.watched(0, 0, 30);
    model.returned(0, 30);
    model.watched(1, 0, 3000);  // of this class nothing ever returns
  }
  model.learn();
  const double before = model.index(0, ReturnModel::age_of(1));
  EXPECT_NEAR(before, 1 / 30.0, 0.5 / 30.0);  // though nothing returns in the first seconds
  EXPECT_GT(model.index(0, ReturnModel::age_of(20)), before);
  EXPECT_LT(model.index(1, ReturnModel::age_of(1)), before / 20);
}

}  // namespace
}  // namespace hcache::policy
