// Conversations that outgrow the context are cut, and answered as their tokens and limits say,
// whatever else happens to them.
#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using testing::Bench;
using testing::FakeOptions;
using testing::Record;
using testing::tokens;
using testing::Tokens;
using testing::operator+;

constexpr policy::TruncationLimits kLimits{
    .context = 256, .share = 0.5, .keep_first = 4, .important = 0.5};

Bench::Tweak truncating(const policy::TruncationLimits& limits = kLimits) {
  return [limits](Request& request) { request.truncation = limits; };
}

FakeOptions small_context() {
  FakeOptions fake;
  fake.limits.context = 256;
  return fake;
}

TEST(SchedulerTruncation, IsForThoseWhoAskForIt) {
  Bench bench(small_context());
  EXPECT_EQ(bench.refusal(tokens(257), 5).code(), Code::kOutOfRange);
  const Record& record = bench.submit(tokens(250), 100);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer.size(), 7U);
  EXPECT_EQ(record.outcome.dropped_tokens, 0);
}

TEST(SchedulerTruncation, AnAnswerGoesOnForAsLongAsAsked) {
  Bench bench(small_context());
  const Record& record = bench.submit(tokens(250), 600, truncating());
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer.size(), 600U);
  EXPECT_EQ(record.answer, bench.expected(record));
  EXPECT_EQ(record.outcome.finish_reason, "length");
  EXPECT_GT(record.outcome.dropped_tokens, 500);
  EXPECT_EQ(record.outcome.dropped_before, 0);
}

TEST(SchedulerTruncation, AnAnswerWithoutALimitHasAsMuchAsTheContext) {
  Bench bench(small_context());
  const Record& record = bench.submit(tokens(250), kAsManyAsFit, truncating());
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer.size(), 256U);
}

TEST(SchedulerTruncation, APromptOfManyContextsIsComputedAndCut) {
  Bench bench(small_context());
  const Record& record = bench.submit(tokens(3000), 20, truncating());
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer, bench.expected(record));
  EXPECT_EQ(record.outcome.prompt_tokens, 3000);
  EXPECT_EQ(record.outcome.new_tokens, 3000);
}

TEST(SchedulerTruncation, TheNextTurnGoesOnFromWhatIsHeld) {
  Bench bench(small_context());
  Tokens chain = tokens(100);
  for (int turn = 0; turn < 20; ++turn) {
    bench.executor.calls.clear();
    const Record& record = bench.submit(chain, 30, truncating());
    ASSERT_TRUE(bench.run_all());
    EXPECT_EQ(record.answer, bench.expected(record)) << "turn " << turn;
    EXPECT_EQ(std::count(bench.executor.calls.begin(), bench.executor.calls.end(), "create"),
              turn == 0 ? 1 : 0);
    if (turn > 0) {
      EXPECT_EQ(record.outcome.new_tokens, 41);  // with the last one of the answer
    }
    chain = chain + record.answer + tokens(40, turn + 2);
  }
}

TEST(SchedulerTruncation, AnExactRequestGoesOnFromNothingThatWasCut) {
  Bench bench(small_context());
  bench.submit(tokens(300), 10, truncating());
  ASSERT_TRUE(bench.run_all());
  const Record& exact = bench.submit(tokens(240), 10);
  policy::TruncationLimits other = kLimits;
  other.share = 0.25;
  const Record& otherwise = bench.submit(tokens(320), 10, truncating(other));
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(exact.outcome.resident_tokens, 0);
  EXPECT_EQ(exact.answer, bench.expected(exact));
  EXPECT_EQ(otherwise.answer, bench.expected(otherwise));
}

TEST(SchedulerTruncation, WhatWasSavedBeforeTheFirstCutIsRestored) {
  Bench bench(small_context());
  bench.executor.save({}, tokens(400));
  const Record& record = bench.submit(tokens(400), 10, truncating());
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.outcome.hidden_tokens + record.outcome.kv_tokens, 256);
  EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerTruncation, WhatWasSavedBehindACutIsRestored) {
  Bench bench(small_context(), {.offload_above = 0});
  Tokens chain = tokens(300);
  int64_t dropped = 0;
  for (int turn = 0; turn < 12; ++turn) {
    const Record& record = bench.submit(chain, 40, truncating());
    ASSERT_TRUE(bench.run_all());
    ASSERT_TRUE(bench.run_until([&] { return bench.executor.sequences().empty(); }));
    EXPECT_EQ(record.answer, bench.expected(record)) << "turn " << turn;
    const Outcome& outcome = record.outcome;
    if (turn > 0) {
      EXPECT_EQ(outcome.resident_tokens, 0);
      EXPECT_EQ(outcome.dropped_before, dropped);
      EXPECT_EQ(outcome.new_tokens, 21);  // with the last one of the answer
    }
    dropped = outcome.dropped_tokens;
    chain = chain + record.answer + tokens(20, turn + 2);
  }
  EXPECT_GT(dropped, 512);
}

TEST(SchedulerTruncation, NothingIsCutWhileAStepIsInFlight) {
  FakeOptions fake = small_context();
  fake.in_flight = 3;
  fake.limits.arena_cells = 2000;
  Bench bench(fake);
  std::vector<const Record*> records;
  for (int i = 1; i <= 5; ++i)
    records.push_back(&bench.submit(tokens(200 + 17 * i, i), 150, truncating()));
  ASSERT_TRUE(bench.run_all());
  for (const Record* record : records) EXPECT_EQ(record->answer, bench.expected(*record));
}

TEST(SchedulerTruncation, ASequenceThatCantBeCutFailsAlone) {
  Bench bench(small_context());
  const Record& failing = bench.submit(tokens(250, 1), 50, truncating());
  const Record& other = bench.submit(tokens(50, 2), 50);
  bench.run_until([&] { return failing.answer.size() > 2; });
  bench.executor.options().fail_copy = 1;
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(failing.outcome.status.code(), Code::kInternal);
  EXPECT_EQ(other.answer, bench.expected(other));
}

TEST(SchedulerTruncation, IsRefusedWithTheReasonWhereNothingCanBeCut) {
  FakeOptions fake = small_context();
  fake.limits.why_no_cuts = "its positions are learned";
  Bench bench(fake);
  const Status refused = bench.refusal(tokens(257), 5, truncating());
  EXPECT_EQ(refused.code(), Code::kOutOfRange);
  EXPECT_NE(refused.to_string().find("257 tokens"), std::string::npos);
  EXPECT_NE(refused.to_string().find("learned"), std::string::npos);
  // What fits does not need it.
  const Record& record = bench.submit(tokens(250), 100, truncating());
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer.size(), 7U);
  policy::TruncationLimits wrong = kLimits;
  wrong.share = 2;
  Bench able(small_context());
  EXPECT_EQ(able.refusal(tokens(257), 5, truncating(wrong)).code(), Code::kOutOfRange);
}

// Conversations that grow far beyond the context, some of which are cut and some not, in an arena
// for two of them, with failures, restores, forks and preemptions.
TEST(SchedulerTruncation, AnswersFollowFromTokensAndLimitsAlone) {
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    std::mt19937 random(seed);
    const auto integer = [&](int64_t lo, int64_t hi) {
      return std::uniform_int_distribution<int64_t>(lo, hi)(random);
    };
    FakeOptions fake;
    fake.seed = seed;
    fake.limits.context = integer(256, 400);
    fake.limits.arena_cells = integer(fake.limits.context, 900);
    fake.limits.max_sequences = static_cast<int32_t>(integer(2, 8));
    fake.in_flight = static_cast<int32_t>(integer(1, 3));
    fake.follow_rows = integer(0, 60);
    if (seed % 3 == 0) {
      fake.fail_step = 0.01;
      fake.fail_advance = 0.05;
      fake.short_restore = 0.2;
    }
    SchedulerOptions options;
    options.reuse.min_fork_tokens = integer(1, 64);
    options.reuse.cheap_tokens = integer(0, 64);
    options.decode_headroom = integer(0, 32);
    Bench bench(fake, options);
    bench.stop_every = 60;
    policy::TruncationLimits limits{
        .context = integer(256, fake.limits.context),
        .share = std::uniform_real_distribution<double>(0.1, 0.9)(random),
        .keep_first = integer(0, 64)};
    const policy::NextMessage next_message = [](std::span<const int32_t> chain, int64_t from) {
      for (auto at = static_cast<size_t>(from); at < chain.size(); ++at) {
        if (chain[at] % 40 == 0) return static_cast<int64_t>(at);
      }
      return int64_t{-1};
    };
    for (int i = 0; i < 40; ++i) {
      const auto n = static_cast<int64_t>(bench.records().size());
      Tokens chain;
      if (n > 0 && integer(0, 9) < 8) {
        const Record& earlier = bench.records()[static_cast<size_t>(integer(0, n - 1))];
        chain = earlier.prompt + earlier.answer;
        if (integer(0, 4) == 0)
          chain.resize(static_cast<size_t>(integer(1, static_cast<int64_t>(chain.size()))));
      }
      chain = chain + tokens(integer(1, 200), static_cast<int32_t>(integer(1, 999)));
      const bool cut =
          static_cast<int64_t>(chain.size()) + 50 > fake.limits.context || integer(0, 1) == 0;
      bench.submit(chain, integer(0, 50), [&](Request& request) {
        if (cut) request.truncation = limits;
        if (cut) request.next_message = next_message;
        request.save = integer(0, 4) > 0;
      });
      for (int64_t k = integer(0, 60); k > 0; --k) bench.run_once();
    }
    ASSERT_TRUE(bench.run_all());
    int answered = 0;
    for (const Record& record : bench.records()) {
      if (!record.outcome.status.ok()) continue;
      ++answered;
      ASSERT_EQ(record.answer, bench.expected(record))
          << "seed " << seed << ", request " << record.id;
    }
    EXPECT_GT(answered, seed % 3 == 0 ? 20 : 39) << "seed " << seed;
  }
}

}  // namespace
}  // namespace hcache::scheduler
