// Idle sequences as other threads see them: looked at, given back, not there.
#include <optional>
#include <set>

#include "scheduler_testing.h"

namespace hcache::scheduler {
namespace {

using testing::Bench;
using testing::operator+;
using testing::Record;
using testing::tokens;

std::vector<SeqId> resident(const Bench& bench) {
  std::vector<SeqId> out;
  for (const ResidentSequence& r : bench.scheduler->stats().resident) out.push_back(r.seq);
  return out;
}

std::optional<Result<IdleSequence>> visit(Bench& bench, SeqId seq, bool release = false) {
  std::optional<Result<IdleSequence>> got;
  bench.scheduler->visit_idle(seq, release, [&](Result<IdleSequence> s) { got = std::move(s); });
  EXPECT_FALSE(got.has_value()) << "called by the caller's thread";
  bench.run_once();
  return got;
}

TEST(SchedulerVisit, ShowsWhatASequenceHolds) {
  Bench bench;
  const Record& record =
      bench.submit(tokens(100), 20, [](Request& r) { r.salt = own_salt("mine"); });
  ASSERT_TRUE(bench.run_all());
  ASSERT_EQ(resident(bench).size(), 1U);
  const SeqId seq = resident(bench)[0];
  const auto held = visit(bench, seq);
  ASSERT_TRUE(held.has_value() && held->ok());
  EXPECT_EQ((*held)->salt, own_salt("mine"));
  testing::Tokens chain = record.prompt + record.answer;
  chain.pop_back();  // no request has computed it
  EXPECT_EQ((*held)->tokens, chain);
  EXPECT_EQ(resident(bench), std::vector<SeqId>{seq});
}

TEST(SchedulerVisit, GivesASequenceBack) {
  Bench bench;
  bench.submit(tokens(100), 20);
  ASSERT_TRUE(bench.run_all());
  const SeqId seq = resident(bench)[0];
  const auto held = visit(bench, seq, true);
  ASSERT_TRUE(held.has_value() && held->ok());
  EXPECT_EQ((*held)->tokens.size(), 119U);
  EXPECT_TRUE(resident(bench).empty());
  EXPECT_EQ(bench.executor.free_cells(), bench.executor.limits().arena_cells);
  const auto again = visit(bench, seq);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->code(), Code::kNotFound);
}

TEST(SchedulerVisit, LeavesWhatARequestRunsOn) {
  Bench bench;
  const Record& record = bench.submit(tokens(10), 50);
  bench.run_once();
  const SeqId seq = resident(bench)[0];
  const auto held = visit(bench, seq, true);
  ASSERT_TRUE(held.has_value());
  EXPECT_EQ(held->code(), Code::kUnavailable);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(record.answer, bench.expected(record));
  // The sequence keeps its id over the turns of a conversation.
  bench.submit(record.prompt + record.answer + tokens(5, 2), 5);
  ASSERT_TRUE(bench.run_all());
  EXPECT_EQ(resident(bench), std::vector<SeqId>{seq});
}

TEST(SchedulerVisit, SaysWhatIsDurable) {
  testing::FakeOptions fake;
  fake.saving = true;
  Bench bench(fake);
  bench.submit(tokens(100), 20);
  bench.submit(tokens(100, 2), 20, [](Request& r) { r.save = false; });
  ASSERT_TRUE(bench.run_all());
  const std::vector<SeqId> all = resident(bench);
  ASSERT_EQ(all.size(), 2U);
  bench.executor.pass(10);  // the flushes that the ends asked for
  std::multiset<int64_t> durable;
  for (const SeqId seq : all) {
    const auto held = visit(bench, seq);
    ASSERT_TRUE(held.has_value() && held->ok());
    durable.insert((*held)->durable_tokens);
  }
  EXPECT_EQ(durable, (std::multiset<int64_t>{kNotSaving, 119}));
}

TEST(SchedulerVisit, IsAnsweredWhenTheSchedulerEnds) {
  Bench bench;
  std::optional<Result<IdleSequence>> got;
  bench.scheduler->visit_idle(1, false, [&](Result<IdleSequence> s) { got = std::move(s); });
  bench.scheduler.reset();
  ASSERT_TRUE(got.has_value());
  EXPECT_EQ(got->code(), Code::kNotFound);
}

}  // namespace
}  // namespace hcache::scheduler
