#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "saved_chains.h"

namespace hcache::sim {
namespace {

using policy::EvictPolicy;
using Tokens = std::vector<int32_t>;

constexpr double kTokenBytes = 10;

double miss_s(size_t /*tier*/, int64_t /*first*/, int64_t tokens) {
  return static_cast<double>(tokens);
}

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
  return {.capacity_bytes = kTokenBytes * static_cast<double>(tokens), .policy = {.evict = policy}};
}

TEST(SavedChains, FindsTheLongestPrefix) {
  SavedChains saved({tier(0)}, kTokenBytes, miss_s);
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
  SavedChains saved({tier(0), tier(1000)}, kTokenBytes, miss_s);
  saved.put(chain(0, 70), 1);
  saved.put(chain(0, 100), 2);
  EXPECT_EQ(saved.find(chain(0, 100)).tokens, 100);
  saved.put(chain(0, 130), 3);
  EXPECT_EQ(saved.find(chain(0, 200)).tokens, 130);
  for (const size_t t : {0, 1}) EXPECT_DOUBLE_EQ(saved.bytes(t), 130 * kTokenBytes) << t;
  EXPECT_EQ(saved.evictions(1), 0U);
}

TEST(SavedChains, EqualPrefixesAreOneObject) {
  SavedChains saved({tier(0)}, kTokenBytes, miss_s);
  saved.put(joined(chain(0, 64), chain(1000, 64)), 1);
  saved.put(joined(chain(0, 64), chain(2000, 64)), 2);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 3 * 64 * kTokenBytes);
}

TEST(SavedChains, ChainsShrinkFromTheirEnds) {
  SavedChains saved({tier(192)}, kTokenBytes, miss_s);
  saved.put(chain(0, 128), 1);
  saved.put(chain(1000, 128), 2);
  EXPECT_EQ(saved.find(chain(0, 128)).tokens, 64);
  EXPECT_EQ(saved.find(chain(1000, 128)).tokens, 128);
  EXPECT_EQ(saved.evictions(0), 1U);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 192 * kTokenBytes);
}

TEST(SavedChains, OrGoWhole) {
  SavedTier whole = tier(320);
  whole.policy.whole_chains = true;
  SavedChains saved({whole}, kTokenBytes, miss_s);
  const Tokens first = joined(chain(0, 64), chain(1000, 128));
  const Tokens second = joined(chain(0, 64), chain(2000, 64));
  saved.put(first, 1);
  saved.put(second, 2);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 256 * kTokenBytes);
  saved.put(chain(3000, 128), 3);
  EXPECT_EQ(saved.find(first).tokens, 64);  // what the second goes on from
  EXPECT_EQ(saved.find(second).tokens, 128);
  EXPECT_EQ(saved.evictions(0), 2U);
  saved.put(chain(4000, 128), 4);
  EXPECT_EQ(saved.find(second).tokens, 0);
  EXPECT_EQ(saved.find(chain(3000, 128)).tokens, 128);
}

TEST(SavedChains, AReserveIsFreeAfterwards) {
  SavedTier reserving = tier(320);
  reserving.policy.reserve = 0.4;  // two chunks
  SavedChains saved({reserving}, kTokenBytes, miss_s);
  saved.put(chain(0, 320), 1);
  saved.put(chain(1000, 64), 2);
  EXPECT_EQ(saved.evictions(0), 3U);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 192 * kTokenBytes);
  saved.put(chain(2000, 128), 3);
  EXPECT_EQ(saved.evictions(0), 3U);
}

TEST(SavedChains, OrTakeTheSameRoomHoweverLongTheyAre) {
  SavedTier reserved = tier(512);
  reserved.policy.whole_chains = true;
  reserved.chain_tokens = 256;
  SavedChains saved({reserved}, kTokenBytes, miss_s);
  saved.put(chain(0, 70), 1);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 256 * kTokenBytes);
  saved.put(chain(0, 200), 2);  // takes the place of the shorter one
  EXPECT_DOUBLE_EQ(saved.bytes(0), 256 * kTokenBytes);
  saved.put(chain(1000, 10), 3);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 512 * kTokenBytes);
  EXPECT_EQ(saved.evictions(0), 0U);
  saved.put(chain(2000, 10), 4);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 512 * kTokenBytes);
  EXPECT_EQ(saved.find(chain(0, 200)).tokens, 0);
  EXPECT_EQ(saved.find(chain(1000, 10)).tokens, 10);
  EXPECT_EQ(saved.find(chain(2000, 10)).tokens, 10);
}

TEST(SavedChains, WhatLeavesTheFastTierIsInTheSlowOneAndReadingLiftsIt) {
  SavedChains saved({tier(128), tier(0)}, kTokenBytes, miss_s);
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
  SavedChains saved({tier(128)}, kTokenBytes, miss_s);
  saved.put(chain(0, 64), 1);
  saved.put(chain(1000, 64), 2);
  saved.use(chain(0, 64), 3);
  saved.put(chain(2000, 64), 4);
  EXPECT_EQ(saved.find(chain(0, 64)).tokens, 64);
  EXPECT_EQ(saved.find(chain(1000, 64)).tokens, 0);
}

TEST(SavedChains, AChainThatDoesNotFitKeepsItsBeginning) {
  SavedChains saved({tier(128)}, kTokenBytes, miss_s);
  saved.put(chain(0, 640), 1);
  EXPECT_EQ(saved.find(chain(0, 640)).tokens, 128);
  EXPECT_LE(saved.bytes(0), 128 * kTokenBytes);
}

TEST(SavedChains, WhatTheQueueWantsStaysTheFirstOfItLongest) {
  for (const bool looks_ahead : {true, false}) {
    const auto policy = looks_ahead ? EvictPolicy::kSchedulerAware : EvictPolicy::kLru;
    SavedChains saved({tier(192, policy)}, kTokenBytes, miss_s);
    saved.put(chain(0, 64), 1);
    saved.put(chain(1000, 64), 2);
    saved.put(chain(2000, 64), 3);
    saved.want(7, chain(0, 64));
    saved.want(9, chain(1000, 64));
    saved.put(chain(3000, 64), 4);
    EXPECT_EQ(saved.find(chain(0, 64)).tokens, looks_ahead ? 64 : 0);
    EXPECT_EQ(saved.find(chain(2000, 64)).tokens, looks_ahead ? 0 : 64);
    if (!looks_ahead) continue;
    saved.want(8, chain(3000, 64));
    saved.put(chain(4000, 64), 5);  // wanted by nobody
    EXPECT_EQ(saved.find(chain(4000, 64)).tokens, 0);
    saved.want(3, chain(4000, 64));
    saved.unwant(7);
    saved.put(chain(4000, 64), 6);
    EXPECT_EQ(saved.find(chain(0, 64)).tokens, 0);
    EXPECT_EQ(saved.find(chain(1000, 64)).tokens, 64);
  }
}

TEST(SavedChains, AnObjectThatTwoWantIsWantedUntilBothAreGone) {
  SavedChains saved({tier(128, EvictPolicy::kSchedulerAware)}, kTokenBytes, miss_s);
  saved.put(chain(0, 64), 1);
  saved.want(1, chain(0, 64));
  saved.want(2, chain(0, 64));
  saved.unwant(1);
  saved.put(chain(1000, 64), 2);
  saved.put(chain(2000, 64), 3);
  EXPECT_EQ(saved.find(chain(0, 64)).tokens, 64);
  saved.unwant(2);
  saved.unwant(2);  // is not there any more
  saved.put(chain(3000, 64), 4);
  EXPECT_EQ(saved.find(chain(0, 64)).tokens, 0);
}

TEST(SavedChains, LiftsUpToAnEnd) {
  SavedChains saved({tier(192), tier(0)}, kTokenBytes, miss_s);
  saved.put(chain(0, 192), 1);
  saved.put(chain(1000, 192), 2);
  saved.lift(chain(0, 192), 130, 3);
  EXPECT_EQ(saved.find(chain(0, 192)).by_tier, (std::vector<int64_t>{128, 64}));
  const auto chunks = saved.chunks(chain(0, 192));
  ASSERT_EQ(chunks.size(), 3U);
  EXPECT_EQ(chunks[1].tier, 0U);
  EXPECT_EQ(chunks[2].tier, 1U);
}

TEST(SavedChains, WhatIsLeftBehindACutStaysWhereItWas) {
  SavedChains saved({tier(160), tier(0)}, kTokenBytes, miss_s);
  const Tokens whole = chain(0, 200);
  saved.put(whole, 1);
  saved.put(chain(1000, 96), 2);  // pushes the end out of the first tier
  const auto before = saved.find(whole);
  ASSERT_EQ(before.by_tier, (std::vector<int64_t>{64, 136}));
  saved.cut_front(whole, 64, 3);
  EXPECT_EQ(saved.find(whole).tokens, 0);
  const Tokens rest(whole.begin() + 64, whole.end());
  EXPECT_EQ(saved.find(rest).by_tier, (std::vector<int64_t>{0, 136}));
  EXPECT_DOUBLE_EQ(saved.bytes(1), (136 + 96) * kTokenBytes);
  saved.cut_front(rest, 136, 4);
  EXPECT_EQ(saved.find(rest).tokens, 0);
  EXPECT_DOUBLE_EQ(saved.bytes(1), 96 * kTokenBytes);
}

TEST(SavedChains, ACutLeavesWhatOthersShare) {
  SavedChains saved({tier(0)}, kTokenBytes, miss_s);
  const Tokens one = joined(chain(0, 64), chain(1000, 64));
  const Tokens two = joined(chain(0, 64), chain(2000, 64));
  saved.put(one, 1);
  saved.put(two, 2);
  saved.cut_front(one, 64, 3);
  EXPECT_EQ(saved.find(two).tokens, 128);
  EXPECT_EQ(saved.find(chain(1000, 64)).tokens, 64);
  EXPECT_DOUBLE_EQ(saved.bytes(0), 3 * 64 * kTokenBytes);
}

TEST(SavedChains, WithoutTiersNothingIsSaved) {
  SavedChains saved({}, kTokenBytes, miss_s);
  saved.put(chain(0, 640), 1);
  EXPECT_EQ(saved.find(chain(0, 640)).tokens, 0);
}

}  // namespace
}  // namespace hcache::sim
