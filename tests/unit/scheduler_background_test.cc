// Requests in the background: they use what the others leave, and the others never wait for them.
#include <gmock/gmock.h>

#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using testing::Bench;
using ::testing::Each;
using testing::FakeOptions;
using testing::operator+;
using testing::Record;
using testing::tokens;

const Bench::Tweak kBackground = [](Request& r) { r.background = true; };

void expect_right_answers(const Bench& bench) {
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerBackground, GivesUpItsPlaceAtOnce) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 2}});
  const Record& old = bench.submit(tokens(30, 1), 50, kBackground);
  const Record& young = bench.submit(tokens(30, 2), 50, kBackground);
  ASSERT_TRUE(bench.run_until([&] { return !old.answer.empty() && !young.answer.empty(); }));
  const Record& waited_for = bench.submit(tokens(30, 3), 5);
  ASSERT_TRUE(bench.run_until([&] { return waited_for.ended == 1; }));
  EXPECT_EQ(waited_for.outcome.queue_s, 0);
  EXPECT_EQ(old.ended + young.ended, 0);
  ASSERT_TRUE(bench.run_all());
  EXPECT_TRUE(old.outcome.preempted_at_s.empty());
  EXPECT_EQ(young.outcome.preempted_at_s.size(), 1U);
  expect_right_answers(bench);
}

// Its sequence may not be left before; which of the two is in a step depends on when the other
// comes.
TEST(SchedulerBackground, GivesUpItsPlaceOnceItsStepInFlightHasEnded) {
  for (const size_t n_tokens : {3U, 4U}) {
    FakeOptions fake;
    fake.in_flight = 2;
    fake.saving = false;  // what gives way is released
    Bench bench(fake, {.batch = {.max_step_tokens = 64, .max_sequences = 2}});
    const Record& old = bench.submit(tokens(30, 1), 50, kBackground);
    const Record& young = bench.submit(tokens(30, 2), 50, kBackground);
    ASSERT_TRUE(
        bench.run_until([&] { return old.answer.size() + young.answer.size() == n_tokens; }));
    ASSERT_EQ(bench.executor.most_in_flight, 2U);
    const Record& waited_for = bench.submit(tokens(30, 3), 5);
    ASSERT_TRUE(bench.run_until([&] { return waited_for.ended == 1; }));
    EXPECT_EQ(old.ended + young.ended, 0);
    ASSERT_TRUE(bench.run_all());
    EXPECT_EQ(old.outcome.preempted_at_s.size() + young.outcome.preempted_at_s.size(), 1U);
    expect_right_answers(bench);
  }
}

TEST(SchedulerBackground, WaitingRaisesItOverNobody) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 1}, .aging_s = 0.05});
  bench.submit(tokens(10, 1), 5, [](Request& r) { r.priority = -5; });
  const Record& behind = bench.submit(tokens(10, 2), 5, [](Request& r) {
    r.background = true;
    r.priority = 9;
  });
  for (int i = 3; i < 100; ++i) {
    bench.submit(tokens(10, i), 5);
    ASSERT_TRUE(bench.run_until([&] { return bench.unfinished() < 3; }));
    ASSERT_EQ(behind.answer.size(), 0U);
  }
  ASSERT_TRUE(bench.run_all());
  expect_right_answers(bench);
}

TEST(SchedulerBackground, GivesUpItsRoom) {
  FakeOptions fake;
  fake.limits.arena_cells = 200;
  Bench bench(fake, {.decode_headroom = 4});
  const Record& behind = bench.submit(tokens(120, 1), 60, kBackground);
  ASSERT_TRUE(bench.run_until([&] { return !behind.answer.empty(); }));
  const Record& waited_for = bench.submit(tokens(150, 2), 20);
  ASSERT_TRUE(bench.run_until([&] { return waited_for.ended == 1; }));
  EXPECT_EQ(behind.ended, 0);
  EXPECT_TRUE(waited_for.outcome.preempted_at_s.empty());
  ASSERT_TRUE(bench.run_all());
  EXPECT_FALSE(behind.outcome.preempted_at_s.empty());
  expect_right_answers(bench);
}

TEST(SchedulerBackground, GivesUpItsRestore) {
  FakeOptions fake;
  fake.io_start_s = 0.1;
  Bench bench(fake, {.max_restores = 1});
  bench.executor.save({}, tokens(200, 1));
  bench.executor.save({}, tokens(200, 2));
  bench.submit(tokens(30, 9), 300);  // beside it restores are cut into slices
  const Record& behind = bench.submit(tokens(200, 1) + tokens(5, 3), 5, kBackground);
  ASSERT_TRUE(bench.run_until([&] { return bench.scheduler->running() == 2; }));
  const Record& waited_for = bench.submit(tokens(200, 2) + tokens(5, 3), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(waited_for.outcome.queue_s, 0);
  EXPECT_EQ(waited_for.outcome.new_tokens, 5);
  EXPECT_EQ(behind.outcome.preempted_at_s.size(), 1U);
  EXPECT_LT(waited_for.outcome.total_s, behind.outcome.total_s);
  expect_right_answers(bench);
}

TEST(SchedulerBackground, IsNotAdmittedWhileAnotherWaitsForARestore) {
  FakeOptions fake;
  fake.io_start_s = 0.1;
  Bench bench(fake, {.batch = {.max_step_tokens = 64, .max_sequences = 2}, .max_restores = 1});
  bench.executor.save({}, tokens(200, 1));
  bench.executor.save({}, tokens(200, 2));
  const Record& first = bench.submit(tokens(200, 1) + tokens(5, 4), 5);
  const Record& behind = bench.submit(tokens(30, 3), 300, kBackground);
  ASSERT_TRUE(bench.run_until([&] { return !behind.answer.empty(); }));
  EXPECT_EQ(first.ended, 0);
  bench.submit(tokens(200, 2) + tokens(5, 4), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(behind.outcome.preempted_at_s.size(), 1U);  // and not once for every iteration
  expect_right_answers(bench);
}

TEST(SchedulerBackground, NobodyWaitsForWhatItComputes) {
  Bench bench;
  bench.submit(tokens(400, 1), 5, kBackground);
  bench.run_once();
  const Record& same = bench.submit(tokens(400, 1) + tokens(9, 2), 5);
  bench.run_once();
  EXPECT_EQ(same.phases.front(), Phase::kPrefill);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(same.outcome.queue_s, 0);
  expect_right_answers(bench);
}

TEST(SchedulerBackground, PrefillsWithWhatTheOthersLeave) {
  Bench bench;
  bench.submit(tokens(300, 1), 5, kBackground);
  const Record& waited_for = bench.submit(tokens(300, 2), 5);
  while (waited_for.answer.empty()) {
    bench.run_once();
    // All 64 rows, but in the step in which the prompt ends.
    if (!waited_for.answer.empty()) break;
    ASSERT_THAT(bench.executor.trace.steps.front(), Each(64));
  }
  ASSERT_TRUE(bench.run_all());
  EXPECT_NEAR(waited_for.outcome.ttft_s, 5 * (1e-3 + 64 * 1e-4), 1e-6);
  expect_right_answers(bench);
}

TEST(SchedulerBackground, CountsAgainstNoLimit) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 2},
                   .max_queued = 2,
                   .max_queued_per_key = 1,
                   .max_running_per_key = 1});
  for (int i = 1; i <= 6; ++i) bench.submit(tokens(20, i), 20, kBackground);
  bench.run_once();
  EXPECT_EQ(bench.scheduler->running(), 2);
  const Record& waited_for = bench.submit(tokens(20, 7), 5);
  EXPECT_EQ(bench.refusal(tokens(20, 8), 5).code(), Code::kResourceExhausted);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(waited_for.outcome.queue_s, 0);
  expect_right_answers(bench);
}

}  // namespace
}  // namespace hcache::scheduler
