// What is read ahead for whom.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "policy/fetch.h"

namespace hcache::policy {
namespace {

using ::testing::HasSubstr;
using ::testing::Optional;

TEST(FetchPolicies, HaveNames) {
  for (const char* name : {"on-demand", "scheduler-aware"}) {
    const auto policy = parse_fetch_policy(name);
    ASSERT_TRUE(policy.ok());
    EXPECT_EQ(fetch_policy_name(*policy), name);
  }
  EXPECT_THAT(parse_fetch_policy("eager").status().message(),
              HasSubstr("on-demand, scheduler-aware"));
}

TEST(FetchWindows, NameRequestsOnceInTheirOrderAsFarAsTheTierHoldsThem) {
  FetchWindow window(FetchPolicy::kSchedulerAware, 100);
  window.add(7, 40);
  window.add(3, 50);
  window.add(9, 40);  // the tier holds the two before it
  EXPECT_THAT(window.next(), Optional(3U));
  EXPECT_THAT(window.next(), Optional(7U));
  EXPECT_EQ(window.next(), std::nullopt);
  window.remove(3);
  EXPECT_THAT(window.next(), Optional(9U));
  window.add(1, 101);  // the first fits alone or nobody does
  EXPECT_EQ(window.next(), std::nullopt);
  window.remove(1);
  window.remove(1);
  EXPECT_EQ(window.next(), std::nullopt);
}

TEST(FetchWindows, WithoutALimitNameEveryoneAndOnDemandNobody) {
  FetchWindow all(FetchPolicy::kSchedulerAware, 0);
  FetchWindow none(FetchPolicy::kOnDemand, 0);
  FetchWindow timed(FetchPolicy::kCarTimer, 0);  // not its way
  for (uint64_t ticket = 1; ticket <= 3; ++ticket) {
    all.add(ticket, 1e12);
    none.add(ticket, 1);
    timed.add(ticket, 1);
    EXPECT_THAT(all.next(), Optional(ticket));
    EXPECT_EQ(none.next(), std::nullopt);
    EXPECT_EQ(timed.next(), std::nullopt);
  }
}

TEST(LoadTimers, LearnHowLongRepliesTokensAndLoadsTake) {
  LoadTimer timer;
  EXPECT_EQ(timer.load_s(100), 0);
  timer.stepped(0.1);
  EXPECT_DOUBLE_EQ(timer.remaining_s("a", 10, 60), 5);  // nothing known: to the end
  timer.replied("a", 20);
  EXPECT_DOUBLE_EQ(timer.remaining_s("a", 10, 60), 1);
  EXPECT_DOUBLE_EQ(timer.remaining_s("b", 10, 60), 1);  // everybody's
  EXPECT_DOUBLE_EQ(timer.remaining_s("a", 10, 12), 0.2);
  EXPECT_DOUBLE_EQ(timer.remaining_s("a", 30, 60), 0);  // longer already
  timer.replied("b", 40);
  EXPECT_DOUBLE_EQ(timer.remaining_s("b", 10, 60), 3);
  timer.replied("a", 30);
  EXPECT_NEAR(timer.remaining_s("a", 0, 60), 2.1, 1e-9);
  timer.loaded(0, 5);  // nothing was
  timer.loaded(50, 1);
  EXPECT_DOUBLE_EQ(timer.load_s(100), 2);
  timer.loaded(50, 2);
  EXPECT_NEAR(timer.load_s(100), 2.2, 1e-9);
}

}  // namespace
}  // namespace hcache::policy
