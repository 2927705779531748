// Random workloads: conversations that grow, share prefixes, are cancelled, compete for a small
// arena, and meet failures. Whatever happens, every request ends once, with the answer it would
// have had alone.
#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using testing::Bench;
using testing::FakeOptions;
using testing::kVocab;
using testing::Record;
using testing::Tokens;

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}
  int64_t integer(int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(engine_);
  }
  bool coin(double p = 0.5) { return std::uniform_real_distribution<double>()(engine_) < p; }
  Tokens tokens(int64_t n) {
    Tokens result;
    for (int64_t i = 0; i < n; ++i) {
      result.push_back(static_cast<int32_t>(integer(0, kVocab - 1)));
    }
    return result;
  }

 private:
  std::mt19937 engine_;
};

FakeOptions random_fake(Random& random, uint32_t seed) {
  FakeOptions fake;
  fake.seed = seed;
  fake.limits.arena_cells = random.integer(80, 500);
  fake.limits.context = random.integer(60, 300);
  fake.limits.max_step_rows = static_cast<int32_t>(random.integer(8, 64));
  fake.limits.max_sequences = static_cast<int32_t>(random.integer(1, 12));
  fake.slice_rows = random.integer(4, 40);
  fake.restore_row_s = random.coin() ? 2e-5 : 3e-4;
  fake.io_start_s = random.coin() ? 0 : 2e-2;
  if (random.coin()) fake.follow_rows = random.integer(1, 60);
  fake.flush_s = random.coin() ? 1e-3 : 3e-2;
  fake.saving = random.coin(0.9);
  fake.flush_hangs = random.coin(0.05);
  fake.chore_parts = static_cast<int>(seed % 4);
  if (random.coin(0.4)) fake.in_flight = static_cast<int32_t>(random.integer(2, 4));
  return fake;
}

SchedulerOptions random_options(Random& random) {
  SchedulerOptions options;
  options.batch.max_sequences = static_cast<int32_t>(random.integer(1, 8));
  options.batch.max_step_tokens =
      static_cast<int32_t>(random.integer(options.batch.max_sequences, 64));
  options.restore.share = random.coin() ? 0.25 : 0.6;
  options.restore.exclusive = random.coin(0.2);
  options.restore.idle_slice_s = 5e-3;
  options.reuse.min_fork_tokens = random.integer(1, 30);
  options.reuse.cheap_tokens = random.integer(0, 20);
  options.max_restores = static_cast<int32_t>(random.integer(1, 4));
  options.decode_headroom = random.integer(0, 12);
  options.max_running_per_key = random.coin(0.3) ? 2 : 0;
  options.aging_s = random.coin() ? 0.05 : 30;
  options.evict = random.coin(0.5)   ? policy::EvictPolicy::kSchedulerAware
                  : random.coin(0.5) ? policy::EvictPolicy::kCarScore
                                     : policy::EvictPolicy::kLru;
  if (random.coin(0.3)) options.offload_above = 0.8;
  if (random.coin(0.5)) options.fetch = policy::FetchPolicy::kCarTimer;
  if (random.coin(0.3)) {
    options.queue = {.policy = policy::QueuePolicy::kCar,
                     .window = static_cast<int32_t>(random.integer(1, 8))};
  }
  options.flush_wait_s = 0.1;
  return options;
}

// A conversation that went before (cut short, or with its answer), and something new behind it.
Tokens random_prompt(Random& random, const Bench& bench, int64_t window) {
  Tokens prompt;
  if (!bench.records().empty() && random.coin(0.7)) {
    const auto& records = bench.records();
    const Record& earlier =
        records[static_cast<size_t>(random.integer(0, static_cast<int64_t>(records.size()) - 1))];
    prompt = earlier.prompt;
    if (random.coin(0.6)) {
      prompt.insert(prompt.end(), earlier.answer.begin(), earlier.answer.end());
    } else if (random.coin()) {
      prompt.resize(static_cast<size_t>(random.integer(1, static_cast<int64_t>(prompt.size()))));
    }
  }
  if (prompt.empty() || random.coin(0.8)) {
    const Tokens more = random.tokens(random.integer(1, 60));
    prompt.insert(prompt.end(), more.begin(), more.end());
  }
  if (static_cast<int64_t>(prompt.size()) > window) prompt.resize(static_cast<size_t>(window));
  return prompt;
}

// The share that restores may take, over every window of iterations with decode rows.
class BudgetCheck {
 public:
  explicit BudgetCheck(double share) : share_(share) {}
  void after_iteration(const testing::FakeExecutor::Trace& trace, bool decoding) {
    longest_slice_s_ = std::max(longest_slice_s_, trace.longest_slice_s);
    if (!decoding) {
      excess_s_ = 0;
      return;
    }
    excess_s_ = std::max(0.0, excess_s_ + trace.slices_s - share_ * trace.step_s);
    ASSERT_LE(excess_s_, longest_slice_s_ + 1e-9);
  }

 private:
  const double share_;
  double excess_s_ = 0;
  double longest_slice_s_ = 0;
};

class Workload {
 public:
  Workload(uint32_t seed, const FakeOptions& fake, const SchedulerOptions& options, bool cancels)
      : random_(seed),
        cancels_(cancels),
        background_(seed % 2 == 0),
        bench_(fake, options),
        budget_(options.restore.share) {
    window_ = std::min(fake.limits.context, fake.limits.arena_cells);
    bench_.executor.chore_cells = 40;
    step_tokens_ = std::min(options.batch.max_step_tokens, fake.limits.max_step_rows);
    bench_.stop_every = random_.coin() ? 0 : 15;
  }

  void run(int requests) {
    for (int i = 0; i < requests; ++i) {
      submit();
      const int64_t iterations = random_.integer(0, random_.coin(0.3) ? 200 : 10);
      for (int64_t k = 0; k < iterations; ++k) iterate();
      if (cancels_ && random_.coin(0.2)) {
        bench_.scheduler->cancel(static_cast<RequestId>(random_.integer(1, i + 1)));
      }
      if (::testing::Test::HasFatalFailure()) return;
    }
    for (int i = 0; i < 200'000; ++i) {
      if (iterate() == Activity::kIdle) return;
      if (::testing::Test::HasFatalFailure()) return;
    }
    FAIL() << bench_.unfinished() << " requests starve";
  }

  [[nodiscard]] Bench& bench() { return bench_; }

 private:
  void submit() {
    bench_.submit(random_prompt(random_, bench_, window_), random_.integer(0, 40),
                  [&](Request& request) {
                    request.salt = own_salt(random_.coin(0.8) ? "" : "other");
                    request.save = random_.coin(0.9);
                    request.key = random_.coin() ? "a" : "b";
                    request.priority = static_cast<int32_t>(random_.integer(-1, 1));
                    request.background = background_ && random_.coin(0.3);
                  });
  }

  Activity iterate() {
    const uint64_t decoded = bench_.scheduler->stats().decode_rows;
    const Activity activity = bench_.run_once();
    const auto& trace = bench_.executor.trace;
    int64_t rows = 0;
    for (const auto& step : trace.steps) {
      // Steps in flight that are waited for at the end of one iteration count each for itself.
      if (bench_.executor.options().in_flight > 1) rows = 0;
      for (int64_t piece : step) rows += piece;
      EXPECT_LE(rows, step_tokens_);
    }
    const Snapshot stats = bench_.scheduler->stats();
    const bool decoding = stats.decode_rows > decoded;
    budget_.after_iteration(trace, decoding);
    return activity;
  }

  Random random_;
  const bool cancels_;
  const bool background_;  // some are
  Bench bench_;
  BudgetCheck budget_;
  int64_t window_ = 0;
  int64_t step_tokens_ = 0;
};

void expect_right_so_far(const Bench& bench, const Record& record) {
  const Tokens expected = bench.expected(record);
  ASSERT_LE(record.answer.size(), expected.size());
  ASSERT_TRUE(std::equal(record.answer.begin(), record.answer.end(), expected.begin()))
      << "request " << record.id << " was answered from somebody else's state";
}

void expect_consistent(const Record& record) {
  const Outcome& outcome = record.outcome;
  ASSERT_EQ(record.ended, 1);
  ASSERT_EQ(outcome.id, record.id);
  ASSERT_EQ(outcome.generated_tokens, static_cast<int64_t>(record.answer.size()));
  ASSERT_GE(outcome.total_s, outcome.ttft_s);
  ASSERT_GE(outcome.resident_tokens, 0);
  ASSERT_LE(record.first, 1);
  if (outcome.phase != Phase::kDone) return;
  ASSERT_EQ(record.first, 1);
  ASSERT_GE(outcome.new_tokens, 1);
  ASSERT_EQ(outcome.resident_tokens + outcome.hidden_tokens + outcome.kv_tokens +
                outcome.recomputed_tokens + outcome.new_tokens,
            outcome.prompt_tokens);
}

TEST(SchedulerProperties, EveryRequestIsAnsweredAsIfAlone) {
  Snapshot total;
  uint64_t restored = 0;
  uint64_t reused = 0;
  for (uint32_t seed = 1; seed <= 1500; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    FakeOptions fake = random_fake(random, seed);
    fake.window = seed % 4 == 0 ? 70 : 0;
    SchedulerOptions options = random_options(random);
    if (seed % 5 < 2) {
      fake.memory = 1 + seed % 3;
      options.draft = {.most = static_cast<int32_t>(seed % 19), .least_match = 2};
    }
    Workload workload(seed, fake, options, /*cancels=*/seed % 3 == 0);
    workload.run(20);
    if (::testing::Test::HasFatalFailure()) return;
    Bench& bench = workload.bench();
    const int64_t window = std::min(fake.limits.context, fake.limits.arena_cells);
    for (const Record& record : bench.records()) {
      expect_consistent(record);
      expect_right_so_far(bench, record);
      const int64_t fits = window - static_cast<int64_t>(record.prompt.size()) + 1;
      if (record.outcome.phase == Phase::kDone) {
        const auto full = static_cast<int64_t>(bench.expected(record).size());
        ASSERT_EQ(record.outcome.generated_tokens, std::min(full, fits));
      } else {
        ASSERT_EQ(record.outcome.phase, Phase::kCancelled) << record.outcome.status.to_string();
      }
      restored += record.outcome.bytes.disk > 0 ? 1 : 0;
      reused += record.outcome.resident_tokens > 0 ? 1 : 0;
    }
    const Snapshot stats = bench.scheduler->stats();
    total.preemptions += stats.preemptions;
    total.restore_steps += stats.restore_steps;
    total.cancelled += stats.cancelled;
    total.drafted_tokens += stats.drafted_tokens;
    total.accepted_tokens += stats.accepted_tokens;
    for (size_t i = 0; i < kEvictionReasons; ++i) total.evictions.at(i) += stats.evictions.at(i);
    if (::testing::Test::HasFailure()) return;
  }
  // The workloads go everywhere.
  EXPECT_GT(restored, 300U);
  EXPECT_GT(reused, 3000U);
  EXPECT_GT(total.preemptions, 300U);
  EXPECT_GT(total.restore_steps, 1000U);
  EXPECT_GT(total.cancelled, 300U);
  EXPECT_GT(total.accepted_tokens, 3000U);
  EXPECT_GT(total.drafted_tokens, total.accepted_tokens + 3000U);
  for (uint64_t evictions : total.evictions) EXPECT_GT(evictions, 100U);
}

TEST(SchedulerProperties, FailuresHurtOnlyWhomTheyHit) {
  uint64_t failed = 0;
  for (uint32_t seed = 1; seed <= 600; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    FakeOptions fake = random_fake(random, seed);
    fake.fail_step = random.coin() ? 0.1 : 0;
    fake.fail_begin_restore = 0.1;
    fake.fail_advance = 0.1;
    fake.short_restore = 0.2;
    fake.fail_copy = 0.1;
    fake.window = seed % 3 == 0 ? 70 : 0;
    fake.fail_lookup = 0.1;
    fake.fail_saving = 0.1;
    SchedulerOptions options = random_options(random);
    if (seed % 2 == 0) {
      fake.memory = 2;
      options.draft = {.most = 9, .least_match = 2};
    }
    Workload workload(seed, fake, options, /*cancels=*/true);
    workload.run(20);
    if (::testing::Test::HasFatalFailure()) return;
    Bench& bench = workload.bench();
    uint64_t failed_here = 0;
    for (const Record& record : bench.records()) {
      expect_consistent(record);
      expect_right_so_far(bench, record);
      if (record.outcome.phase != Phase::kFailed) continue;
      ++failed_here;
      ASSERT_EQ(record.outcome.status.message(), "injected: step");
    }
    // Three failures in a row for each.
    ASSERT_LE(3 * failed_here, bench.executor.injected_step_failures);
    failed += failed_here;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(failed, 10U);
}

TEST(SchedulerProperties, StoppingAtAnyTimeEndsEverythingOnce) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const FakeOptions fake = random_fake(random, seed);
    Bench bench(fake, random_options(random));
    const int64_t window = std::min(fake.limits.context, fake.limits.arena_cells);
    for (int i = 0; i < 10; ++i) {
      bench.submit(random_prompt(random, bench, window), random.integer(1, 40));
    }
    const int64_t iterations = random.integer(0, 100);
    for (int64_t i = 0; i < iterations; ++i) bench.run_once();
    bench.scheduler->stop_all(unavailable("stopped"));
    bench.run_once();
    EXPECT_EQ(bench.unfinished(), 0);
    for (const Record& record : bench.records()) expect_right_so_far(bench, record);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace hcache::scheduler
