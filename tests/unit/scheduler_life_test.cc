// The life of a request: submission and its limits, phases, order, cancellation, failures, the end.
#include <gmock/gmock.h>

#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using hcache::test::Patience;
using testing::Bench;
using ::testing::ElementsAre;
using testing::FakeOptions;
using ::testing::HasSubstr;
using testing::operator+;
using testing::kPoison;
using testing::Record;
using testing::tokens;
using testing::Tokens;

TEST(SchedulerLife, AnswersARequest) {
  Bench bench;
  const Record& record = bench.submit(tokens(100), 20);
  EXPECT_EQ(bench.scheduler->queued(), 1);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer, bench.expected(record));
  EXPECT_THAT(record.phases, ElementsAre(Phase::kPrefill, Phase::kDecoding, Phase::kDone));
  const Outcome& outcome = record.outcome;
  EXPECT_TRUE(outcome.status.ok());
  EXPECT_EQ(outcome.finish_reason, "length");
  EXPECT_EQ(outcome.prompt_tokens, 100);
  EXPECT_EQ(outcome.new_tokens, 100);
  EXPECT_EQ(outcome.generated_tokens, 20);
  // 100 prompt rows in steps of 64, 19 more tokens.
  EXPECT_NEAR(outcome.ttft_s, 2e-3 + 100 * 1e-4, 1e-6);
  EXPECT_NEAR(outcome.total_s, outcome.ttft_s + 19 * 1.1e-3, 1e-6);
  EXPECT_EQ(outcome.queue_s, 0);
  EXPECT_EQ(bench.scheduler->stats().done, 1U);
}

TEST(SchedulerLife, CountsNewTokensThatAreBeingSaved) {
  Bench bench;
  const Record& saved = bench.submit(tokens(100, 1), 5);
  const Record& unsaved = bench.submit(tokens(100, 2), 5, [](Request& r) { r.save = false; });
  ASSERT_TRUE(bench.run_all());
  const Record& again = bench.submit(tokens(100, 1) + saved.answer + tokens(30, 3), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(saved.outcome.saving_tokens, 100);
  EXPECT_EQ(unsaved.outcome.saving_tokens, 0);
  EXPECT_EQ(again.outcome.saving_tokens, 31);  // the answer's last token was never computed
}

TEST(SchedulerLife, StopsWhereTheSamplerSays) {
  Bench bench;
  bench.stop_every = 8;
  for (int i = 1; i <= 20; ++i) bench.submit(tokens(20, i), 40);
  ASSERT_TRUE(bench.run_all());
  size_t stopped = 0;
  for (const Record& record : bench.records()) {
    EXPECT_EQ(record.answer, bench.expected(record));
    if (record.outcome.finish_reason == "stop") ++stopped;
  }
  EXPECT_GT(stopped, 10U);
}

TEST(SchedulerLife, MixesPrefillAndDecodingWithinTheBudget) {
  Bench bench({}, {.batch = {.max_step_tokens = 32, .max_sequences = 8}});
  bench.submit(tokens(10, 1), 50);
  bench.run_once();
  bench.submit(tokens(50, 2), 5);
  bench.submit(tokens(20, 3), 5);
  bench.run_once();
  EXPECT_EQ(bench.executor.trace.steps, (std::vector<std::vector<int64_t>>{{1, 31}}));
  bench.run_once();
  EXPECT_EQ(bench.executor.trace.steps, (std::vector<std::vector<int64_t>>{{1, 19, 12}}));
  bench.run_once();
  EXPECT_EQ(bench.executor.trace.steps, (std::vector<std::vector<int64_t>>{{1, 1, 8}}));
  ASSERT_TRUE(bench.run_all());
}

TEST(SchedulerLife, ComputesAPromptWithoutGenerating) {
  Bench bench;
  const Record& record = bench.submit(tokens(80), 0, [](Request& r) { r.next = nullptr; });
  ASSERT_TRUE(bench.run_all());
  EXPECT_TRUE(record.outcome.status.ok());
  EXPECT_EQ(record.outcome.new_tokens, 80);
  EXPECT_EQ(record.outcome.generated_tokens, 0);
  EXPECT_EQ(bench.scheduler->stats().idle_cells, 80);
}

TEST(SchedulerLife, RefusesWhatCanNeverRun) {
  Bench bench;
  EXPECT_EQ(bench.refusal({}, 5).code(), Code::kInvalidArgument);
  EXPECT_EQ(bench.refusal(tokens(5), 5, [](Request& r) { r.next = nullptr; }).code(),
            Code::kInvalidArgument);
  const Status status = bench.refusal(tokens(513), 1);
  EXPECT_EQ(status.code(), Code::kOutOfRange);
  EXPECT_THAT(status.message(), HasSubstr("513"));
  EXPECT_THAT(status.message(), HasSubstr("512"));
  EXPECT_EQ(bench.scheduler->stats().refused, 3U);
}

TEST(SchedulerLife, RefusesWhatIsLargerThanTheArena) {
  FakeOptions fake;
  fake.limits.arena_cells = 100;
  Bench bench(fake);
  const Status status = bench.refusal(tokens(101), 1);
  EXPECT_EQ(status.code(), Code::kOutOfRange);
  EXPECT_THAT(status.message(), HasSubstr("100 cells"));
}

TEST(SchedulerLife, CutsTheAnswerToTheWindow) {
  Bench bench;
  const Record& full = bench.submit(tokens(512, 1), 100);
  const Record& most = bench.submit(tokens(500, 2), std::numeric_limits<int64_t>::max());
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(full.outcome.generated_tokens, 1);  // takes no cell
  EXPECT_EQ(most.outcome.generated_tokens, 13);
  EXPECT_EQ(most.outcome.finish_reason, "length");
}

TEST(SchedulerLife, LimitsTheQueueAndSaysWhenToComeBack) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 1}, .max_queued = 1});
  auto refused_for_s = [&] {
    bench.submit(tokens(10, 1), 500);
    bench.run_once();
    bench.submit(tokens(10, 2), 5);
    double retry_after_s = 0;
    EXPECT_EQ(bench.refusal(tokens(10, 3), 5, {}, &retry_after_s).code(), Code::kResourceExhausted);
    return retry_after_s;
  };
  EXPECT_EQ(refused_for_s(), 1);  // nothing is known yet
  ASSERT_TRUE(bench.run_all());
  bench.executor.pass(10);
  bench.submit(tokens(10, 4), 5);
  ASSERT_TRUE(bench.run_all());
  bench.executor.pass(10);
  // Three have ended in the 20 seconds and a bit since the first did.
  EXPECT_NEAR(refused_for_s(), 20.0 / 3, 0.1);
  ASSERT_TRUE(bench.run_all());
}

TEST(SchedulerLife, LimitsEachKey) {
  Bench bench({}, {.max_queued_per_key = 2, .max_running_per_key = 1});
  auto key = [](const char* name) { return [name](Request& r) { r.key = name; }; };
  const Record& first = bench.submit(tokens(10, 1), 30, key("a"));
  bench.run_once();
  const Record& second = bench.submit(tokens(10, 2), 30, key("a"));
  bench.submit(tokens(10, 3), 30, key("a"));
  EXPECT_EQ(bench.refusal(tokens(10, 4), 30, key("a")).code(), Code::kResourceExhausted);
  const Record& other = bench.submit(tokens(10, 5), 10, key("b"));
  for (Patience patience("the end of all requests"); bench.run_once() != Activity::kIdle;) {
    ASSERT_TRUE(patience.lasts());
    EXPECT_LE(bench.scheduler->running(), 2);
    EXPECT_TRUE(first.ended == 1 || second.answer.empty());
  }
  EXPECT_LT(other.outcome.total_s, first.outcome.total_s);
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerLife, AdmitsByPriorityThenArrival) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 1}});
  std::vector<int> order;
  auto request = [&](int i, int32_t priority) {
    bench.submit(tokens(10, i), 3, [&order, i, priority](Request& r) {
      r.priority = priority;
      r.on_done = [&order, i, done = r.on_done](const Outcome& outcome) {
        order.push_back(i);
        done(outcome);
      };
    });
  };
  request(1, 0);
  request(2, 1);
  request(3, 0);
  request(4, 1);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(order, ElementsAre(2, 4, 1, 3));
}

TEST(SchedulerLife, WaitingRaisesALowPriority) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 1}, .aging_s = 0.05});
  bench.submit(tokens(10, 1), 5, [](Request& r) { r.priority = 3; });
  const Record& low = bench.submit(tokens(10, 2), 5);
  // A new urgent request whenever one has ended.
  for (int i = 3; low.ended == 0 && i < 200; ++i) {
    bench.submit(tokens(10, i), 5, [](Request& r) { r.priority = 3; });
    bench.run_until([&] { return bench.unfinished() < 3; });
  }
  EXPECT_EQ(low.ended, 1);
  EXPECT_GT(low.outcome.queue_s, 0.1);
  ASSERT_TRUE(bench.run_all());
}

TEST(SchedulerLife, CancelsWithinOneIteration) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 1}});
  const Record& running = bench.submit(tokens(50, 1), 50);
  const Record& waiting = bench.submit(tokens(50, 2), 50);
  for (int i = 0; i < 5; ++i) bench.run_once();
  bench.scheduler->cancel(running.id);
  bench.scheduler->cancel(waiting.id);
  bench.scheduler->cancel(12345);
  bench.run_once();
  EXPECT_EQ(running.outcome.phase, Phase::kCancelled);
  EXPECT_EQ(waiting.outcome.phase, Phase::kCancelled);
  EXPECT_EQ(waiting.phases, std::vector<Phase>{Phase::kCancelled});
  EXPECT_EQ(running.answer.size(), 5U);
  // What was computed stays: the prompt and four of the answer's tokens.
  EXPECT_EQ(bench.scheduler->stats().idle_cells, 54);
  bench.scheduler->cancel(running.id);
  EXPECT_EQ(bench.run_once(), Activity::kIdle);
  EXPECT_EQ(bench.scheduler->stats().cancelled, 2U);
}

TEST(SchedulerLife, ASamplersErrorEndsItsRequestAlone) {
  Bench bench;
  const Record& bad = bench.submit(tokens(10, 1), 10, [](Request& r) {
    r.next = [](std::span<const float>) -> Result<NextToken> {
      return invalid_argument("no token fits the grammar");
    };
  });
  const Record& good = bench.submit(tokens(10, 2), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(bad.outcome.phase, Phase::kFailed);
  EXPECT_EQ(bad.outcome.status.code(), Code::kInvalidArgument);
  EXPECT_EQ(good.answer, bench.expected(good));
}

TEST(SchedulerLife, AFailedStepFailsOnlyItsCause) {
  Bench bench;
  const Record& before = bench.submit(tokens(10, 1), 30);
  Tokens poisoned = tokens(100, 2);
  poisoned[90] = kPoison;  // in its second step
  const Record& bad = bench.submit(poisoned, 10);
  const Record& after = bench.submit(tokens(10, 3), 30);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(bad.outcome.status.code(), Code::kInternal);
  EXPECT_TRUE(bad.answer.empty());
  EXPECT_EQ(before.answer, bench.expected(before));
  EXPECT_EQ(after.answer, bench.expected(after));
  // What it left is not trusted.
  EXPECT_EQ(bench.scheduler->stats().resident.size(), 2U);
}

TEST(SchedulerLife, TriesAgainWhenADeviceIsBusy) {
  Bench bench;
  const Record& record = bench.submit(tokens(10), 3);
  bench.executor.next_step_status = unavailable("busy");
  bench.run_once();
  bench.executor.next_step_status = unavailable("busy");
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer, bench.expected(record));
  EXPECT_EQ(bench.scheduler->stats().failed_steps, 2U);
}

TEST(SchedulerLife, GivesUpOnADeviceThatStaysBusy) {
  FakeOptions fake;
  fake.fail_step = 1;
  Bench bench(fake);
  const Record& record = bench.submit(tokens(10), 3);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.outcome.status.code(), Code::kUnavailable);
}

// Three stages: three steps in flight of different requests, each request in one at a time.
TEST(SchedulerSteps, AreInFlightTogether) {
  FakeOptions fake;
  fake.in_flight = 3;
  Bench bench(fake);
  std::vector<Record*> records;
  for (int32_t i = 0; i < 6; ++i) records.push_back(&bench.submit(tokens(5, i + 1), 8));
  bench.run_once();
  EXPECT_EQ(bench.executor.most_in_flight, 3U);
  // Two requests in each, and one step has ended.
  ASSERT_EQ(bench.executor.trace.steps.size(), 1U);
  EXPECT_EQ(bench.executor.trace.steps[0], (std::vector<int64_t>{5, 5}));
  bench.run_all();
  for (const Record* record : records) EXPECT_EQ(record->answer, bench.expected(*record));
}

TEST(SchedulerSteps, OneRequestHasOneAtATime) {
  FakeOptions fake;
  fake.in_flight = 3;
  Bench bench(fake);
  const Record& record = bench.submit(tokens(5), 8);
  bench.run_all();
  EXPECT_EQ(bench.executor.most_in_flight, 0U);
  EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerSteps, ARequestIsCancelledInFlight) {
  FakeOptions fake;
  fake.in_flight = 2;
  Bench bench(fake);
  std::vector<Record*> records;
  for (int32_t i = 0; i < 4; ++i) records.push_back(&bench.submit(tokens(5, i + 1), 8));
  for (int i = 0; i < 3; ++i) bench.run_once();
  for (const size_t gone : {size_t{0}, size_t{2}}) bench.scheduler->cancel(records[gone]->id);
  bench.run_once();
  for (size_t i = 0; i < 4; ++i) {
    const bool gone = i % 2 == 0;
    EXPECT_EQ(records[i]->outcome.status.code() == Code::kCancelled, gone) << i;
    EXPECT_EQ(records[i]->ended, gone ? 1 : 0) << i;
  }
  bench.run_all();
  for (const size_t i : {size_t{1}, size_t{3}}) {
    EXPECT_EQ(records[i]->answer, bench.expected(*records[i]));
  }
}

// Those in the failed step are tried alone, and those in the other steps notice nothing.
TEST(SchedulerSteps, OneFailsInFlight) {
  FakeOptions fake;
  fake.in_flight = 2;
  Bench bench(fake);
  Tokens poisoned = tokens(5, 1);
  poisoned[3] = kPoison;
  std::vector<Record*> records = {&bench.submit(poisoned, 8)};
  for (int32_t i = 1; i < 4; ++i) records.push_back(&bench.submit(tokens(5, i + 1), 8));
  bench.run_all();
  EXPECT_EQ(records[0]->outcome.status.code(), Code::kInternal);
  for (size_t i = 1; i < 4; ++i) {
    EXPECT_EQ(records[i]->answer, bench.expected(*records[i])) << i;
  }
}

TEST(SchedulerSteps, OneThatDoesNotBeginIsTriedAgain) {
  FakeOptions fake;
  fake.in_flight = 2;
  Bench bench(fake);
  std::vector<Record*> records;
  for (int32_t i = 0; i < 4; ++i) records.push_back(&bench.submit(tokens(5, i + 1), 8));
  bench.run_once();
  bench.executor.next_begin_status = unavailable("busy");
  bench.run_all();
  EXPECT_FALSE(bench.executor.next_begin_status.has_value());
  for (const Record* record : records) EXPECT_EQ(record->answer, bench.expected(*record));
}

TEST(SchedulerLife, DrainFinishesWhatIsThere) {
  Bench bench;
  const Record& record = bench.submit(tokens(10), 10);
  bench.scheduler->drain();
  EXPECT_EQ(bench.refusal(tokens(10), 10).code(), Code::kUnavailable);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerLife, StopAllEndsEverything) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 1}});
  const Record& running = bench.submit(tokens(10, 1), 100);
  const Record& waiting = bench.submit(tokens(10, 2), 100);
  for (int i = 0; i < 3; ++i) bench.run_once();
  bench.scheduler->stop_all(unavailable("the server stops"));
  bench.run_once();
  EXPECT_EQ(running.outcome.status.message(), "the server stops");
  EXPECT_EQ(waiting.outcome.phase, Phase::kFailed);
  EXPECT_EQ(bench.run_once(), Activity::kIdle);
  EXPECT_EQ(bench.refusal(tokens(10), 10).code(), Code::kUnavailable);
}

TEST(SchedulerLife, TheDestructorEndsWhatIsLeft) {
  Bench bench;
  bench.submit(tokens(100, 1), 10);
  bench.run_once();
  bench.submit(tokens(100, 2), 10, [&](Request& r) {
    r.on_done = [done = r.on_done, scheduler = bench.scheduler.get()](const Outcome& outcome) {
      done(outcome);
      Request another;
      another.tokens = {1};
      another.max_new_tokens = 0;
      EXPECT_EQ(scheduler->submit(std::move(another)).code(), Code::kUnavailable);
    };
  });
}

TEST(SchedulerLife, OnDoneMaySubmitAndFindsTheState) {
  Bench bench;
  const Record* second = nullptr;
  bench.submit(tokens(100), 0, [&](Request& r) {
    r.next = nullptr;
    r.on_done = [&, done = r.on_done](const Outcome& outcome) {
      done(outcome);
      second = &bench.submit(tokens(110), 5);
    };
  });
  ASSERT_TRUE(bench.run_all());
  ASSERT_NE(second, nullptr);
  EXPECT_EQ(second->outcome.resident_tokens, 100);
  EXPECT_EQ(second->answer, bench.expected(*second));
}

TEST(SchedulerLife, RefusesBadOptions) {
  testing::FakeExecutor executor({});
  auto refused = [&](const SchedulerOptions& options) {
    return Scheduler::create(executor, options).status().code() == Code::kInvalidArgument;
  };
  EXPECT_TRUE(refused({.batch = {.max_step_tokens = 8, .max_sequences = 9}}));
  EXPECT_TRUE(refused({.batch = {.max_step_tokens = 8, .max_sequences = 0}}));
  EXPECT_TRUE(refused({.restore = {.share = 0}}));
  EXPECT_TRUE(refused({.restore = {.idle_slice_s = -1}}));
  EXPECT_TRUE(refused({.max_restores = 0}));
  EXPECT_TRUE(refused({.max_queued = 0}));
  EXPECT_FALSE(refused({}));
}

TEST(SchedulerLife, NamesItsPhases) {
  EXPECT_EQ(phase_name(Phase::kQueued), "queued");
  EXPECT_EQ(phase_name(Phase::kFailed), "failed");
  EXPECT_EQ(eviction_reason_name(EvictionReason::kSlots), "slots");
}

}  // namespace
}  // namespace hcache::scheduler
