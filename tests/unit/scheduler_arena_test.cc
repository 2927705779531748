// The arena: what stays resident and who may go on from it, eviction, preemption.
#include <gmock/gmock.h>

#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using testing::Bench;
using testing::FakeOptions;
using testing::Record;
using testing::tokens;
using testing::Tokens;
using testing::operator+;
using ::testing::Contains;
using ::testing::ElementsAre;

Tokens conversation(const Record& record, const Tokens& message) {
  return record.prompt + record.answer + message;
}

FakeOptions small_arena(int64_t cells) {
  FakeOptions fake;
  fake.limits.arena_cells = cells;
  return fake;
}

uint64_t evictions(const Bench& bench, EvictionReason reason) {
  return bench.scheduler->stats().evictions.at(static_cast<size_t>(reason));
}

// ---- Reuse

TEST(SchedulerReuse, TheNextTurnGoesOnInPlace) {
  Bench bench;
  const Record& first = bench.submit(tokens(100), 20);
  ASSERT_TRUE(bench.run_all());
  bench.executor.calls.clear();
  const Record& second = bench.submit(conversation(first, tokens(70, 2)), 20);
  ASSERT_TRUE(bench.run_all());
  EXPECT_TRUE(bench.executor.calls.empty());  // nothing created, trimmed or restored
  EXPECT_EQ(second.outcome.resident_tokens, 119);
  EXPECT_EQ(second.outcome.new_tokens, 71);
  EXPECT_EQ(second.answer, bench.expected(second));
}

TEST(SchedulerReuse, TheSameAgainComputesTheLastToken) {
  Bench bench;
  bench.submit(tokens(100), 20);
  ASSERT_TRUE(bench.run_all());
  const Record& again = bench.submit(tokens(100), 20);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(bench.executor.calls, Contains("trim 99"));
  EXPECT_EQ(again.outcome.resident_tokens, 99);
  EXPECT_EQ(again.outcome.new_tokens, 1);
  EXPECT_EQ(again.answer, bench.expected(again));
}

TEST(SchedulerReuse, AnotherConversationForksTheCommonBeginning) {
  Bench bench;
  const Tokens system = tokens(100);
  const Record& first = bench.submit(system + tokens(80, 2), 20);
  ASSERT_TRUE(bench.run_all());
  const Record& other = bench.submit(system + tokens(30, 3), 20);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(bench.executor.calls, Contains("fork 100"));
  EXPECT_EQ(other.outcome.resident_tokens, 100);
  EXPECT_EQ(other.answer, bench.expected(other));
  // The first one is still there.
  const Record& next = bench.submit(conversation(first, tokens(10, 4)), 20);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(next.outcome.resident_tokens, 199);
}

TEST(SchedulerReuse, AnEditedMessageTrims) {
  Bench bench;
  const Tokens system = tokens(100);
  bench.submit(system + tokens(20, 2), 10);
  ASSERT_TRUE(bench.run_all());
  const Record& edited = bench.submit(system + tokens(20, 3), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_THAT(bench.executor.calls, Contains("trim 100"));
  EXPECT_EQ(edited.answer, bench.expected(edited));
}

// Layers see a window, and what lies before it is gone.
TEST(SchedulerReuse, WhatLeavesAConversationTooEarlyIsRestored) {
  Bench bench;
  bench.executor.options().window = 60;
  const Tokens system = tokens(100);
  const Record& begun = bench.submit(system + tokens(100, 2), 10);
  ASSERT_TRUE(bench.run_all());
  bench.executor.save(begun.salt, begun.prompt);
  const Record& early = bench.submit(system + tokens(20, 3), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(early.outcome.resident_tokens, 0);
  EXPECT_EQ(early.outcome.restores.size(), 1U);
  EXPECT_EQ(early.answer, bench.expected(early));
  // The first one is still there, and a late edit goes on in place.
  Tokens late = conversation(begun, {});
  late.resize(late.size() - 40);
  const auto n_kept = static_cast<int64_t>(late.size());
  const Record& edited = bench.submit(late + tokens(20, 4), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(edited.outcome.resident_tokens, n_kept);
  EXPECT_EQ(edited.answer, bench.expected(edited));
}

TEST(SchedulerReuse, ContinuationsOfOnePromptPrefillItOnce) {
  Bench bench;
  for (int i = 0; i < 4; ++i) bench.submit(tokens(200), 10);
  ASSERT_TRUE(bench.run_all());
  // Once so little is missing that waiting for it is not worth while.
  EXPECT_EQ(std::count(bench.executor.calls.begin(), bench.executor.calls.end(), "fork 192"), 3);
  EXPECT_EQ(std::count(bench.executor.calls.begin(), bench.executor.calls.end(), "create"), 1);
  EXPECT_EQ(bench.scheduler->stats().prefill_rows, 200U + 3 * 8);
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerReuse, AWaitingContinuationSurvivesTheFirstOnesCancellation) {
  Bench bench;
  const Record& first = bench.submit(tokens(200), 10);
  const Record& second = bench.submit(tokens(200), 10);
  bench.run_once();
  bench.scheduler->cancel(first.id);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(second.outcome.resident_tokens, 64);
  EXPECT_EQ(second.answer, bench.expected(second));
}

TEST(SchedulerReuse, ForksFromARunningRequest) {
  Bench bench;
  const Record& running = bench.submit(tokens(100), 100);
  for (int i = 0; i < 10; ++i) bench.run_once();
  const Record& other = bench.submit(tokens(100) + tokens(5, 2), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(other.outcome.resident_tokens, 100);
  EXPECT_EQ(running.answer, bench.expected(running));
  EXPECT_EQ(other.answer, bench.expected(other));
}

TEST(SchedulerReuse, SaltsNeverShare) {
  Bench bench;
  auto salt = [](Request& r) { r.salt = own_salt("b"); };
  bench.submit(tokens(200), 10);
  ASSERT_TRUE(bench.run_all());
  const Record& other = bench.submit(tokens(200), 10, salt);
  const Record& same = bench.submit(tokens(200), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(other.outcome.resident_tokens, 0);
  EXPECT_EQ(other.outcome.new_tokens, 200);
  EXPECT_EQ(same.outcome.resident_tokens, 199);
  EXPECT_NE(other.answer, same.answer);
  EXPECT_EQ(other.answer, bench.expected(other));
}

TEST(SchedulerReuse, WhatMustNotBeSavedStaysApart) {
  Bench bench;
  bench.submit(tokens(200), 10);
  ASSERT_TRUE(bench.run_all());
  const Record& secret =
      bench.submit(tokens(200) + tokens(50, 2), 10, [](Request& r) { r.save = false; });
  ASSERT_TRUE(bench.run_all());
  // Forked off what is saved, as a sequence that is not; never the other way round.
  EXPECT_EQ(secret.outcome.resident_tokens, 200);
  EXPECT_EQ(secret.outcome.saving_tokens, 0);
  EXPECT_EQ(secret.answer, bench.expected(secret));
  const Record& saved = bench.submit(tokens(200) + tokens(50, 2) + tokens(9, 3), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_LE(saved.outcome.resident_tokens, 200);
  EXPECT_EQ(saved.outcome.saving_tokens, saved.outcome.new_tokens);
  EXPECT_EQ(saved.answer, bench.expected(saved));
}

TEST(SchedulerReuse, AFailedCopyIsComputed) {
  FakeOptions fake;
  fake.fail_copy = 1;
  Bench bench(fake);
  bench.submit(tokens(100) + tokens(200, 2), 10);
  ASSERT_TRUE(bench.run_all());
  const Record& fork = bench.submit(tokens(100) + tokens(50, 3), 10);
  ASSERT_TRUE(bench.run_all());
  const Record& trim = bench.submit(tokens(100) + tokens(50, 3), 10);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(fork.outcome.resident_tokens, 0);
  EXPECT_EQ(fork.answer, bench.expected(fork));
  EXPECT_EQ(trim.answer, bench.expected(trim));
  EXPECT_EQ(bench.scheduler->stats().resident.size(), 2U);  // the one that failed to trim is gone
}

// ---- Eviction

TEST(SchedulerEviction, TheLeastRecentlyUsedGoesFirst) {
  Bench bench(small_arena(330));
  for (int i = 1; i <= 3; ++i) {
    bench.submit(tokens(100, i), 1);
    ASSERT_TRUE(bench.run_all());
    bench.executor.pass(0.1);
  }
  bench.submit(tokens(100, 1) + tokens(3, 9), 1);  // the first one is used again
  ASSERT_TRUE(bench.run_all());
  bench.executor.pass(0.1);
  bench.submit(tokens(100, 4), 1);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(evictions(bench, EvictionReason::kGrowth), 1U);
  EXPECT_EQ(bench.scheduler->stats().evicted_unsaved, 0U);
  std::vector<int64_t> resident;
  for (const auto& [id, sequence] : bench.executor.sequences()) {
    resident.push_back(sequence.tokens[0]);
  }
  EXPECT_THAT(resident, ElementsAre(1, 3, 4));
}

TEST(SchedulerEviction, WhatTheQueueWantsGoesLast) {
  using policy::EvictPolicy;
  for (const EvictPolicy evict :
       {EvictPolicy::kSchedulerAware, EvictPolicy::kCarScore, EvictPolicy::kLru}) {
    const bool look_ahead = evict != EvictPolicy::kLru;
    Bench bench(small_arena(330), {.batch = {.max_sequences = 1}, .evict = evict});
    for (int i = 1; i <= 3; ++i) {
      bench.submit(tokens(100, i), 1);
      ASSERT_TRUE(bench.run_all());
      bench.executor.pass(0.1);
    }
    bench.submit(tokens(100, 4), 1);  // needs the room of one
    const Record& back = bench.submit(tokens(100, 1) + tokens(3, 9), 1);
    ASSERT_TRUE(bench.run_all());
    EXPECT_EQ(back.outcome.resident_tokens == 100, look_ahead);
    EXPECT_EQ(back.answer, bench.expected(back));
  }
}

TEST(SchedulerEviction, OffloadsWhatIsDurableBeforeRoomIsWanted) {
  FakeOptions fake = small_arena(330);
  fake.flush_s = 5;
  Bench bench(fake, {.batch = {.max_sequences = 1}, .offload_above = 0.5});
  bench.submit(tokens(100, 1), 1);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(bench.executor.free_cells(), 230);
  bench.submit(tokens(100, 2), 1);
  ASSERT_TRUE(bench.run_all());
  bench.scheduler->run_once();
  EXPECT_EQ(evictions(bench, EvictionReason::kOffload), 0U);  // neither is durable yet
  bench.executor.pass(10);
  bench.scheduler->run_once();
  EXPECT_EQ(evictions(bench, EvictionReason::kOffload), 1U);
  EXPECT_EQ(bench.executor.free_cells(), 230);  // one is enough
  const Record& back = bench.submit(tokens(100, 2) + tokens(3, 9), 1);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(back.outcome.resident_tokens, 100);
  EXPECT_EQ(bench.scheduler->stats().evicted_unsaved, 0U);
}

// ---- Chores

TEST(SchedulerChores, WaitUntilNothingElseIsToBeDone) {
  Bench bench;
  bench.submit(tokens(50), 1);
  ASSERT_TRUE(bench.run_all());
  bench.executor.chores = {{bench.executor.sequences().begin()->first, 3}};
  EXPECT_EQ(bench.scheduler->run_once(), Activity::kWorked);
  bench.executor.calls.clear();
  bench.submit(tokens(40, 2), 30);  // as long as it runs, the executor would mind
  ASSERT_TRUE(bench.run_all());
  while (bench.scheduler->run_once() == Activity::kWorked) {
  }
  EXPECT_THAT(bench.executor.calls, ElementsAre("create", "chore", "chore"));
  EXPECT_EQ(bench.scheduler->run_once(), Activity::kIdle);
  bench.executor.chores.begin()->second = 1;
  bench.executor.chores_wait = true;
  EXPECT_EQ(bench.scheduler->run_once(), Activity::kWaiting);
  bench.executor.chores_wait = false;
  EXPECT_EQ(bench.scheduler->run_once(), Activity::kWorked);
}

TEST(SchedulerChores, AreFinishedWhereTheyLast) {
  Bench bench;
  bench.submit(tokens(50), 1);
  ASSERT_TRUE(bench.run_all());
  std::vector<double> done;
  const auto note = [&done](double fraction) {
    done.push_back(fraction);
    return done.size() < 4;
  };
  bench.executor.chores = {{bench.executor.sequences().begin()->first, 4}};
  bench.scheduler->finish_chores(note);
  EXPECT_THAT(done, ElementsAre(0, 0.25, 0.5, 0.75)) << "no more were wanted";
  EXPECT_EQ(bench.executor.chores.begin()->second, 1);
  bench.scheduler->finish_chores({});
  EXPECT_EQ(bench.executor.chores.begin()->second, 0);
  bench.executor.chores.begin()->second = 3;
  bench.executor.chores_last = false;
  bench.scheduler->finish_chores({});
  EXPECT_EQ(bench.executor.chores.begin()->second, 3) << "what goes with the process";
  bench.executor.chores_last = true;
  bench.submit(tokens(40, 2), 30);
  bench.scheduler->run_once();
  bench.scheduler->finish_chores({});
  EXPECT_EQ(bench.executor.chores.begin()->second, 3) << "something runs";
  ASSERT_TRUE(bench.run_all());
}

TEST(SchedulerChores, FindRoomWhereOthersAreSaved) {
  FakeOptions fake = small_arena(330);
  fake.flush_s = 5;
  Bench bench(fake);
  for (int i = 1; i <= 3; ++i) {
    bench.submit(tokens(100, i), 1);
    ASSERT_TRUE(bench.run_all());
  }
  const SeqId last = bench.executor.sequences().rbegin()->first;
  bench.executor.chores = {{last, 2}};
  bench.executor.chore_cells = 50;
  EXPECT_EQ(bench.scheduler->run_once(), Activity::kIdle) << "the others are not saved yet";
  EXPECT_EQ(bench.executor.chores.at(last), 2);
  bench.executor.pass(10);
  EXPECT_EQ(bench.scheduler->run_once(), Activity::kWorked);
  EXPECT_EQ(bench.executor.chores.at(last), 1);
  EXPECT_EQ(evictions(bench, EvictionReason::kChores), 1U);
  EXPECT_TRUE(bench.executor.sequences().contains(last));
  // Nothing goes for one that takes more than there would ever be.
  bench.executor.chore_cells = 300;
  for (int i = 0; i < 5; ++i) bench.scheduler->run_once();
  EXPECT_EQ(bench.executor.chores.at(last), 1);
  EXPECT_TRUE(bench.executor.sequences().contains(last));
}

TEST(SchedulerEviction, FlushesWhatIsNotDurableAndGoesOnMeanwhile) {
  FakeOptions fake = small_arena(300);
  fake.flush_s = 0.05;
  Bench bench(fake);
  const Record& running = bench.submit(tokens(50, 1), 100);
  const Record& first = bench.submit(tokens(150, 2), 1);
  bench.run_until([&] { return first.ended == 1; });
  const Record& second = bench.submit(tokens(140, 3), 5);
  const size_t before = running.answer.size();
  bench.run_until([&] { return second.ended == 1; });
  EXPECT_GT(running.answer.size(), before + 20);
  EXPECT_EQ(bench.scheduler->stats().evicted_unsaved, 0U);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(bench.scheduler->stats().preemptions, 0U);
  // What was evicted comes back from where it was saved.
  const Record& back = bench.submit(conversation(first, tokens(10, 4)), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(back.outcome.hidden_tokens + back.outcome.kv_tokens, 150);
  EXPECT_EQ(back.answer, bench.expected(back));
}

TEST(SchedulerEviction, WaitsForNoFlushWhenNothingIsSaved) {
  FakeOptions fake = small_arena(200);
  fake.saving = false;
  Bench bench(fake);
  bench.submit(tokens(150, 1), 1);
  ASSERT_TRUE(bench.run_all());
  const Record& second = bench.submit(tokens(150, 2), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(second.answer, bench.expected(second));
  EXPECT_EQ(bench.scheduler->stats().evicted_unsaved, 1U);
}

TEST(SchedulerEviction, AFlushThatHangsIsNotWaitedForForever) {
  FakeOptions fake = small_arena(200);
  fake.flush_hangs = true;
  Bench bench(fake, {.flush_wait_s = 2});
  bench.submit(tokens(150, 1), 1);
  ASSERT_TRUE(bench.run_all());
  const Record& second = bench.submit(tokens(150, 2), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(second.answer, bench.expected(second));
  EXPECT_NEAR(second.outcome.ttft_s, 2, 0.1);
  EXPECT_EQ(bench.scheduler->stats().evicted_unsaved, 1U);
}

TEST(SchedulerEviction, MakesASlotForANewSequence) {
  FakeOptions fake;
  fake.limits.max_sequences = 2;
  Bench bench(fake);
  for (int i = 1; i <= 4; ++i) {
    const Record& record = bench.submit(tokens(10, i), 3);
    ASSERT_TRUE(bench.run_all());
    EXPECT_EQ(record.answer, bench.expected(record));
  }
  EXPECT_EQ(evictions(bench, EvictionReason::kSlots), 2U);
}

TEST(SchedulerEviction, AForkWithoutASecondSlotTakesOver) {
  FakeOptions fake;
  fake.limits.max_sequences = 1;
  Bench bench(fake);
  bench.submit(tokens(100) + tokens(200, 2), 3);
  ASSERT_TRUE(bench.run_all());
  const Record& other = bench.submit(tokens(100) + tokens(20, 3), 3);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(other.outcome.resident_tokens, 100);
  EXPECT_EQ(other.answer, bench.expected(other));
}

TEST(SchedulerEviction, ARestoreEvictsForItsRows) {
  Bench bench(small_arena(300));
  bench.executor.save({}, tokens(200, 7));
  bench.submit(tokens(250, 1), 1);
  ASSERT_TRUE(bench.run_all());
  const Record& restored = bench.submit(tokens(200, 7) + tokens(20, 8), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(evictions(bench, EvictionReason::kAdmission), 1U);
  EXPECT_EQ(restored.answer, bench.expected(restored));
}

// ---- Preemption

TEST(SchedulerPreemption, TheYoungestGivesWayAndNeverNotices) {
  Bench bench(small_arena(200), {.decode_headroom = 4});
  const Record& first = bench.submit(tokens(60, 1), 120);
  const Record& second = bench.submit(tokens(60, 2), 120);
  const Record& third = bench.submit(tokens(30, 3), 20);
  ASSERT_TRUE(bench.run_all());
  EXPECT_TRUE(first.outcome.preempted_at_s.empty());
  EXPECT_FALSE(second.outcome.preempted_at_s.empty());
  EXPECT_LT(first.outcome.total_s, second.outcome.total_s);
  EXPECT_THAT(second.phases, Contains(Phase::kQueued));
  EXPECT_EQ(bench.scheduler->stats().preemptions,
            second.outcome.preempted_at_s.size() + third.outcome.preempted_at_s.size());
  for (const Record& record : bench.records()) {
    EXPECT_EQ(record.answer, bench.expected(record));
    EXPECT_EQ(record.outcome.new_tokens, record.outcome.prompt_tokens);
  }
}

TEST(SchedulerPreemption, IsNotNeededForWhatIsKnownWhenARequestArrives) {
  Bench bench(small_arena(200));
  const Record& first = bench.submit(tokens(150, 1), 5);
  bench.run_once();
  const Record& second = bench.submit(tokens(100, 2), 5);
  bench.run_once();
  EXPECT_EQ(bench.scheduler->queued(), 1);  // the rest of the first prompt is on its way
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(bench.scheduler->stats().preemptions, 0U);
  EXPECT_GT(second.outcome.queue_s, 0);
  EXPECT_EQ(first.answer, bench.expected(first));
  EXPECT_EQ(second.answer, bench.expected(second));
}

TEST(SchedulerPreemption, TheLowestPriorityGivesWay) {
  Bench bench(small_arena(200), {.decode_headroom = 4});
  const Record& low = bench.submit(tokens(60, 1), 120, [](Request& r) { r.priority = -1; });
  const Record& high = bench.submit(tokens(60, 2), 120);
  ASSERT_TRUE(bench.run_all());
  EXPECT_FALSE(low.outcome.preempted_at_s.empty());
  EXPECT_TRUE(high.outcome.preempted_at_s.empty());
  EXPECT_EQ(low.answer, bench.expected(low));
}

TEST(SchedulerPreemption, GoesOnInPlaceIfRoomComesSooner) {
  FakeOptions fake = small_arena(200);
  fake.flush_s = 0.2;
  Bench bench(fake, {.decode_headroom = 4});
  const Record& first = bench.submit(tokens(60, 1), 120);
  const Record& second = bench.submit(tokens(60, 2), 120);
  bench.run_until([&] { return bench.scheduler->stats().preemptions == 1; });
  bench.scheduler->cancel(first.id);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(second.answer, bench.expected(second));
  EXPECT_EQ(std::count(bench.executor.calls.begin(), bench.executor.calls.end(), "create"), 2);
}

TEST(SchedulerPreemption, WithoutSavingItIsRecomputed) {
  FakeOptions fake = small_arena(200);
  fake.saving = false;
  Bench bench(fake, {.decode_headroom = 4});
  for (int i = 1; i <= 4; ++i) bench.submit(tokens(50, i), 100);
  ASSERT_TRUE(bench.run_all());
  EXPECT_GT(bench.scheduler->stats().preemptions, 0U);
  EXPECT_GT(bench.scheduler->stats().evicted_unsaved, 0U);
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerPreemption, AnArenaThatLiesCostsNobodyAnything) {
  Bench bench;
  bench.submit(tokens(20, 1), 10);
  bench.run_once();
  bench.executor.save({}, tokens(200, 2));
  bench.submit(tokens(200, 2) + tokens(5, 3), 10);
  bench.run_once();
  bench.executor.next_step_status = resource_exhausted("fragmented");
  bench.run_once();
  EXPECT_EQ(bench.scheduler->stats().preemptions, 1U);
  ASSERT_TRUE(bench.run_all());
  for (const Record& record : bench.records()) EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerPreemption, AnArenaThatStaysFullFailsTheRequest) {
  Bench bench;
  bench.submit(tokens(20, 1), 1);
  ASSERT_TRUE(bench.run_all());
  bench.executor.pass(1);
  const Record& record = bench.submit(tokens(20, 2), 10);
  bench.executor.next_step_status = resource_exhausted("fragmented");
  bench.run_once();  // evicts the idle sequence
  EXPECT_EQ(record.ended, 0);
  bench.executor.next_step_status = resource_exhausted("fragmented");
  bench.run_once();
  EXPECT_EQ(record.outcome.status.code(), Code::kResourceExhausted);
}

// ---- Forgetting

std::vector<int64_t> rows_held(const Bench& bench) {
  std::vector<int64_t> rows;
  for (const auto& [id, sequence] : bench.executor.sequences()) {
    rows.push_back(static_cast<int64_t>(sequence.tokens.size()));
  }
  return rows;
}

TEST(SchedulerForget, AChainLeavesTheArenaAtOnce) {
  Bench bench;
  const Record& gone = bench.submit(tokens(100, 1), 20);
  bench.submit(tokens(80, 2), 20);
  bench.submit(tokens(100, 1), 20, [](Request& r) { r.salt = own_salt("other"); });
  ASSERT_TRUE(bench.run_all());
  bench.scheduler->forget({}, gone.prompt + gone.answer);
  EXPECT_EQ(rows_held(bench), (std::vector<int64_t>{119, 99, 119})) << "not before run_once()";
  EXPECT_EQ(bench.run_once(), Activity::kIdle);
  EXPECT_EQ(rows_held(bench), (std::vector<int64_t>{99, 119}));
  EXPECT_EQ(bench.scheduler->stats().idle_cells, 218);
}

TEST(SchedulerForget, LongerConversationsStay) {
  Bench bench;
  const Record& first = bench.submit(tokens(100), 20);
  ASSERT_TRUE(bench.run_all());
  const Tokens chain = first.prompt + first.answer;
  const Record& longer = bench.submit(conversation(first, tokens(70, 2)), 20);
  ASSERT_TRUE(bench.run_all());
  // The longer one is another conversation: it wants all of the first one's rows.
  bench.scheduler->forget({}, chain, static_cast<int64_t>(chain.size()));
  bench.run_once();
  EXPECT_EQ(rows_held(bench), std::vector<int64_t>{209});
  bench.scheduler->forget({}, longer.prompt + longer.answer, static_cast<int64_t>(chain.size()));
  bench.run_once();
  EXPECT_EQ(rows_held(bench), std::vector<int64_t>{120});
  const Record& again = bench.submit(conversation(first, tokens(30, 3)), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(again.outcome.resident_tokens, 120);
  EXPECT_EQ(again.answer, bench.expected(again));
}

TEST(SchedulerForget, WhatFollowsAForgottenChainGoesToo) {
  Bench bench;
  const Record& first = bench.submit(tokens(100), 20);
  ASSERT_TRUE(bench.run_all());
  bench.submit(conversation(first, tokens(70, 2)), 20);  // a turn that nobody remembers
  ASSERT_TRUE(bench.run_all());
  bench.scheduler->forget({}, first.prompt + first.answer);
  bench.run_once();
  EXPECT_TRUE(rows_held(bench).empty());
}

TEST(SchedulerForget, RowsOfRequestsInHandStay) {
  Bench bench({}, {.batch = {.max_step_tokens = 64, .max_sequences = 1}});
  const Record& first = bench.submit(tokens(100), 20);
  ASSERT_TRUE(bench.run_all());
  const Record& running = bench.submit(tokens(80, 2), 40);
  bench.run_once();
  const Record& queued = bench.submit(conversation(first, tokens(30, 3)), 5);
  bench.scheduler->forget({}, first.prompt + first.answer);
  bench.scheduler->forget({}, running.prompt);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(queued.outcome.resident_tokens, 119);
  EXPECT_EQ(queued.answer, bench.expected(queued));
  EXPECT_EQ(running.answer, bench.expected(running));
}

TEST(SchedulerForget, ASequenceThatCannotBeCutGoesAsAWhole) {
  FakeOptions fake;
  fake.fail_copy = 1;
  Bench bench(fake);
  const Record& record = bench.submit(tokens(100), 20);
  ASSERT_TRUE(bench.run_all());
  bench.scheduler->forget({}, record.prompt, 50);
  bench.run_once();
  EXPECT_TRUE(rows_held(bench).empty());
}

}  // namespace
}  // namespace hcache::scheduler
