// Logits of the prompt's own tokens: told once and in order, whatever the request goes on from.
#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using testing::Bench;
using testing::chain_hash;
using testing::FakeOptions;
using testing::hash_of;
using testing::Record;
using testing::tokens;
using testing::Tokens;
using testing::operator+;

// The positions that a request was told, each with the right logits.
struct Told {
  explicit Told(int64_t from_token) : from(from_token) {}

  Tokens prompt;
  int64_t from = 0;
  std::vector<int64_t> positions;

  Bench::Tweak ask(const Bench::Tweak& more = {}) {
    return [this, more](Request& request) {
      prompt = request.tokens;
      request.logits_from = from;
      request.on_prompt_logits = [this](int64_t position, std::span<const float> logits) {
        positions.push_back(position);
        const auto chain = std::span(prompt).first(static_cast<size_t>(position) + 1);
        EXPECT_EQ(hash_of(logits), chain_hash({}, chain)) << "of token " << position;
      };
      if (more) more(request);
    };
  }
  void expect_all() const {
    std::vector<int64_t> all;
    for (auto at = from; at < static_cast<int64_t>(prompt.size()); ++at) all.push_back(at);
    EXPECT_EQ(positions, all);
  }
};

TEST(SchedulerPromptLogits, AreToldOfEveryTokenFromOneOn) {
  for (const int64_t from : {0, 1, 63, 64, 100, 149}) {
    Bench bench;
    Told told(from);
    const Record& record = bench.submit(tokens(150), 5, told.ask());
    ASSERT_TRUE(bench.run_all());
    told.expect_all();
    EXPECT_EQ(record.answer, bench.expected(record));
  }
}

TEST(SchedulerPromptLogits, NeedNoAnswerBehindThem) {
  Bench bench;
  Told told(10);
  const Record& record = bench.submit(tokens(150), 0, told.ask());
  ASSERT_TRUE(bench.run_all());
  told.expect_all();
  EXPECT_TRUE(record.answer.empty());
  EXPECT_EQ(record.outcome.finish_reason, "length");
}

TEST(SchedulerPromptLogits, MayBeHiddenRowsInstead) {
  Bench bench;
  std::vector<int64_t> rows;
  const Bench::Tweak hidden = [&](Request& request) {
    request.tells_hidden = true;
    request.logits_from = 100;
    request.on_prompt_logits = [&](int64_t position, std::span<const float> row) {
      ASSERT_EQ(row.size(), 1U);
      EXPECT_EQ(row[0], static_cast<float>(position + 1));
      rows.push_back(position);
    };
  };
  const Record& beside = bench.submit(tokens(150, 2), 5);
  bench.submit(tokens(150), 0, hidden);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(rows.size(), 50U);
  EXPECT_EQ(rows.front(), 100);
  EXPECT_EQ(beside.answer, bench.expected(beside));
  EXPECT_EQ(bench.refusal(tokens(50), 1, hidden).code(), Code::kInvalidArgument);
}

TEST(SchedulerPromptLogits, AreComputedThoughTheArenaHasTheirRows) {
  Bench bench;
  bench.submit(tokens(150), 0);
  ASSERT_TRUE(bench.run_all());
  Told told(100);
  const Record& record = bench.submit(tokens(150), 3, told.ask());
  ASSERT_TRUE(bench.run_all());
  told.expect_all();
  EXPECT_EQ(record.outcome.resident_tokens, 100);
  EXPECT_EQ(record.answer, bench.expected(record));
}

TEST(SchedulerPromptLogits, AreComputedBehindARestore) {
  for (const int64_t follow_rows : {0, 64}) {
    FakeOptions fake;
    fake.follow_rows = follow_rows;
    Bench bench(fake);
    bench.executor.save({}, tokens(300));
    Told told(200);
    const Record& record = bench.submit(tokens(300) + tokens(40, 2), 3, told.ask());
    ASSERT_TRUE(bench.run_all());
    told.expect_all();
    const int64_t restored = record.outcome.hidden_tokens + record.outcome.kv_tokens;
    EXPECT_GE(restored, 199);
    EXPECT_LE(restored, 200);
    EXPECT_EQ(record.answer, bench.expected(record));
  }
}

TEST(SchedulerPromptLogits, AreToldOnceThoughTheRequestIsPreempted) {
  FakeOptions fake;
  fake.limits.arena_cells = 200;
  Bench bench(fake, {.decode_headroom = 4});
  Told told(20);
  bench.submit(tokens(60, 1), 120);
  const Record& second = bench.submit(tokens(60, 2), 120, told.ask());
  ASSERT_TRUE(bench.run_all());
  ASSERT_FALSE(second.outcome.preempted_at_s.empty());
  told.expect_all();
  EXPECT_EQ(second.answer, bench.expected(second));
}

TEST(SchedulerPromptLogits, GoOnWhereAPreemptedPromptWas) {
  FakeOptions fake;
  fake.limits.max_step_rows = 16;
  Bench bench(fake, {.batch = {.max_step_tokens = 16, .max_sequences = 1}});
  Told told(20);
  const Record& batch = bench.submit(tokens(100, 2), 5,
                                     told.ask([](Request& request) { request.background = true; }));
  bench.run_until([&] { return told.positions.size() > 5; });
  bench.submit(tokens(30, 1), 5);
  ASSERT_TRUE(bench.run_all());
  ASSERT_FALSE(batch.outcome.preempted_at_s.empty());
  told.expect_all();
  EXPECT_EQ(batch.answer, bench.expected(batch));
}

TEST(SchedulerPromptLogits, AreRefusedBeyondThePrompt) {
  Bench bench;
  for (const int64_t from : {-1, 50, 51}) {
    Told told(from);
    EXPECT_EQ(bench.refusal(tokens(50), 1, told.ask()).code(), Code::kInvalidArgument);
  }
}

}  // namespace
}  // namespace hcache::scheduler
