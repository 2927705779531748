// Which rows of a conversation are held once it has outgrown the context.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "base/status.h"
#include "policy/truncation.h"

namespace hcache::policy {
namespace {

using Tokens = std::vector<int32_t>;

// Messages begin with this token.
constexpr int32_t kBegin = 1;

int64_t next_begin(std::span<const int32_t> tokens, int64_t from) {
  const auto at = std::find(tokens.begin() + from, tokens.end(), kBegin);
  return at == tokens.end() ? -1 : at - tokens.begin();
}

// Messages of so many tokens each.
Tokens messages(std::initializer_list<int64_t> lengths) {
  Tokens chain;
  for (const int64_t n : lengths) {
    chain.push_back(kBegin);
    chain.resize(chain.size() + static_cast<size_t>(n) - 1, 7);
  }
  return chain;
}

constexpr TruncationLimits kLimits{.context = 512, .share = 0.5, .keep_first = 4, .important = 0};

TEST(Truncation, NothingIsCutWithoutAContext) {
  EXPECT_EQ(next_cut({}, {}), kNeverCut);
  EXPECT_TRUE(cuts_of(Tokens(100'000, 7), {}, {}).empty());
}

TEST(Truncation, NothingIsCutThatFits) {
  EXPECT_EQ(next_cut({}, kLimits), 512);
  EXPECT_TRUE(cuts_of(Tokens(512, 7), kLimits, {}).empty());
  const std::vector<HeldRows> cuts = cuts_of(Tokens(513, 7), kLimits, {});
  ASSERT_EQ(cuts.size(), 1U);
  EXPECT_EQ(cuts[0].cut_at, 512);
  EXPECT_EQ(held_at(cuts, 512), HeldRows());
  EXPECT_EQ(held_at(cuts, 513), cuts[0]);
}

TEST(Truncation, HalfOfWhatMayLeaveLeaves) {
  EXPECT_EQ(cut({}, Tokens(512, 7), kLimits, {}),
            (HeldRows{.kept = 4, .resumed = 4 + 254, .cut_at = 512}));
  TruncationLimits quarter = kLimits;
  quarter.share = 0.25;
  EXPECT_EQ(cut({}, Tokens(512, 7), quarter, {}).dropped(), 127);
}

TEST(Truncation, OfWhatStaysAPartIsChosen) {
  TruncationLimits limits = kLimits;
  limits.important = 0.5;
  // 254 rows stay behind the first four: 112 of them are chosen, whole blocks.
  const HeldRows once = cut({}, Tokens(512, 7), limits, {});
  EXPECT_EQ(once, (HeldRows{.kept = 4, .resumed = 512 - 142, .cut_at = 512, .chosen = 112}));
  EXPECT_EQ(once.dropped(), 254);
  EXPECT_EQ(once.rows(512), cut({}, Tokens(512, 7), kLimits, {}).rows(512));
  // Chosen rows leave like others, unless they are chosen again.
  const int64_t next = next_cut(once, limits);
  const HeldRows twice = cut(once, Tokens(static_cast<size_t>(next), 7), limits, {});
  EXPECT_EQ(twice.chosen, 96);  // the context has room for 450 rows at a multiple of 64
  EXPECT_EQ(twice.rows(next), 227);
}

// Each head has one vote: what one pays all of its attention to is worth what another spreads.
TEST(Truncation, ChosenRowsAreThoseThatHeadsAttendTo) {
  constexpr int64_t kRows = 10 + 6 * kChosenBlock + 5;
  RowScores scores{.n_layer = 1, .n_head_kv = 2, .n_rows = kRows};
  scores.sum.assign(2 * kRows, 0.0F);
  const auto pay = [&](int head, int64_t row, float weight) {
    scores.sum[static_cast<size_t>(head * kRows + row)] += weight;
  };
  const auto block = [](int64_t i) { return 10 + i * kChosenBlock; };
  pay(0, block(4) + 3, 100);  // of a head that sums to much
  pay(0, block(2), 300);
  pay(1, block(1) + kChosenBlock - 1, 0.02F);  // and of one to little
  pay(1, block(5), 0.01F);
  pay(0, 3, 1000);          // no row that may be chosen
  pay(1, kRows - 2, 1000);  // nor is this
  ChoosableBlocks blocks;
  for (int64_t i = 0; i < 6; ++i) blocks.since.push_back(block(i));
  const auto chosen = [&](int64_t n) { return most_attended(scores, blocks, n); };
  EXPECT_EQ(chosen(1), std::vector<int64_t>{block(2)});              // 3 / 4
  EXPECT_EQ(chosen(2), (std::vector<int64_t>{block(1), block(2)}));  // 2 / 3
  EXPECT_EQ(chosen(3), (std::vector<int64_t>{block(1), block(2), block(5)}));
  EXPECT_EQ(chosen(4), (std::vector<int64_t>{block(1), block(2), block(4), block(5)}));
  // Of those that nobody attends to the last.
  EXPECT_EQ(chosen(5), (std::vector<int64_t>{block(1), block(2), block(3), block(4), block(5)}));
  EXPECT_TRUE(chosen(0).empty());
}

// However much attention they get.
TEST(Truncation, WhatWasChosenBeforeStaysOnlyWhereThereIsTooLittleElse) {
  constexpr int64_t kRows = 5 * kChosenBlock;
  RowScores scores{.n_layer = 1, .n_head_kv = 1, .n_rows = kRows};
  scores.sum.assign(kRows, 0.01F);
  scores.sum[0] = 10;
  scores.sum[kChosenBlock] = 100;
  scores.sum[3 * kChosenBlock] = 1;
  const ChoosableBlocks blocks{.earlier = {0, kChosenBlock},
                               .since = {2 * kChosenBlock, 3 * kChosenBlock, 4 * kChosenBlock}};
  const auto chosen = [&](int64_t n) {
    std::vector<int64_t> found = most_attended(scores, blocks, n);
    for (int64_t& row : found) row /= kChosenBlock;
    return found;
  };
  EXPECT_EQ(chosen(1), std::vector<int64_t>{3});
  EXPECT_EQ(chosen(2), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(chosen(3), (std::vector<int64_t>{2, 3, 4}));
  EXPECT_EQ(chosen(4), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(chosen(5), (std::vector<int64_t>{0, 1, 2, 3, 4}));
}

TEST(Truncation, LittleThatLeavesWaitsForNoMessageFarBehindIt) {
  TruncationLimits quarter = kLimits;
  quarter.share = 0.25;
  // 103 rows leave: the message at 290 is 87 behind them, the other one 37.
  EXPECT_EQ(cut({}, messages({100, 190, 222}), quarter, next_begin),
            (HeldRows{.kept = 100, .resumed = 203, .cut_at = 512}));
  EXPECT_EQ(cut({}, messages({100, 140, 272}), quarter, next_begin),
            (HeldRows{.kept = 100, .resumed = 240, .cut_at = 512}));
}

TEST(Truncation, CutsAreAtWholeChunks) {
  TruncationLimits odd = kLimits;
  odd.context = 500;
  EXPECT_EQ(next_cut({}, odd), 448);
  const HeldRows held = cut({}, Tokens(448, 7), odd, {});
  EXPECT_EQ(next_cut(held, odd) % kCutTokens, 0);
  EXPECT_LE(held.rows(next_cut(held, odd)), 500);
  EXPECT_GT(held.rows(next_cut(held, odd) + kCutTokens), 500);
}

TEST(Truncation, AMessageThatBeginsSoonAfterIsWhereItGoesOn) {
  const Tokens chain = messages({100, 100, 90, 100, 122});
  ASSERT_EQ(chain.size(), 512U);
  // The first one stays as well; from 100 on the half is 206 tokens: the message at 390 is near.
  EXPECT_EQ(cut({}, chain, kLimits, next_begin),
            (HeldRows{.kept = 100, .resumed = 390, .cut_at = 512}));
}

TEST(Truncation, AMessageFarBehindIsNotWaitedFor) {
  EXPECT_EQ(cut({}, messages({100, 400, 12}), kLimits, next_begin),
            (HeldRows{.kept = 100, .resumed = 306, .cut_at = 512}));
}

TEST(Truncation, ALongFirstMessageLeavesLikeOthers) {
  EXPECT_EQ(cut({}, messages({129, 383}), kLimits, {next_begin}).kept, 4);
  EXPECT_EQ(cut({}, messages({128, 384}), kLimits, {next_begin}).kept, 128);
}

TEST(Truncation, LimitsThatCantBeKeptToAreRefused) {
  EXPECT_TRUE(validate({}).ok());
  EXPECT_TRUE(validate(kLimits).ok());
  for (const TruncationLimits& wrong :
       {TruncationLimits{.context = 255}, TruncationLimits{.context = 512, .share = 0},
        TruncationLimits{.context = 512, .share = 1},
        TruncationLimits{.context = 512, .share = NAN},
        TruncationLimits{.context = 512, .share = 0.5, .keep_first = -1},
        TruncationLimits{.context = 512, .share = 0.5, .keep_first = 257},
        TruncationLimits{.context = 512, .important = -0.1},
        TruncationLimits{.context = 512, .important = 0.91},
        TruncationLimits{.context = 512, .important = NAN}}) {
    EXPECT_EQ(validate(wrong).code(), Code::kInvalidArgument);
  }
}

TEST(Truncation, WhatASequenceHoldsIsOfUseToWhomItIsCutFor) {
  const HeldRows held{.kept = 4, .resumed = 258, .cut_at = 512};
  TruncationLimits other = kLimits;
  other.share = 0.25;
  EXPECT_EQ(usable_positions({}, {}, 700, {}), 700);
  EXPECT_EQ(usable_positions({}, other, 700, kLimits), 512);  // exact up to there
  EXPECT_EQ(usable_positions(held, kLimits, 700, kLimits), 700);
  EXPECT_EQ(usable_positions(held, kLimits, 512, kLimits), 512);
  EXPECT_EQ(usable_positions(held, kLimits, 511, kLimits), 0);
  EXPECT_EQ(usable_positions(held, kLimits, 700, other), 0);
  EXPECT_EQ(usable_positions(held, kLimits, 700, {}), 0);
}

// Whatever the limits and the messages: a chain is cut again and again, each time before it is too
// long; what was held of its beginning does not depend on what comes after; and cutting on from
// there gives the same as cutting it anew.
TEST(Truncation, CutsFollowFromTheTokensAlone) {
  std::mt19937 random(5);
  const auto integer = [&](int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(random);
  };
  for (int round = 0; round < 200; ++round) {
    TruncationLimits limits;
    limits.context = integer(256, 1000);
    limits.share = std::uniform_real_distribution<double>(0.001, 0.999)(random);
    limits.keep_first = integer(0, limits.context / 2);
    limits.important = round % 2 == 0 ? 0 : std::uniform_real_distribution<double>(0, 0.9)(random);
    ASSERT_TRUE(validate(limits).ok());
    Tokens chain;
    const int64_t longest = integer(2, 600);
    while (chain.size() < 5000) {
      const Tokens more = messages({integer(1, longest)});
      chain.insert(chain.end(), more.begin(), more.end());
    }
    const std::vector<HeldRows> all = cuts_of(chain, limits, next_begin);
    HeldRows held;
    size_t cuts = 0;
    for (int64_t at = next_cut(held, limits); at < static_cast<int64_t>(chain.size());
         at = next_cut(held, limits), ++cuts) {
      EXPECT_GT(at, held.cut_at);
      EXPECT_LE(held.rows(at), limits.context);
      EXPECT_GT(held.rows(at), limits.context - kCutTokens);
      const auto before = std::span(chain).first(static_cast<size_t>(at));
      EXPECT_EQ(cuts_of(before, limits, next_begin).size(), cuts);
      EXPECT_EQ(held_at(all, at), held);
      const HeldRows after = cut(held, before, limits, next_begin);
      EXPECT_GE(after.resumed, held.resumed);
      EXPECT_GE(after.dropped() - held.dropped(), kCutTokens);
      EXPECT_LE(after.resumed, at);
      EXPECT_EQ(after.chosen % kChosenBlock, 0);
      // There are as many whole blocks among the rows that would leave, wherever they begin.
      EXPECT_LE(after.chosen + 2 * kChosenBlock, after.resumed - held.dropped() - after.kept);
      if (held.cut_at > 0) {
        EXPECT_EQ(after.kept, held.kept);
      }
      held = after;
    }
    EXPECT_GT(cuts, 3U);
    EXPECT_EQ(all.size(), cuts);
    EXPECT_EQ(all.back(), held);
  }
}

}  // namespace
}  // namespace hcache::policy
