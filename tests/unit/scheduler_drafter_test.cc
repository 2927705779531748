// A second model that drafts changes no answer, whatever becomes of it: it only makes steps fewer.
#include "scheduler/model_drafter.h"
#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int32_t kStepRows = 64;

ExecutorLimits limits() {
  return {.arena_cells = 4096, .context = 1024, .max_step_rows = kStepRows, .max_sequences = 16};
}

FakeOptions answering() {
  FakeOptions fake;
  fake.limits = limits();
  fake.row_s = 1e-6;  // so that rows more in a step are worth it
  fake.tells_pace = true;
  return fake;
}

FakeOptions drafting(uint64_t wrong_every) {
  FakeOptions fake;
  fake.limits = limits();
  fake.step_s = 1e-5;
  fake.row_s = 1e-6;
  fake.tells_pace = true;
  fake.drafts = true;
  fake.wrong_every = wrong_every;
  return fake;
}

SchedulerOptions drafted(int32_t most) {
  SchedulerOptions options;
  options.draft = {.most = most, .least_match = 100};  // nothing is copied
  options.batch.max_step_tokens = kStepRows;
  return options;
}

Tokens prompt_of(int64_t n, int32_t first) {
  Tokens tokens;
  for (int64_t i = 0; i < n; ++i) tokens.push_back(static_cast<int32_t>((first + 7 * i) % kVocab));
  return tokens;
}

int64_t count(const FakeExecutor& executor, const std::string& beginning) {
  return std::count_if(executor.calls.begin(), executor.calls.end(),
                       [&](const std::string& call) { return call.starts_with(beginning); });
}

TEST(ModelDrafter, AnswersAreTheSameInFewerSteps) {
  FakeExecutor small(drafting(/*wrong_every=*/7));
  ModelDrafter drafter(small, {.n_vocab = kVocab, .p_min = 0.5, .catch_up_rows = 64});
  Bench bench(answering(), drafted(8), &drafter);
  for (int i = 0; i < 3; ++i) bench.submit(prompt_of(150 + 31 * i, 100 * i), 120);
  ASSERT_TRUE(bench.run_all());
  int64_t accepted = 0;
  for (const Record& record : bench.records()) {
    EXPECT_EQ(record.answer, bench.expected(record));
    EXPECT_GT(record.outcome.drafted_tokens, record.outcome.accepted_tokens);
    accepted += record.outcome.accepted_tokens;
  }
  // Of 360 tokens; six of seven are guessed rightly, and what follows the seventh is in vain.
  EXPECT_GT(accepted, 200);
  EXPECT_LT(bench.scheduler->stats().steps, 90U);
}

TEST(ModelDrafter, WhatNeverComesTrueIsGivenUp) {
  FakeExecutor small(drafting(/*wrong_every=*/1));
  ModelDrafter drafter(small, {.n_vocab = kVocab});
  Bench bench(answering(), drafted(8), &drafter);
  const Record& record = bench.submit(prompt_of(50, 1), 200);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer, bench.expected(record));
  EXPECT_EQ(record.outcome.accepted_tokens, 0);
  EXPECT_LT(record.outcome.drafted_tokens, 150);
}

TEST(ModelDrafter, UnlikelyTokensAndThoseThatItDoesNotHaveAreNotGiven) {
  for (const ModelDrafterOptions& options :
       {ModelDrafterOptions{.n_vocab = kVocab, .p_min = 0.99F},  // 0.957 is what the fake gives
        ModelDrafterOptions{.n_vocab = 1}}) {
    FakeExecutor small(drafting(0));
    ModelDrafter drafter(small, options);
    Bench bench(answering(), drafted(8), &drafter);
    const Record& record = bench.submit(prompt_of(50, 1), 40);
    ASSERT_TRUE(bench.run_all());
    EXPECT_EQ(record.answer, bench.expected(record));
    EXPECT_EQ(record.outcome.drafted_tokens, 0);
  }
}

TEST(ModelDrafter, TheNextTurnGoesOnWhereTheLastOneEnded) {
  FakeExecutor small(drafting(7));
  Tokens next;
  {
    ModelDrafter drafter(small, {.n_vocab = kVocab});
    Bench bench(answering(), drafted(8), &drafter);
    const Record& first = bench.submit(prompt_of(200, 1), 60);
    ASSERT_TRUE(bench.run_all());
    next = first.prompt;
    next.insert(next.end(), first.answer.begin(), first.answer.end());
    for (int32_t token : prompt_of(20, 5)) next.push_back(token);
    const int64_t created = count(small, "create");
    const Record& second = bench.submit(next, 60);
    ASSERT_TRUE(bench.run_all());
    EXPECT_EQ(second.answer, bench.expected(second));
    EXPECT_GT(second.outcome.accepted_tokens, 30);
    EXPECT_EQ(count(small, "create"), created);
    // One that only begins alike leaves the other where it is.
    Tokens branch(next.begin(), next.begin() + 100);
    for (int32_t token : prompt_of(50, 77)) branch.push_back(token);
    const Record& third = bench.submit(branch, 30);
    ASSERT_TRUE(bench.run_all());
    EXPECT_EQ(third.answer, bench.expected(third));
    EXPECT_EQ(count(small, "fork 100"), 1);
    for (const auto& [seq, sequence] : small.sequences()) small.request_flush(seq);
    small.pass(1);
    for (const auto& [seq, sequence] : small.sequences()) {
      EXPECT_GT(small.durable_tokens(seq), 0);
    }
  }
  EXPECT_TRUE(small.sequences().empty());
  // Another process finds what was saved.
  ModelDrafter drafter(small, {.n_vocab = kVocab});
  Bench bench(answering(), drafted(8), &drafter);
  const Record& again = bench.submit(next, 60);
  while (bench.run_once() != Activity::kIdle) small.pass(1e-3);  // its clock is another one
  EXPECT_EQ(again.answer, bench.expected(again));
  EXPECT_GT(again.outcome.accepted_tokens, 30);
  EXPECT_EQ(count(small, "restore 280"), 1);
}

TEST(ModelDrafter, WhatIsNotToBeSavedDoesNotGoOnInWhatIs) {
  FakeExecutor small(drafting(7));
  ModelDrafter drafter(small, {.n_vocab = kVocab});
  Bench bench(answering(), drafted(8), &drafter);
  const Record& first = bench.submit(prompt_of(200, 1), 60);
  ASSERT_TRUE(bench.run_all());
  Tokens next = first.prompt;
  next.insert(next.end(), first.answer.begin(), first.answer.end());
  next.push_back(3);
  const auto saved_tokens = [&] {
    int64_t most = 0;
    for (const auto& [seq, sequence] : small.sequences()) {
      if (sequence.save) most = std::max(most, static_cast<int64_t>(sequence.chain.size()));
    }
    return most;
  };
  const int64_t before = saved_tokens();
  const Record& secret = bench.submit(next, 60, [](Request& request) { request.save = false; });
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(secret.answer, bench.expected(secret));
  EXPECT_GT(secret.outcome.accepted_tokens, 20);
  EXPECT_EQ(saved_tokens(), before);
  // The other way round: what was not saved is no beginning of what is.
  const Record& open = bench.submit(secret.prompt + secret.answer, 60);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(open.answer, bench.expected(open));
  EXPECT_GT(saved_tokens(), before + 60);
}

TEST(ModelDrafter, ForgetsWithTheScheduler) {
  FakeExecutor small(drafting(7));
  ModelDrafter drafter(small, {.n_vocab = kVocab});
  Bench bench(answering(), drafted(8), &drafter);
  const Record& gone = bench.submit(prompt_of(100, 1), 30);
  bench.submit(prompt_of(100, 2), 30);
  ASSERT_TRUE(bench.run_all());
  ASSERT_EQ(small.sequences().size(), 2U);
  Tokens chain = gone.prompt;
  chain.insert(chain.end(), gone.answer.begin(), gone.answer.end());
  bench.scheduler->forget({}, chain);
  bench.run_once();
  EXPECT_EQ(small.sequences().size(), 1U);
}

TEST(ModelDrafter, AChainBeyondItsContextIsFollowedFromTheMiddle) {
  FakeOptions fake = drafting(7);
  fake.limits.context = 128;
  fake.memory = 3;  // what comes next depends on so many rows alone, so the middle will do
  FakeExecutor small(fake);
  ModelDrafter drafter(small, {.n_vocab = kVocab});
  FakeOptions large = answering();
  large.memory = 3;
  Bench bench(large, drafted(8), &drafter);
  const Record& record = bench.submit(prompt_of(300, 1), 300);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer, bench.expected(record));
  EXPECT_GT(record.outcome.accepted_tokens, 200);
}

// Requests that come and go, some cancelled, with failures and too little room on either side.
TEST(ModelDrafter, NoFailureOfItChangesAnAnswer) {
  uint64_t accepted = 0;
  uint64_t failures = 0;
  for (uint32_t seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto upto = [&](int64_t most) {
      return std::uniform_int_distribution<int64_t>(0, most)(random);
    };
    FakeOptions draft_fake = drafting(2 + upto(8));
    draft_fake.seed = seed;
    draft_fake.limits.arena_cells = 200 + upto(2000);
    draft_fake.limits.context = 100 + upto(500);
    draft_fake.limits.max_sequences = static_cast<int32_t>(1 + upto(6));
    draft_fake.limits.max_step_rows = static_cast<int32_t>(16 + upto(64));
    if (seed % 2 == 0) {
      draft_fake.fail_step = 0.02;
      draft_fake.fail_copy = 0.02;
      draft_fake.fail_lookup = 0.1;
      draft_fake.fail_begin_restore = 0.2;
      draft_fake.fail_advance = 0.2;
      draft_fake.short_restore = 0.2;
    }
    if (seed % 3 == 0) draft_fake.window = 70;
    FakeExecutor small(draft_fake);
    ModelDrafter drafter(small, {.n_vocab = kVocab, .catch_up_rows = 16});
    FakeOptions fake = answering();
    fake.seed = seed;
    fake.in_flight = seed % 5 == 0 ? 2 : 1;
    fake.limits.arena_cells = 600 + upto(1000);
    SchedulerOptions options = drafted(static_cast<int32_t>(1 + upto(12)));
    if (seed % 4 == 0) options.draft.least_match = 2;
    if (seed % 4 == 0) fake.memory = 2;
    Bench bench(fake, options, &drafter);
    std::vector<Tokens> chains;
    for (int i = 0; i < 12; ++i) {
      Tokens prompt = prompt_of(20 + upto(150), static_cast<int32_t>(upto(3)));
      if (!chains.empty() && upto(1) == 0) {
        prompt = chains[static_cast<size_t>(upto(static_cast<int64_t>(chains.size()) - 1))];
        prompt.push_back(static_cast<int32_t>(upto(kVocab - 1)));
      }
      const Record& record = bench.submit(prompt, upto(60));
      for (int64_t n = upto(80); n > 0; --n) bench.run_once();
      if (upto(9) == 0) bench.scheduler->cancel(record.id);
      if (record.ended > 0 && record.prompt.size() + record.answer.size() < 400) {
        chains.push_back(record.prompt);
        chains.back().insert(chains.back().end(), record.answer.begin(), record.answer.end());
      }
      if (upto(5) == 0 && !chains.empty()) bench.scheduler->forget({}, chains.back());
    }
    ASSERT_TRUE(bench.run_all());
    for (const Record& record : bench.records()) {
      const Tokens expected = bench.expected(record);
      ASSERT_LE(record.answer.size(), expected.size());
      ASSERT_TRUE(std::equal(record.answer.begin(), record.answer.end(), expected.begin()));
      if (record.outcome.phase == Phase::kDone) {
        ASSERT_EQ(record.answer, expected);
      }
    }
    accepted += bench.scheduler->stats().accepted_tokens;
    failures += small.injected_step_failures;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(accepted, 10'000U);
  EXPECT_GT(failures, 30U);
}

}  // namespace
}  // namespace hcache::scheduler
