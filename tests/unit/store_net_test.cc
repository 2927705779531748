// What the remote tiers share: the circuit breaker, the queue of calls and the account of
// background work.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "base_testing.h"
#include "net/breaker.h"
#include "net/call_queue.h"
#include "net/tier_account.h"

namespace hcache::store {
namespace {

// ---- Breaker ------------------------------------------------------------------------------------

constexpr Breaker::Limits kLimits = {
    .unanswered = 2, .first_pause_ns = 100, .longest_pause_ns = 350, .probe_ns = 40};

TEST(Breaker, OpensAfterSoManyRequestsWithoutAnAnswer) {
  Breaker breaker(kLimits);
  EXPECT_FALSE(breaker.open());
  EXPECT_FALSE(breaker.unanswered(10));
  EXPECT_TRUE(breaker.unanswered(10));
  EXPECT_FALSE(breaker.open());  // the caller trips it, who knows more
  EXPECT_TRUE(breaker.trip(20));
  EXPECT_TRUE(breaker.open());
  // What was in flight then changes nothing.
  EXPECT_FALSE(breaker.unanswered(10));
  EXPECT_FALSE(breaker.lost());
}

TEST(Breaker, AnAnswerToAnotherRequestSaysThatItIsThere) {
  Breaker breaker(kLimits);
  EXPECT_FALSE(breaker.unanswered(10));
  breaker.answered(15);
  EXPECT_FALSE(breaker.unanswered(20));  // the first of two again
  breaker.answered(30);
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(breaker.unanswered(25));  // slow is not gone
  EXPECT_FALSE(breaker.lost());
  EXPECT_TRUE(breaker.lost());
}

TEST(Breaker, WhatWasGivenUpTooSoonSaysNothing) {
  Breaker::Limits limits = kLimits;
  limits.least_wait_ns = 50;
  Breaker breaker(limits);
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(breaker.given_up(10, 59));
  EXPECT_FALSE(breaker.given_up(10, 60));
  EXPECT_TRUE(breaker.given_up(20, 90));
}

TEST(Breaker, ProbesInPausesThatDoubleUntilOneIsAnswered) {
  Breaker breaker(kLimits);
  std::int64_t now = 1000;
  breaker.trip(now);
  for (const std::int64_t pause : {100, 200, 350, 350}) {
    EXPECT_FALSE(breaker.probe_due(now + pause - 1)) << pause;
    now += pause;
    ASSERT_TRUE(breaker.probe_due(now)) << pause;
    breaker.probe_begins(now);
    EXPECT_TRUE(breaker.probing());
    EXPECT_FALSE(breaker.probe_due(now + 1000));  // one at a time
    EXPECT_FALSE(breaker.probe_overdue(now + 39));
    now += 40;
    EXPECT_TRUE(breaker.probe_overdue(now));
    EXPECT_FALSE(breaker.trip(now));  // it was open
    EXPECT_FALSE(breaker.probing());
  }
  breaker.probe_begins(now);
  EXPECT_TRUE(breaker.close());
  EXPECT_FALSE(breaker.open());
  EXPECT_FALSE(breaker.probing());
  EXPECT_FALSE(breaker.close());
  // The pauses begin anew.
  breaker.trip(now);
  EXPECT_TRUE(breaker.probe_due(now + 100));
}

TEST(Breaker, ManyFailuresDoNotOverflowThePause) {
  Breaker breaker(kLimits);
  for (int i = 0; i < 1000; ++i) breaker.trip(0);
  EXPECT_FALSE(breaker.probe_due(349));
  EXPECT_TRUE(breaker.probe_due(350));
}

// ---- CallQueue ----------------------------------------------------------------------------------

struct Numbered : QueuedCall {
  Numbered(int n, std::int64_t deadline) : number(n) { deadline_ns = deadline; }
  int number;
};
using Queue = CallQueue<Numbered>;

std::vector<int> numbers(const std::vector<Queue::Ptr>& calls) {
  std::vector<int> out;
  for (const auto& call : calls) out.push_back(call->number);
  return out;
}

std::vector<Queue::Ptr> taken(Queue& queue) {
  std::vector<Queue::Ptr> fresh;
  EXPECT_TRUE(queue.take(&fresh));
  return fresh;
}

TEST(CallQueue, HandsOverInOrderAndWakesOnce) {
  Queue queue;
  EXPECT_TRUE(queue.push(std::make_shared<Numbered>(1, 10)));
  EXPECT_FALSE(queue.push(std::make_shared<Numbered>(2, 10)));
  EXPECT_TRUE(queue.empty());  // nothing was taken yet
  EXPECT_EQ(numbers(taken(queue)), (std::vector<int>{1, 2}));
  EXPECT_FALSE(queue.empty());
  EXPECT_TRUE(queue.push(std::make_shared<Numbered>(3, 10)));
}

TEST(CallQueue, EveryCallIsLateOnceOrForgotten) {
  Queue queue;
  for (int n = 0; n < 3; ++n) (void)queue.push(std::make_shared<Numbered>(n, 10 * (n + 1)));
  const auto calls = taken(queue);
  EXPECT_TRUE(queue.take_late(9).empty());
  calls[1]->finished = true;
  EXPECT_EQ(numbers(queue.take_late(25)), std::vector<int>{0});
  EXPECT_EQ(numbers(queue.take_late(30)), std::vector<int>{2});
  EXPECT_TRUE(queue.empty());
}

TEST(CallQueue, WhatIsTriedAgainWaitsItsTime) {
  Queue queue;
  for (int n = 0; n < 3; ++n) (void)queue.push(std::make_shared<Numbered>(n, 1000));
  const auto calls = taken(queue);
  EXPECT_EQ(queue.nap_ns(0, 500), 500);
  queue.again(calls[0], 70);
  queue.again(calls[1], 50);
  queue.again(calls[2], 60);
  EXPECT_EQ(queue.nap_ns(10, 500), 40);
  calls[2]->finished = true;  // nobody waits for that one any more
  EXPECT_TRUE(queue.take_due(49).empty());
  EXPECT_EQ(numbers(queue.take_due(65)), std::vector<int>{1});
  EXPECT_EQ(queue.nap_ns(100, 500), 0);
  EXPECT_EQ(numbers(queue.take_due(100)), std::vector<int>{0});
  EXPECT_EQ(queue.nap_ns(100, 500), 500);
}

TEST(CallQueue, AtTheEndNothingIsLeftBehind) {
  Queue queue;
  for (int n = 0; n < 4; ++n) (void)queue.push(std::make_shared<Numbered>(n, 1000));
  auto calls = taken(queue);
  queue.again(calls[0], 50);
  calls[1]->finished = true;
  (void)queue.push(std::make_shared<Numbered>(4, 1000));
  queue.stop();
  std::vector<Queue::Ptr> fresh;
  EXPECT_FALSE(queue.take(&fresh));
  EXPECT_EQ(numbers(queue.take_all()), (std::vector<int>{0, 2, 3, 4}));
  EXPECT_TRUE(queue.empty());
  EXPECT_TRUE(queue.take_due(1000).empty());
}

TEST(CallQueue, ManyThreadsHandOverToOne) {
  Queue queue;
  constexpr int kThreads = 4;
  constexpr int kEach = 500;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&queue, t] {
      for (int i = 0; i < kEach; ++i) {
        (void)queue.push(std::make_shared<Numbered>(t * kEach + i, 1));
      }
    });
  }
  std::vector<Queue::Ptr> all;
  while (all.size() < kThreads * kEach / 2) (void)queue.take(&all);
  for (std::thread& thread : threads) thread.join();
  (void)queue.take(&all);
  ASSERT_EQ(all.size(), static_cast<std::size_t>(kThreads) * kEach);
  std::vector<int> last(kThreads, -1);
  for (const auto& call : all) {
    int& before = last[static_cast<std::size_t>(call->number / kEach)];
    EXPECT_GT(call->number, before);  // each thread's own order stays
    before = call->number;
  }
}

// ---- TierAccount --------------------------------------------------------------------------------

TEST(TierAccount, LimitsWhatWaitsToBeWritten) {
  TierAccount account(Env::real(), "the store", 100);
  EXPECT_TRUE(account.accept(2, 60, true));
  EXPECT_FALSE(account.accept(3, 41, true));
  EXPECT_TRUE(account.accept(1, 40, true));
  EXPECT_FALSE(account.accept(4, 0, false));  // it does not answer
  EXPECT_EQ(account.stat(true).pages_skipped, 7U);
  EXPECT_EQ(account.stat(true).backlog_bytes, 100U);
  account.written(2, 60);
  account.dropped(40);
  const RemoteStat stat = account.stat(false);
  EXPECT_EQ(stat.backlog_bytes, 0U);
  EXPECT_EQ(stat.pages_written, 2U);
  EXPECT_EQ(stat.bytes_written, 60U);
  EXPECT_EQ(stat.name, "the store");
  EXPECT_FALSE(stat.available);
}

TEST(TierAccount, CountsFailuresAsTheyAreMeant) {
  TierAccount account(Env::real(), "the store", 100);
  const auto work = [&](const Status& status) {
    account.begin();
    account.end(status);
  };
  const auto read = [&](const Status& status) {
    account.begin_read();
    account.end_read(status, 10);
  };
  work({});
  work(cancelled("the end"));
  read({});
  read(not_found("gone"));
  read(cancelled("the end"));
  EXPECT_EQ(account.stat(true).failures, 0U);
  EXPECT_EQ(account.stat(true).pages_read, 1U);
  EXPECT_EQ(account.stat(true).bytes_read, 10U);
  work(not_found("no bucket"));
  work(unavailable("nobody"));
  read(unavailable("nobody"));
  read(data_loss("damaged"));
  EXPECT_EQ(account.stat(true).failures, 4U);
}

TEST(TierAccount, FlushWaitsForTheLastPieceOfWork) {
  TierAccount account(Env::real(), "the store", 100);
  EXPECT_OK(account.flush(0));
  account.begin();
  ASSERT_TRUE(account.accept(1, 30, true));
  const Status late = account.flush(Env::real().monotonic_ns());
  EXPECT_EQ(late.code(), Code::kUnavailable);
  EXPECT_THAT(late.message(), ::testing::HasSubstr("30 bytes"));
  EXPECT_THAT(late.message(), ::testing::HasSubstr("the store"));
  std::thread other([&] {
    account.begin();  // what follows from a piece begins before it ends
    account.end({});
    account.end({});
  });
  EXPECT_OK(account.flush(Env::real().monotonic_ns() + 600'000'000'000));
  EXPECT_EQ(account.stat(true).backlog_requests, 0U);
  other.join();
}

}  // namespace
}  // namespace hcache::store
