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
  for (uint64_t place = 1; place <= 3; ++place) {
    all.add(place, 1e12);
    none.add(place, 1);
    EXPECT_THAT(all.next(), Optional(place));
    EXPECT_EQ(none.next(), std::nullopt);
  }
}

}  // namespace
}  // namespace hcache::policy
