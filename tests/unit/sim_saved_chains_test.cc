#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "saved_chains.h"

namespace hcache::sim {
namespace {

using policy::EvictPolicy;
using Tokens = std::vector<int32_t>;

constexpr double kTokenBytes = 10;

Tokens chain(int32_t first, size_t n) {
  Tokens tokens(n);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

Tokens joined(Tokens a, const Tokens& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// Room for so many tokens.
SavedTier tier(int64_t tokens, EvictPolicy policy = EvictPolicy::kLru) {
  return {kTokenBytes * static_cast<double>(tokens), policy};
}

TEST(SavedChains, FindsTheLongestPrefix) {
  SavedChains saved({tier(0)}, kTokenBytes, 1);
  EXPECT_EQ(saved.find(chain(0, 200)).tokens, 0);
  saved.put(chain(0, 150), 1);
  EXPECT_EQ(saved.find(chain(0, 150)).tokens, 150);
  EXPECT_EQ(saved.find(chain(0, 200)).tokens, 150);
  EXPECT_EQ(saved.find(chain(0, 149)).tokens, 128);  // whole chunks, or as it was saved
  EXPECT_EQ(saved.find(chain(1, 150)).tokens, 0);
  EXPECT_EQ(saved.find(joined(chain(0, 100), chain(7, 100))).tokens, 64);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 150 * kTokenBytes);
}

TEST(SavedChains, ContinuingAChainReplacesItsShortEnd) {
  SavedChains saved({tier(0), tier(1000)}, kTokenBytes, 1);
  saved.put(chain(0, 70), 1);
  saved.put(chain(0, 100), 2);
  EXPECT_EQ(saved.find(chain(0, 100)).tokens, 100);
  saved.put(chain(0, 130), 3);
  EXPECT_EQ(saved.find(chain(0, 200)).tokens, 130);
  for (const size_t t : {0, 1}) EXPECT_DOUBLE_EQ(saved.bytes(t), 130 * kTokenBytes) << t;
  EXPECT_EQ(saved.evictions(1), 0U);
}

TEST(SavedChains, EqualPrefixesAreOneObject) {
  SavedChains saved({tier(0)}, kTokenBytes, 1);
  saved.put(joined(chain(0, 64), chain(1000, 64)), 1);
  saved.put(joined(chain(0, 64), chain(2000, 64)), 2);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 3 * 64 * kTokenBytes);
}

TEST(SavedChains, ChainsShrinkFromTheirEnds) {
  SavedChains saved({tier(192)}, kTokenBytes, 1);
  saved.put(chain(0, 128), 1);
  saved.put(chain(1000, 128), 2);
  EXPECT_EQ(saved.find(chain(0, 128)).tokens, 64);
  EXPECT_EQ(saved.find(chain(1000, 128)).tokens, 128);
  EXPECT_EQ(saved.evictions(0), 1U);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 192 * kTokenBytes);
}

TEST(SavedChains, WhatLeavesTheFastTierIsInTheSlowOneAndReadingLiftsIt) {
  SavedChains saved({tier(128), tier(0)}, kTokenBytes, 1);
  saved.put(chain(0, 128), 1);
  saved.put(chain(1000, 128), 2);
  EXPECT_EQ(saved.find(chain(0, 128)).by_tier, (std::vector<int64_t>{0, 128}));
  EXPECT_EQ(saved.find(chain(1000, 128)).by_tier, (std::vector<int64_t>{128, 0}));
  saved.use(chain(0, 128), 3);
  EXPECT_EQ(saved.find(chain(0, 128)).by_tier, (std::vector<int64_t>{128, 0}));
  EXPECT_EQ(saved.find(chain(1000, 128)).by_tier, (std::vector<int64_t>{0, 128}));
  EXPECT_DOUBLE_EQ(saved.bytes(0), 128 * kTokenBytes);
}

TEST(SavedChains, UseCounts) {
  SavedChains saved({tier(128)}, kTokenBytes, 1);
  saved.put(chain(0, 64), 1);
  saved.put(chain(1000, 64), 2);
  saved.use(chain(0, 64), 3);
  saved.put(chain(2000, 64), 4);
  EXPECT_EQ(saved.find(chain(0, 64)).tokens, 64);
  EXPECT_EQ(saved.find(chain(1000, 64)).tokens, 0);
}

TEST(SavedChains, AChainThatDoesNotFitKeepsItsBeginning) {
  SavedChains saved({tier(128)}, kTokenBytes, 1);
  saved.put(chain(0, 640), 1);
  EXPECT_EQ(saved.find(chain(0, 640)).tokens, 128);
  EXPECT_LE(saved.bytes(0), 128 * kTokenBytes);
}

TEST(SavedChains, WithoutTiersNothingIsSaved) {
  SavedChains saved({}, kTokenBytes, 1);
  saved.put(chain(0, 640), 1);
  EXPECT_EQ(saved.find(chain(0, 640)).tokens, 0);
}

}  // namespace
}  // namespace hcache::sim
