// The figures that `hcache bench serve` draws from its requests.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "bench_serve_report.h"

namespace hcache::load {
namespace {

using testing::HasSubstr;

// An answer whose tokens come at these times.
Record answered(double start_s, std::vector<double> token_times_s, bool returning) {
  Record record;
  record.returning = returning;
  record.start_s = start_s;
  record.end_s = token_times_s.back();
  record.answer.finish_reason = "stop";
  record.answer.completion_tokens = static_cast<int64_t>(token_times_s.size());
  record.answer.prompt_tokens = 100;
  record.answer.cached_tokens = returning ? 80 : 0;
  record.answer.token_times_s = std::move(token_times_s);
  return record;
}

Record failed(const char* error) {
  Record record;
  record.start_s = 1;
  record.end_s = 2;
  record.error = error;
  return record;
}

TEST(Percentile, LiesBetweenNeighbours) {
  std::vector<double> values(101);
  std::iota(values.begin(), values.end(), 0.0);
  EXPECT_DOUBLE_EQ(percentile(values, 0), 0);
  EXPECT_DOUBLE_EQ(percentile(values, 50), 50);
  EXPECT_DOUBLE_EQ(percentile(values, 99), 99);
  EXPECT_DOUBLE_EQ(percentile(values, 100), 100);
  EXPECT_DOUBLE_EQ(percentile({1, 2}, 90), 1.9);
  EXPECT_DOUBLE_EQ(percentile({3}, 90), 3);
  EXPECT_DOUBLE_EQ(percentile({}, 90), 0);
}

TEST(Summary, TellsFirstAndReturningRoundsApart) {
  Outcome outcome;
  outcome.records = {answered(1, {1.5, 1.6, 1.9}, false), answered(2, {2.1, 2.2, 5}, true)};
  outcome.records.push_back(answered(0, {9, 10}, false));
  outcome.records.back().warmup = true;
  const Json summary = summarise(outcome);
  EXPECT_EQ(summary["requests"], 2);
  EXPECT_EQ(summary["ok"], 2);
  EXPECT_DOUBLE_EQ(summary["duration_s"], 4);
  EXPECT_DOUBLE_EQ(summary["requests_per_s"], 0.5);
  EXPECT_DOUBLE_EQ(summary["tokens_per_s"], 1.5);
  EXPECT_NEAR(summary["ttft_ms"]["all"]["mean"].get<double>(), 300, 1e-6);
  EXPECT_NEAR(summary["ttft_ms"]["first"]["p50"].get<double>(), 500, 1e-6);
  EXPECT_NEAR(summary["ttft_ms"]["returning"]["p99"].get<double>(), 100, 1e-6);
  EXPECT_EQ(summary["tbt_ms"]["n"], 4);
  EXPECT_NEAR(summary["tbt_ms"]["max"].get<double>(), 2800, 1e-6);
  EXPECT_NEAR(summary["tpot_ms"]["max"].get<double>(), 1450, 1e-6);
  EXPECT_DOUBLE_EQ(summary["cached_share"]["all"], 0.4);
  EXPECT_DOUBLE_EQ(summary["cached_share"]["first"], 0);
  EXPECT_DOUBLE_EQ(summary["cached_share"]["returning"], 0.8);
  EXPECT_THAT(summary_lines(summary), HasSubstr("returning 80.0 %"));
  EXPECT_EQ(summary_table(summary).size(), 7U);
}

TEST(Summary, CountsErrorsByKind) {
  Outcome outcome;
  outcome.records = {answered(1, {1.5}, false), failed("http-503"), failed("timeout"),
                     failed("http-503"), failed(kInterrupted)};
  outcome.records[1].retries = 2;
  outcome.not_sent = 3;
  const Json summary = summarise(outcome);
  EXPECT_EQ(summary["requests"], 5);
  EXPECT_EQ(summary["ok"], 1);
  EXPECT_EQ(summary["failed"], 3);
  EXPECT_EQ(summary["interrupted"], 1);
  EXPECT_EQ(summary["errors"], (Json{{"http-503", 2}, {"timeout", 1}}));
  EXPECT_EQ(summary["ttft_ms"]["all"]["n"], 1);
  const std::string lines = summary_lines(summary);
  EXPECT_THAT(lines, HasSubstr("3 failed: 2 http-503, 1 timeout"));
  EXPECT_THAT(lines, HasSubstr("1 interrupted; 3 not sent; 2 retries"));
}

TEST(Summary, OfNothingIsEmpty) {
  const Json summary = summarise({});
  EXPECT_EQ(summary["requests"], 0);
  EXPECT_EQ(summary["ttft_ms"]["all"]["n"], 0);
  EXPECT_TRUE(summary["cached_share"]["all"].is_null());
  EXPECT_EQ(summary_table(summary)[1][2], "-");
}

TEST(Record, IsOneRowOfTheReport) {
  const Json row = record_json(answered(1, {1.5, 1.7}, true));
  EXPECT_NEAR(row["ttft_ms"].get<double>(), 500, 1e-6);
  EXPECT_NEAR(row["tpot_ms"].get<double>(), 200, 1e-6);
  EXPECT_NEAR(row["total_ms"].get<double>(), 700, 1e-6);
  EXPECT_EQ(row["finish_reason"], "stop");
  EXPECT_TRUE(row["error"].is_null());
  EXPECT_FALSE(row.contains("message"));
  const Json bad = record_json(failed("timeout"));
  EXPECT_TRUE(bad["ttft_ms"].is_null());
  EXPECT_TRUE(bad["prompt_tokens"].is_null());
  EXPECT_EQ(bad["completion_tokens"], 0);
  EXPECT_EQ(bad["error"], "timeout");
}

}  // namespace
}  // namespace hcache::load
