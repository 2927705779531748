// Which snapshots are dropped when they take more than they may.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "policy/snapshots.h"

namespace hcache::policy {
namespace {

constexpr std::size_t kNone = SavedSnapshot::kNone;
constexpr double kDay = 86400;
constexpr double kNow = 10 * kDay;

// Snapshots of one size, in chains that end with a turn.
struct World {
  std::vector<SavedSnapshot> all;

  std::size_t add(std::int64_t tokens, std::size_t before, double last_use_s = kNow) {
    all.push_back({.before = before,
                   .tokens = tokens,
                   .bytes = 10,
                   .last_use_s = last_use_s,
                   .may_go = true});
    return all.size() - 1;
  }
  // One every `step` tokens up to `end`; returns their indices.
  std::vector<std::size_t> chain(std::int64_t step, std::int64_t end, double last_use_s = kNow) {
    std::vector<std::size_t> out;
    for (std::int64_t at = step; at <= end; at += step) {
      out.push_back(add(at, out.empty() ? kNone : out.back(), last_use_s));
    }
    return out;
  }
  [[nodiscard]] std::vector<std::size_t> drop(std::size_t n) const {
    return snapshots_to_drop(all, 10 * n, kNow);
  }
  [[nodiscard]] std::set<std::int64_t> left_after(std::size_t n) const {
    std::set<std::int64_t> tokens;
    for (const SavedSnapshot& snapshot : all) tokens.insert(snapshot.tokens);
    for (const std::size_t i : drop(n)) tokens.erase(all[i].tokens);
    return tokens;
  }
};

TEST(Snapshots, NoneIsDroppedWhereNothingIsTooMuch) {
  World world;
  world.chain(1000, 8000);
  EXPECT_TRUE(world.drop(0).empty());
  EXPECT_TRUE(snapshots_to_drop({}, 100, kNow).empty());
}

TEST(Snapshots, AsManyAreDroppedAsTheBytesAsk) {
  World world;
  world.chain(1000, 8000);
  EXPECT_EQ(snapshots_to_drop(world.all, 1, kNow).size(), 1U);
  EXPECT_EQ(snapshots_to_drop(world.all, 10, kNow).size(), 1U);
  EXPECT_EQ(snapshots_to_drop(world.all, 11, kNow).size(), 2U);
  EXPECT_EQ(snapshots_to_drop(world.all, 1000, kNow).size(), 8U);
}

// What is left of a chain is its end, where the next turn goes on, and others far apart.
TEST(Snapshots, AChainIsThinnedOutAndKeepsItsEnd) {
  World world;
  world.chain(1000, 16000);
  const std::set<std::int64_t> left = world.left_after(11);
  EXPECT_EQ(left.size(), 5U);
  EXPECT_TRUE(left.contains(16000));
  std::int64_t before = 0;
  for (const std::int64_t tokens : left) {
    EXPECT_LE(tokens - before, 5000) << tokens;
    before = tokens;
  }
}

// The end of a turn that a later one has passed, and the place where its reply began, are close to
// others: they go before those that stand apart.
TEST(Snapshots, TurnsThatArePassedGoFirst) {
  World world;
  const std::size_t regular = world.chain(2048, 8192).back();
  const std::size_t asked = world.add(8300, regular, kNow - 300);
  const std::size_t answered = world.add(8500, asked, kNow - 300);  // the next prompt passes it by
  const std::size_t asked_again = world.add(8600, asked, kNow);
  world.add(9000, asked_again, kNow);
  const std::vector<std::size_t> dropped = world.drop(2);
  EXPECT_EQ(std::set<std::size_t>(dropped.begin(), dropped.end()),
            (std::set<std::size_t>{asked, answered}));
}

// A conversation that goes on from where the last reply began, without it: the reply's end is of no
// use, and does not outlive what the conversation needs.
TEST(Snapshots, RepliesThatLeaveThePromptGoFirst) {
  World world;
  std::size_t asked = world.chain(2048, 4096).back();
  std::set<std::size_t> ends;
  std::size_t last = kNone;
  for (int turn = 0; turn < 5; ++turn) {
    const double at_s = kNow - 60.0 * (5 - turn);
    asked = world.add(world.all[asked].tokens + 300, asked, at_s);
    last = world.add(world.all[asked].tokens + 200, asked, at_s + 10);
    ends.insert(last);
  }
  const std::vector<std::size_t> dropped = world.drop(8);
  for (const std::size_t i : dropped) {
    EXPECT_NE(i, asked);
    EXPECT_NE(i, last);
    ends.erase(i);
  }
  EXPECT_EQ(ends.size(), 1U);  // but for the last one they are gone
}

// As long as chains can be thinned out every conversation keeps one of its last two; then those
// that were not used for the longest time lose it.
TEST(Snapshots, ConversationsKeepTheirEndUntilTheOldestGoes) {
  World world;
  std::vector<std::pair<std::size_t, std::size_t>> ends;
  for (const double days : {0, 3, 5}) {
    const double used_s = kNow - days * kDay;
    const std::size_t asked = world.add(7300, world.chain(1000, 7000, used_s).back(), used_s);
    ends.emplace_back(asked, world.add(7900, asked, used_s));
  }
  const std::vector<std::size_t> dropped = world.drop(27);
  std::vector<std::ptrdiff_t> lost;  // when the conversation had neither
  for (const auto& [asked, newest] : ends) {
    const auto at = [&](std::size_t i) {
      return std::find(dropped.begin(), dropped.end(), i) - dropped.begin();
    };
    lost.push_back(std::max(at(asked), at(newest)));
  }
  EXPECT_GE(lost[2], 18);
  EXPECT_LT(lost[2], lost[1]);
  EXPECT_LT(lost[1], lost[0]);
}

// What many conversations begin with is wanted by each of them.
TEST(Snapshots, WhatManyConversationsShareStays) {
  World world;
  const std::size_t shared = world.add(2048, kNone);
  for (int i = 0; i < 20; ++i) {
    const std::size_t asked = world.add(3000 + i, shared, kNow - i);
    world.add(3200 + i, asked, kNow - i);
  }
  const std::vector<std::size_t> dropped = world.drop(40);
  EXPECT_EQ(std::count(dropped.begin(), dropped.end(), shared), 0);
}

TEST(Snapshots, WhatIsInUseStays) {
  World world;
  world.chain(1000, 4000);
  world.all[0].may_go = world.all[2].may_go = false;
  const std::vector<std::size_t> dropped = world.drop(4);
  EXPECT_EQ(std::set<std::size_t>(dropped.begin(), dropped.end()), (std::set<std::size_t>{1, 3}));
}

// Of two that are wanted alike the larger one goes.
TEST(Snapshots, LargeOnesGoBeforeSmallOnes) {
  World world;
  const std::size_t small = world.add(5000, kNone);
  const std::size_t large = world.add(5000, kNone);
  world.all[large].bytes = 100;
  EXPECT_EQ(snapshots_to_drop(world.all, 5, kNow), std::vector<std::size_t>{large});
  EXPECT_EQ(snapshots_to_drop(world.all, 105, kNow), (std::vector<std::size_t>{large, small}));
}

TEST(Snapshots, TheDefaultIsAShareOfTheQuota) {
  EXPECT_EQ(default_snapshot_quota(0, false), 0U);  // no quota: no limit
  EXPECT_EQ(default_snapshot_quota(1000, false), 500U);
  EXPECT_EQ(default_snapshot_quota(1000, true), 900U);
}

}  // namespace
}  // namespace hcache::policy
