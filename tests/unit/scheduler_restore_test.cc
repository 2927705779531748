// Restores beside running requests: phases, budgets, order, I/O, failures.
#include <gmock/gmock.h>

#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using hcache::test::Patience;
using testing::Bench;
using testing::FakeOptions;
using testing::Record;
using testing::tokens;
using testing::Tokens;
using testing::operator+;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

TEST(SchedulerRestore, FetchesRestoresPrefillsDecodes) {
  FakeOptions fake;
  fake.restore_row_s = 1e-3;  // several slices of 50 ms
  Bench bench(fake);
  bench.executor.save({}, tokens(300));
  const Record& record = bench.submit(tokens(300) + tokens(40, 2), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(record.phases, ElementsAre(Phase::kFetching, Phase::kRestoring, Phase::kPrefill,
                                         Phase::kDecoding, Phase::kDone));
  EXPECT_EQ(record.answer, bench.expected(record));
  const Outcome& outcome = record.outcome;
  EXPECT_EQ(outcome.hidden_tokens, 150);
  EXPECT_EQ(outcome.kv_tokens, 150);
  EXPECT_EQ(outcome.new_tokens, 40);
  EXPECT_EQ(outcome.resident_tokens, 0);
  EXPECT_EQ(outcome.bytes.disk, 30'000U);
  EXPECT_NEAR(outcome.restore_busy_s, (300 + 40) * 1e-3, 1e-6);  // the new tokens followed
  EXPECT_GE(outcome.restore_s, 2e-3 + 300 * 1e-3);
  EXPECT_LE(outcome.restore_s, outcome.ttft_s);
  ASSERT_EQ(outcome.restores.size(), 1U);
  const policy::RestoreRecord& restore = outcome.restores[0];
  EXPECT_EQ(restore.schedule, "H:1 KV:1");
  EXPECT_EQ(restore.overlap, 0.5);
  EXPECT_EQ(restore.restore_s, outcome.restore_s);
  EXPECT_EQ(restore.predicted_restore_s, 0.25);
  EXPECT_TRUE(restore.alone);
  EXPECT_EQ(restore.hidden_tokens, 150);
  EXPECT_EQ(restore.hidden_pages.dram, 7U);
  EXPECT_EQ(restore.kv_pages.disk, 9U);
}

TEST(SchedulerRestore, ThePrefillGoesOnBehindWhatWasComputedMeanwhile) {
  FakeOptions fake;
  fake.follow_rows = 64;
  Bench bench(fake);
  bench.executor.save({}, tokens(300));
  const Record& record = bench.submit(tokens(300) + tokens(100, 2), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer, bench.expected(record));
  EXPECT_EQ(record.outcome.hidden_tokens + record.outcome.kv_tokens, 300);
  EXPECT_EQ(record.outcome.new_tokens, 100);
  EXPECT_EQ(bench.scheduler->stats().prefill_rows, 100U - 64U);
  // All of the new tokens but the last can be there.
  const Record& shorter = bench.submit(tokens(300) + tokens(40, 3), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(shorter.answer, bench.expected(shorter));
}

TEST(SchedulerRestore, KnowsWhichRestoresHadTheEngineToThemselves) {
  Bench bench;
  for (int i = 1; i <= 3; ++i) bench.executor.save({}, tokens(200, i));
  const Record& alone = bench.submit(tokens(200, 1) + tokens(5, 4), 1);
  ASSERT_TRUE(bench.run_all());
  const Record& one = bench.submit(tokens(200, 2) + tokens(5, 4), 1);
  const Record& other = bench.submit(tokens(200, 3) + tokens(5, 4), 1);
  ASSERT_TRUE(bench.run_all());
  bench.executor.save({}, tokens(200, 5));
  bench.submit(tokens(10, 6), 400);
  bench.run_once();
  const Record& beside = bench.submit(tokens(200, 5) + tokens(5, 4), 1);
  ASSERT_TRUE(bench.run_all());
  for (const Record* record : {&alone, &one, &other, &beside}) {
    ASSERT_EQ(record->outcome.restores.size(), 1U);
    EXPECT_EQ(record->outcome.restores[0].alone, record == &alone) << record->id;
  }
}

// The next request is loaded while a full batch decodes, in time for the end of the first, and no
// earlier; nothing but loading is done ahead of its turn.
TEST(SchedulerRestore, TheTimerLoadsTheNextInTimeForAnEnd) {
  for (const bool timed : {true, false}) {
    FakeOptions fake;
    fake.restore_row_s = 1e-5;
    fake.io_row_s = 1e-4;  // 300 rows: 30 ms, as long as about 27 steps
    SchedulerOptions options;
    options.batch.max_sequences = 1;
    if (timed) options.fetch = policy::FetchPolicy::kCarTimer;
    Bench bench(fake, options);
    bench.executor.save({}, tokens(300, 1));
    bench.executor.save({}, tokens(300, 2));
    bench.submit(tokens(300, 1) + tokens(5, 5), 100);  // it learns how long loading takes
    ASSERT_TRUE(bench.run_all());
    const Record& running = bench.submit(tokens(10, 3), 200);
    bench.run_once();
    const Record& next = bench.submit(tokens(300, 2) + tokens(5, 5), 5);
    const Record& last = bench.submit(tokens(20, 6), 5);
    ASSERT_TRUE(bench.run_until(
        [&] { return !next.phases.empty() && next.phases.back() != Phase::kQueued; }));
    EXPECT_EQ(running.ended == 0, timed);
    if (timed) {
      EXPECT_GT(running.answer.size(), 50U);  // replies were 100 long so far
    }
    for (Patience patience("the running request's end"); running.ended == 0;) {
      ASSERT_TRUE(patience.lasts());
      bench.run_once();
      EXPECT_TRUE(last.phases.empty() || last.phases.back() == Phase::kQueued);
      EXPECT_TRUE(next.answer.empty());
    }
    EXPECT_EQ(next.phases.back() == Phase::kPrefill, timed);
    ASSERT_TRUE(bench.run_all());
    for (const Record* record : {&running, &next, &last}) {
      EXPECT_EQ(record->answer, bench.expected(*record));
    }
    EXPECT_EQ(bench.scheduler->stats().preemptions, 0U);
  }
}

TEST(SchedulerRestore, ExclusiveOnesHaveTheEngineToThemselves) {
  FakeOptions fake;
  fake.restore_row_s = 1e-3;
  Bench bench(fake, {.restore = {.exclusive = true}});
  bench.executor.save({}, tokens(300));
  const Record& running = bench.submit(tokens(10, 2), 400);
  bench.run_once();
  const Record& restored = bench.submit(tokens(300) + tokens(5, 3), 5);
  for (Patience patience("the restore's end");;) {
    ASSERT_TRUE(patience.lasts());
    bench.run_once();
    const Phase phase = restored.phases.empty() ? Phase::kQueued : restored.phases.back();
    if (phase != Phase::kFetching && phase != Phase::kRestoring) break;
    EXPECT_TRUE(bench.executor.trace.steps.empty()) << "something else was computed";
    bench.executor.pass(1e-3);
  }
  EXPECT_EQ(running.phases.back(), Phase::kDecoding);
  EXPECT_TRUE(restored.outcome.restores.empty() || restored.outcome.restores[0].alone);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(bench.executor.compute_shares, ElementsAre(1));
  EXPECT_EQ(running.answer, bench.expected(running));
  EXPECT_EQ(restored.answer, bench.expected(restored));
}

TEST(SchedulerRestore, TellsItsOwnPartOfTheLongestStep) {
  for (const double stalled : {0.0, 0.75}) {
    FakeOptions fake;
    fake.restore_row_s = 1e-4;
    fake.stalled_share = stalled;
    Bench bench(fake, {.restore = {.share = 0.25}});
    bench.executor.save({}, tokens(400));
    bench.submit(tokens(10, 2), 400);
    bench.run_once();
    bench.submit(tokens(400) + tokens(5, 3), 5);
    ASSERT_TRUE(bench.run_all());
    const Snapshot stats = bench.scheduler->stats();
    EXPECT_GT(stats.restore_stretch_max, 2);  // by a slice of 3.2 ms beside a step of 1.1
    EXPECT_NEAR(stats.restore_stretch_own_max - 1, (1 - stalled) * (stats.restore_stretch_max - 1),
                1e-9);
  }
}

TEST(SchedulerRestore, KeepsItsShareWhileOthersDecode) {
  FakeOptions fake;
  fake.restore_row_s = 1e-4;  // a slice of 32 rows takes 3.2 ms, a step about 1.1
  Bench bench(fake, {.restore = {.share = 0.25}});
  bench.executor.save({}, tokens(400));
  const Record& running = bench.submit(tokens(10, 2), 400);
  bench.run_once();
  const Record& restored = bench.submit(tokens(400) + tokens(5, 3), 5);
  double excess_s = 0;
  double slices_s = 0;
  Patience patience("the restored request's prefill");
  while (restored.phases.empty() || restored.phases.back() != Phase::kPrefill) {
    ASSERT_TRUE(patience.lasts());
    bench.run_once();
    const auto& trace = bench.executor.trace;
    ASSERT_EQ(trace.steps.size(), 1U);  // never a step without the running request
    EXPECT_LE(trace.slices_s, 3.2e-3 + 1e-9);
    excess_s = std::max(0.0, excess_s + trace.slices_s - 0.25 * trace.step_s);
    EXPECT_LE(excess_s, 3.2e-3 + 1e-9);
    slices_s += trace.slices_s;
    ASSERT_EQ(running.ended, 0);
  }
  EXPECT_NEAR(slices_s, 400 * 1e-4, 1e-6);
  const Snapshot stats = bench.scheduler->stats();
  EXPECT_NEAR(stats.restore_slices_s, slices_s, 1e-6);
  EXPECT_LE(stats.restore_step_s, 1.25 * (stats.restore_step_s - slices_s) + 3.2e-3);
  // And it takes its share: about 0.27 ms of every step.
  EXPECT_LE(stats.restore_steps, static_cast<uint64_t>(400 * 1e-4 / (0.25 * 1.1e-3)) + 15);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(bench.executor.compute_shares, ElementsAre(0.25 / 1.25));  // planned with it
  EXPECT_EQ(restored.answer, bench.expected(restored));
}

// Nothing else runs or waits: one call to the executor, with the prefill behind it, until something
// arrives.
TEST(SchedulerRestore, ALoneOneHasTheDeviceToItself) {
  FakeOptions fake;
  fake.restore_row_s = 1e-3;  // the whole restore takes 0.4 s
  fake.io_start_s = 0.1;
  Bench bench(fake);
  bench.executor.save({}, tokens(400));
  const Record& record = bench.submit(tokens(400) + tokens(5, 3), 5);
  bench.run_once();
  EXPECT_EQ(record.first, 1);  // restored, prefilled and sampled
  EXPECT_EQ(record.answer.size(), 1U);
  EXPECT_TRUE(bench.executor.trace.steps.empty());
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(bench.executor.planned_alone, ElementsAre(true));
  EXPECT_EQ(bench.executor.lookups, 1);
  EXPECT_EQ(record.answer, bench.expected(record));
  EXPECT_EQ(record.outcome.new_tokens, 5);
}

TEST(SchedulerRestore, ALoneOneMakesRoomForWhatArrives) {
  FakeOptions fake;
  fake.restore_row_s = 1e-3;
  Bench bench(fake);
  bench.executor.save({}, tokens(400));
  const Record* second = nullptr;
  const Record& first = bench.submit(tokens(400) + tokens(5, 3), 5, [&](Request& request) {
    request.on_state = [&, told = std::move(request.on_state)](Phase phase, double fraction) {
      told(phase, fraction);
      if (fraction > 0.4 && second == nullptr) second = &bench.submit(tokens(10, 2), 50);
    };
  });
  bench.run_once();
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(first.phases.back(), Phase::kRestoring);
  EXPECT_NEAR(bench.executor.trace.slices_s, 0.16, 0.04);
  bench.run_once();
  EXPECT_EQ(second->first, 1);  // after the slice in hand
  ASSERT_TRUE(bench.run_all());
  EXPECT_FALSE(first.outcome.restores.at(0).alone);
  EXPECT_EQ(first.answer, bench.expected(first));
  EXPECT_EQ(second->answer, bench.expected(*second));
}

TEST(SchedulerRestore, TakesLargeSlicesWhenNothingDecodes) {
  FakeOptions fake;
  fake.restore_row_s = 1e-3;  // each restore takes 0.2 s
  fake.io_start_s = 0;
  fake.io_row_s = 1e-7;
  Bench bench(fake, {.restore = {.idle_slice_s = 0.05}});
  for (int i = 1; i <= 2; ++i) bench.executor.save({}, tokens(200, i));
  const Record& record = bench.submit(tokens(200, 1) + tokens(5, 3), 5);
  bench.submit(tokens(200, 2) + tokens(5, 3), 5);
  int iterations = 0;
  Patience patience("the restored request's prefill");
  while (record.phases.empty() || record.phases.back() != Phase::kPrefill) {
    ASSERT_TRUE(patience.lasts());
    const Activity activity = bench.run_once();
    ++iterations;
    EXPECT_TRUE(activity == Activity::kWorked || bench.executor.trace.slices_s == 0)
        << "the owner would sleep between slices";
    EXPECT_LE(bench.executor.trace.slices_s, 0.05 + 2 * 0.032 + 1e-9);
  }
  EXPECT_LE(iterations, 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(bench.executor.compute_shares, ElementsAre(1, 1));
}

TEST(SchedulerRestore, IoStallsNobody) {
  FakeOptions fake;
  fake.io_start_s = 1;
  Bench bench(fake);
  bench.executor.save({}, tokens(200));
  const Record& slow = bench.submit(tokens(200) + tokens(5, 3), 5);
  const Record& running = bench.submit(tokens(50, 2), 100);
  bench.run_until([&] { return running.ended == 1; });
  EXPECT_NEAR(running.outcome.total_s, 6e-3 + 99 * 1.1e-3, 1e-3);
  EXPECT_EQ(slow.phases, std::vector<Phase>{Phase::kFetching});
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(slow.answer, bench.expected(slow));
}

TEST(SchedulerRestore, SeveralShareTheComputeAndReadAtTheSameTime) {
  FakeOptions fake;
  fake.restore_row_s = 1e-3;
  fake.io_start_s = 0.3;
  Bench bench(fake);
  for (int i = 1; i <= 3; ++i) bench.executor.save({}, tokens(i == 3 ? 100 : 300, i));
  const Record& one = bench.submit(tokens(300, 1) + tokens(5, 4), 5);
  const Record& other = bench.submit(tokens(300, 2) + tokens(5, 4), 5);
  const Record& small = bench.submit(tokens(100, 3) + tokens(5, 4), 5);
  ASSERT_TRUE(bench.run_all());
  // All read at once. The small one has its third from then on, and is not kept waiting.
  EXPECT_NEAR(small.outcome.ttft_s, 0.3 + 3 * 0.1, 0.1);
  EXPECT_NEAR(one.outcome.ttft_s, 0.3 + 0.7, 0.1);
  EXPECT_NEAR(other.outcome.ttft_s, 0.3 + 0.7, 0.1);
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerRestore, OneThatWaitsForItsBytesHoldsNobodyUp) {
  FakeOptions fake;
  fake.restore_row_s = 1e-3;  // 0.2 s for each
  fake.io_start_s = 1;
  Bench bench(fake);
  bench.executor.save({}, tokens(200, 1));
  bench.executor.save({}, tokens(200, 2));
  const Record& slow = bench.submit(tokens(200, 1) + tokens(5, 4), 5);
  const Record& running = bench.submit(tokens(10, 3), 30);
  bench.run_until([&] { return !slow.phases.empty() && running.first == 1; });
  bench.executor.options().io_start_s = 0;
  const Record& fast = bench.submit(tokens(200, 2) + tokens(5, 4), 5);
  bench.run_until([&] { return fast.ended == 1; });
  EXPECT_EQ(slow.phases, std::vector<Phase>{Phase::kFetching});
  ASSERT_TRUE(bench.run_all());
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

// Cache use: what a request may go on from.
TEST(SchedulerRestore, ARequestMayDoWithoutWhatIsThere) {
  Bench bench;
  bench.executor.save({}, tokens(300));
  bench.submit(tokens(300), 5);
  ASSERT_TRUE(bench.run_all());  // resident now, and saved
  bench.executor.calls.clear();
  const Record& anew =
      bench.submit(tokens(300) + tokens(10, 2), 5, [](Request& r) { r.cache = CacheUse::kNone; });
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(anew.outcome.new_tokens, 310);
  EXPECT_THAT(bench.executor.calls, Not(Contains(::testing::StartsWith("restore"))));
  const Record& saved =
      bench.submit(tokens(300) + tokens(10, 4), 5, [](Request& r) { r.cache = CacheUse::kSaved; });
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(saved.outcome.resident_tokens, 0);
  EXPECT_THAT(bench.executor.calls, Contains("restore 300"));
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

// What leaves the arena while a request waits is restored, though it was looked for before.
TEST(SchedulerRestore, WhatWasEvictedMeanwhileIsFound) {
  FakeOptions fake;
  fake.limits.arena_cells = 700;
  Bench bench(fake, {.max_restores = 4});
  bench.submit(tokens(300, 1), 1);
  ASSERT_TRUE(bench.run_all());
  const Record& back = bench.submit(tokens(300, 1) + tokens(150, 2), 1);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(back.outcome.resident_tokens, 300);
  bench.executor.pass(0.1);  // durable
  bench.submit(tokens(400, 5), 1, [](Request& r) { r.priority = 5; });
  const Record& again = bench.submit(tokens(300, 1) + tokens(150, 2) + tokens(9, 3), 1);
  ASSERT_TRUE(bench.run_all());
  EXPECT_GT(again.outcome.resident_tokens + again.outcome.hidden_tokens + again.outcome.kv_tokens,
            300);
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerRestore, LimitsThoseInFlightAndLetsOthersPass) {
  FakeOptions fake;
  fake.io_start_s = 0.1;
  Bench bench(fake, {.max_restores = 1});
  bench.executor.save({}, tokens(200, 1));
  bench.executor.save({}, tokens(200, 2));
  bench.submit(tokens(200, 1) + tokens(5, 4), 5);
  const Record& second = bench.submit(tokens(200, 2) + tokens(5, 4), 5);
  const Record& third = bench.submit(tokens(30, 3), 5);
  for (Patience patience("the end of all requests"); bench.run_once() != Activity::kIdle;) {
    ASSERT_TRUE(patience.lasts());
    const Snapshot stats = bench.scheduler->stats();
    EXPECT_LE(stats.fetching + stats.restoring, 1);
  }
  EXPECT_LT(third.outcome.total_s, 0.05);
  EXPECT_GT(second.outcome.queue_s, 0.1);
  EXPECT_THAT(bench.executor.calls, Contains("will restore 200"));
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerRestore, ContinuationsOfASavedPromptRestoreItOnce) {
  Bench bench;
  bench.executor.save({}, tokens(300));
  for (int i = 0; i < 3; ++i) bench.submit(tokens(300) + tokens(10, 2), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(std::count(bench.executor.calls.begin(), bench.executor.calls.end(), "restore 300"), 1);
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerRestore, WhatIsMissingIsPrefilled) {
  FakeOptions fake;
  fake.short_restore = 1;
  Bench bench(fake);
  bench.executor.save({}, tokens(300));
  const Record& record = bench.submit(tokens(300) + tokens(10, 2), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.outcome.hidden_tokens + record.outcome.kv_tokens, 150);
  EXPECT_EQ(record.outcome.new_tokens, 160);
  EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerRestore, AFailureMeansComputing) {
  for (double FakeOptions::*failure :
       {&FakeOptions::fail_begin_restore, &FakeOptions::fail_advance, &FakeOptions::fail_lookup}) {
    FakeOptions fake;
    fake.*failure = 1;
    Bench bench(fake);
    bench.executor.save({}, tokens(300));
    const Record& record = bench.submit(tokens(300) + tokens(10, 2), 5);
    ASSERT_TRUE(bench.run_all());
    EXPECT_EQ(record.outcome.new_tokens, 310);
    EXPECT_EQ(record.answer, bench.expected(record));
  }
}

TEST(SchedulerRestore, ACancelledRestoreLeavesNothing) {
  Bench bench;
  bench.executor.save({}, tokens(300));
  const Record* begun = nullptr;
  const Record& record = bench.submit(tokens(300) + tokens(10, 2), 5, [&](Request& request) {
    request.on_state = [&, told = std::move(request.on_state)](Phase phase, double fraction) {
      told(phase, fraction);
      if (phase == Phase::kRestoring && begun != nullptr) bench.scheduler->cancel(begun->id);
    };
  });
  begun = &record;
  bench.run_once();
  EXPECT_EQ(record.phases.back(), Phase::kRestoring);
  bench.run_once();
  EXPECT_EQ(record.outcome.phase, Phase::kCancelled);
  EXPECT_TRUE(bench.executor.sequences().empty());
}

TEST(SchedulerRestore, AResidentPrefixNeedsNone) {
  Bench bench;
  const Record& first = bench.submit(tokens(300), 10);
  ASSERT_TRUE(bench.run_all());
  bench.executor.pass(1);  // durable by now
  const Record& second = bench.submit(first.prompt + first.answer + tokens(20, 2), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(bench.executor.calls, Not(Contains(::testing::StartsWith("restore"))));
  EXPECT_EQ(second.outcome.resident_tokens, 309);
}

}  // namespace
}  // namespace hcache::scheduler
