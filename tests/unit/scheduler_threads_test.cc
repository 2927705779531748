// Submission, cancellation and statistics from other threads while the owner runs.
#include <thread>

#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using hcache::test::expect_to_end;
using hcache::test::Patience;
using testing::FakeExecutor;
using testing::hash_of;
using testing::next_token;
using testing::tokens;

TEST(SchedulerThreads, ManySubmitCancelAndWatch) {
  constexpr int kThreads = 4;
  constexpr int kRequests = 100;
  FakeExecutor executor({});
  auto scheduler = Scheduler::create(executor, {.max_queued = kThreads * kRequests}).value();
  std::atomic<int> ended = 0;
  std::atomic<int> done = 0;
  std::atomic<uint64_t> tokens_seen = 0;

  auto submitter = [&](int thread) {
    for (int i = 0; i < kRequests; ++i) {
      Request request;
      request.tokens = tokens(1 + i % 50, thread * kRequests + i);
      request.max_new_tokens = 5;
      request.key = std::to_string(thread);
      request.next = [&](std::span<const float> logits) -> Result<NextToken> {
        ++tokens_seen;
        return next_token(hash_of(logits), 0);
      };
      request.on_done = [&](const Outcome& outcome) {
        ++ended;
        if (outcome.status.ok()) ++done;
      };
      const Result<RequestId> id = scheduler->submit(std::move(request));
      ASSERT_TRUE(id.ok());
      if (i % 7 == 0) scheduler->cancel(*id);
      const Snapshot stats = scheduler->stats();
      EXPECT_LE(stats.active_cells + stats.idle_cells, stats.arena_cells);
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(submitter, thread);
  Patience patience("the end of all requests");
  while (ended < kThreads * kRequests && patience.lasts()) {
    if (scheduler->run_once() != Activity::kIdle) {
      executor.pass(1e-4);
    } else {
      scheduler->wait_for_work(10'000'000);
    }
  }
  for (std::thread& thread : threads) thread.join();
  const Snapshot stats = scheduler->stats();
  EXPECT_EQ(stats.submitted, static_cast<uint64_t>(kThreads * kRequests));
  EXPECT_EQ(stats.done, static_cast<uint64_t>(done));
  EXPECT_EQ(stats.done + stats.cancelled, stats.submitted);
  EXPECT_GE(tokens_seen, 5 * stats.done);
  EXPECT_EQ(scheduler->queued() + scheduler->running(), 0);
}

TEST(SchedulerThreads, WaitingEndsWithWorkOrAWake) {
  FakeExecutor executor({});
  auto scheduler = Scheduler::create(executor, {}).value();
  constexpr int64_t kLongNs = 3'600'000'000'000;
  EXPECT_FALSE(scheduler->wait_for_work(1000));
  scheduler->wake();
  expect_to_end("waiting after a wake", [&] { EXPECT_TRUE(scheduler->wait_for_work(kLongNs)); });
  EXPECT_EQ(scheduler->run_once(), Activity::kIdle);
  std::thread submitter([&] {
    Request request;
    request.tokens = tokens(10);
    request.max_new_tokens = 0;
    EXPECT_TRUE(scheduler->submit(std::move(request)).ok());
  });
  // A wake-up may be spurious, so it may take several waits.
  expect_to_end("waiting for work that came", [&] {
    while (!scheduler->wait_for_work(kLongNs)) {
    }
  });
  submitter.join();
  EXPECT_EQ(scheduler->run_once(), Activity::kWorked);
  EXPECT_EQ(scheduler->stats().done, 1U);
}

}  // namespace
}  // namespace hcache::scheduler
