// Guesses from a conversation, how far they are trusted, and how many of them pay.
#include <gtest/gtest.h>

#include <vector>

#include "policy/drafting.h"

namespace hcache::policy {
namespace {

using Tokens = std::vector<int32_t>;

TEST(LookUp, GivesWhatFollowedTheLongestMatch) {
  // "1 2 3" stands there twice; once more of what comes before matches.
  const Tokens chain = {9, 1, 2, 3, 40, 41, 8, 1, 2, 3, 50, 51, 52, 9, 1, 2, 3};
  const Draft draft = look_up(chain, {.most = 3});
  EXPECT_EQ(draft.tokens, (Tokens{40, 41, 8}));
  EXPECT_EQ(draft.matched, 4);
}

TEST(LookUp, TakesTheLatestOfEqualMatches) {
  const Tokens chain = {1, 2, 3, 40, 7, 1, 2, 3, 50, 6, 1, 2, 3};
  EXPECT_EQ(look_up(chain, {.most = 2}).tokens, (Tokens{50, 6}));
}

TEST(LookUp, GoesOnWithWhatRepeatsItself) {
  const Tokens chain = {5, 1, 2, 3, 1, 2, 3};
  EXPECT_EQ(look_up(chain, {.most = 8}).tokens, (Tokens{1, 2, 3, 1, 2, 3, 1, 2}));
}

TEST(LookUp, NeedsAMatch) {
  EXPECT_TRUE(look_up(Tokens{1, 2, 3, 4, 2, 3}, {.most = 4}).tokens.empty());
  EXPECT_EQ(look_up(Tokens{1, 2, 3, 4, 2, 3}, {.most = 4, .least_match = 2}).tokens,
            (Tokens{4, 2, 3, 4}));
  EXPECT_TRUE(look_up(Tokens{1, 2, 3, 1, 2, 3}, {.most = 0}).tokens.empty());
  for (int n = 0; n < 5; ++n) {
    EXPECT_TRUE(
        look_up(Tokens(static_cast<size_t>(n), 7), {.most = 4, .least_match = 4}).tokens.empty());
  }
  const Draft same = look_up(Tokens(100, 7), {.most = 4});
  EXPECT_EQ(same.tokens, Tokens(4, 7));
  EXPECT_EQ(same.matched, kMostMatched);
}

TEST(Acceptance, BeginsWithTheMatchAndEndsWithWhatCameTrue) {
  Acceptance fresh;
  EXPECT_LT(fresh.probability(3), fresh.probability(20));
  Acceptance good;
  Acceptance bad;
  for (int i = 0; i < 50; ++i) {
    good.note(8, true);
    bad.note(0, false);
  }
  EXPECT_GT(good.probability(3), 0.97);
  EXPECT_LT(bad.probability(20), 0.1);
  // It learns anew.
  for (int i = 0; i < 50; ++i) bad.note(8, true);
  EXPECT_GT(bad.probability(3), 0.95);
}

TEST(StepPace, AreKnownOrEstimated) {
  StepPace times;
  EXPECT_DOUBLE_EQ(times.at(1), 1);
  EXPECT_DOUBLE_EQ(times.at(9), 5);
  times.note(1, 10);
  EXPECT_DOUBLE_EQ(times.at(1), 10);
  EXPECT_DOUBLE_EQ(times.at(3), 20);
  times.note(5, 14);
  EXPECT_DOUBLE_EQ(times.at(3), 12);
  EXPECT_DOUBLE_EQ(times.at(11), 28);  // in proportion to what five take
  for (int i = 0; i < 100; ++i) times.note(5, 20);
  EXPECT_NEAR(times.at(5), 20, 1e-6);
  StepPace later;
  later.note(5, 30);
  EXPECT_DOUBLE_EQ(later.at(1), 10);
}

TEST(DraftLength, WeighsTokensAgainstTime) {
  const auto flat = [](int64_t) { return 1.0; };
  const auto linear = [](int64_t rows) { return static_cast<double>(rows); };
  const auto cpu = [](int64_t rows) { return 0.5 + 0.5 * static_cast<double>(rows); };
  const auto length = [](const auto& step_s, int64_t others, double probability, int32_t most) {
    return draft_length({.step_s = step_s, .others = others}, probability, {.most = most}).tokens;
  };
  EXPECT_EQ(length(flat, 0, 0.5, 20), 20);
  EXPECT_EQ(length(linear, 0, 0.99, 20), 0);
  EXPECT_EQ(length(cpu, 0, 0.4, 20), 0);
  EXPECT_GT(length(cpu, 0, 0.95, 64), 2);
  EXPECT_LT(length(cpu, 0, 0.95, 64), 20);
  EXPECT_GT(length(cpu, 0, 0.999, 300), length(cpu, 0, 0.95, 300));
  // Beside others a row costs as much and brings less of the whole.
  EXPECT_LE(length(cpu, 7, 0.9, 64), length(cpu, 0, 0.9, 64));
  EXPECT_EQ(length(flat, 0, 1.0, 0), 0);
}

TEST(DraftLength, CountsWhatAModelTakesToGuess) {
  const auto flat = [](int64_t) { return 1.0; };
  const auto length = [&](double token_s, int32_t least = 0) {
    return draft_length({.step_s = flat, .token_s = token_s}, 0.9, {.most = 20, .least = least});
  };
  EXPECT_EQ(length(0).tokens, 20);
  EXPECT_GT(length(0.1).tokens, 2);
  EXPECT_LT(length(0.1).tokens, length(0.01).tokens);
  EXPECT_LT(length(0.1).rate, length(0.01).rate);
  EXPECT_EQ(length(1).tokens, 0);
  EXPECT_EQ(length(1).rate, 0);
  // Asked for, it is done all the same.
  EXPECT_EQ(length(1, 4).tokens, 4);
  EXPECT_EQ(length(0.01, 4).tokens, length(0.01).tokens);
  EXPECT_EQ(length(1, 40).tokens, 20);
}

}  // namespace
}  // namespace hcache::policy
