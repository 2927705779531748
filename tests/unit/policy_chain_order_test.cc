// Chunks of chains in a full tier: from the ends up, or whole.

#include <gtest/gtest.h>

#include "policy/chain_order.h"

namespace hcache::policy {
namespace {

using Ids = std::vector<uint64_t>;

// 1 - 2 - 3 and 1 - 4, then 5 - 6.
ChainOrder two_trees(const TierPolicy& policy) {
  ChainOrder order(policy);
  order.insert(1, std::nullopt, 1, {});
  order.insert(2, 1, 2, {});
  order.insert(3, 2, 3, {});
  order.insert(4, 1, 4, {});
  order.insert(5, std::nullopt, 5, {});
  order.insert(6, 5, 6, {});
  return order;
}

Ids drain(ChainOrder& order) {
  Ids out;
  for (Ids next = order.victims(10); !next.empty(); next = order.victims(10)) {
    for (const uint64_t id : next) order.erase(id, 10);
    out.insert(out.end(), next.begin(), next.end());
  }
  return out;
}

TEST(ChainOrder, ChainsShrinkFromTheirEnds) {
  ChainOrder order = two_trees({});
  EXPECT_EQ(order.victims(10), (Ids{3}));
  EXPECT_EQ(drain(order), (Ids{3, 2, 4, 1, 6, 5}));
  EXPECT_EQ(order.size(), 0U);
}

TEST(ChainOrder, OrLeaveWholeUpToWhatOthersContinue) {
  ChainOrder order = two_trees({.whole_chains = true});
  EXPECT_EQ(order.victims(10), (Ids{3, 2}));
  order.erase(3, 10);
  order.erase(2, 10);
  EXPECT_EQ(order.victims(10), (Ids{4, 1}));
}

TEST(ChainOrder, AWholeChainStaysAsFarAsTheQueueWantsIt) {
  ChainOrder order = two_trees({.evict = EvictPolicy::kSchedulerAware, .whole_chains = true});
  Wanted wanted;
  order.set_demands(wanted.add(7, {1, 2}), wanted);
  EXPECT_EQ(order.victims(10), (Ids{3}));
  order.erase(3, 10);
  EXPECT_EQ(order.victims(10), (Ids{4}));  // behind what is wanted, nobody wants it
  order.erase(4, 10);
  EXPECT_EQ(order.victims(10), (Ids{6, 5}));
  order.erase(6, 10);
  order.erase(5, 10);
  EXPECT_EQ(order.victims(10), (Ids{2, 1}));  // nothing else is left
}

TEST(ChainOrder, WhatMayNotLeaveStaysAndSoDoesWhatLeadsToIt) {
  ChainOrder order = two_trees({.whole_chains = true});
  EXPECT_EQ(order.victims(10, [](uint64_t id) { return id != 3 && id != 1; }), (Ids{4}));
  EXPECT_EQ(order.victims(10, [](uint64_t id) { return id > 4; }), (Ids{6, 5}));
  EXPECT_EQ(order.victims(10, [](uint64_t) { return false; }), Ids());
}

TEST(ChainOrder, WhatIsPutBackIsWhereItWas) {
  for (const EvictPolicy policy : {EvictPolicy::kLru, EvictPolicy::kFifo}) {
    ChainOrder order = two_trees({.evict = policy});
    const auto three = order.take(3);
    const auto two = order.take(2);
    ASSERT_TRUE(three && two);
    EXPECT_FALSE(order.take(2).has_value());
    EXPECT_EQ(order.victims(10), (Ids{4}));
    order.put_back(2, *two);  // the end may come last
    order.put_back(3, *three);
    EXPECT_EQ(drain(order), (Ids{3, 2, 4, 1, 6, 5})) << evict_policy_name(policy);
  }
}

// A parent that comes back while what follows it stayed leaves last again.
TEST(ChainOrder, AParentThatReturnsIsHeldByWhatFollowsIt) {
  ChainOrder order = two_trees({});
  order.erase(5, 7);
  order.insert(5, std::nullopt, 0.5, {});
  EXPECT_EQ(drain(order), (Ids{3, 2, 4, 1, 6, 5}));
}

TEST(ChainOrder, TheReserveIsFreedInOneGo) {
  EXPECT_EQ(bytes_to_evict({}, 90, 10, 100), 0);
  EXPECT_EQ(bytes_to_evict({}, 95, 10, 100), 5);
  const TierPolicy policy = {.reserve = 0.2};
  EXPECT_EQ(bytes_to_evict(policy, 90, 10, 100), 0);
  EXPECT_EQ(bytes_to_evict(policy, 95, 10, 100), 25);
}

}  // namespace
}  // namespace hcache::policy
