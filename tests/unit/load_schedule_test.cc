// The load of `hcache bench serve` as a function of its options: lengths, arrivals, text, traces.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <string>

#include "bench_serve_text.h"
#include "sim/workload.h"

namespace hcache::load {
namespace {

using sim::draw_conversations;
using sim::LoadOptions;
using sim::replay_trace;
using sim::Round;
using sim::Schedule;
using sim::Session;
using testing::HasSubstr;
using testing::StartsWith;

LoadOptions many() {
  LoadOptions options;
  options.sessions = 4000;
  options.rounds = 5;
  options.rate = 2;
  options.think_s = 30;
  options.seed = 7;
  return options;
}

TEST(Conversations, HaveTheLengthsOfShareGpt4) {
  const Schedule schedule = draw_conversations(many());
  double input = 0;
  double output = 0;
  double n = 0;
  for (const Session& session : schedule.sessions) {
    for (const Round& round : session.rounds) {
      input += static_cast<double>(round.input_tokens);
      output += static_cast<double>(round.output_tokens);
      n++;
    }
  }
  EXPECT_EQ(n, 20000);
  // Five standard errors of the mean.
  EXPECT_NEAR(input / n, 66.8, 3.2);
  EXPECT_NEAR(output / n, 358.8, 8.5);
}

TEST(Conversations, ArriveAsAPoissonProcess) {
  const Schedule schedule = draw_conversations(many());
  const double n = static_cast<double>(schedule.sessions.size()) - 1;
  double squares = 0;
  double before = 0;
  EXPECT_EQ(schedule.sessions.front().start_s, 0);
  for (const Session& session : schedule.sessions) {
    EXPECT_GE(session.start_s, before);
    squares += std::pow(session.start_s - before, 2);
    before = session.start_s;
  }
  EXPECT_NEAR(before / n, 0.5, 0.04);
  // An exponential law's standard deviation is its mean.
  EXPECT_NEAR(std::sqrt(squares / n - std::pow(before / n, 2)), 0.5, 0.07);
}

TEST(Conversations, EndAtTheContextAskedFor) {
  LoadOptions options = many();
  options.sessions = 100;
  options.context = 3000;
  for (const Session& session : draw_conversations(options).sessions) {
    int64_t total = 0;
    for (const Round& round : session.rounds) {
      EXPECT_EQ(round.known_tokens, total);
      EXPECT_EQ(round.returning, total > 0);
      EXPECT_GE(round.input_tokens, 1);
      EXPECT_GE(round.output_tokens, 1);
      total += round.input_tokens + round.output_tokens;
    }
    EXPECT_NEAR(static_cast<double>(total), 3000, 10);  // every length is rounded
  }
}

TEST(Conversations, ThinkAsLongAsAsked) {
  LoadOptions options = many();
  for (const bool exponential : {false, true}) {
    options.think_exponential = exponential;
    double sum = 0;
    std::set<double> pauses;
    for (const Session& session : draw_conversations(options).sessions) {
      EXPECT_EQ(session.rounds[0].think_s, 0);
      for (size_t i = 1; i < session.rounds.size(); i++) {
        sum += session.rounds[i].think_s;
        pauses.insert(session.rounds[i].think_s);
      }
    }
    EXPECT_NEAR(sum / 16000, 30, 1.2);
    EXPECT_EQ(pauses.size() > 1, exponential);
  }
}

TEST(Conversations, FollowFromTheSeed) {
  LoadOptions options = many();
  options.sessions = 20;
  options.warmup = 3;
  const Schedule a = draw_conversations(options);
  const Schedule b = draw_conversations(options);
  options.seed++;
  const Schedule c = draw_conversations(options);
  ASSERT_EQ(a.sessions.size(), 23U);
  bool differs = false;
  for (size_t i = 0; i < a.sessions.size(); i++) {
    EXPECT_EQ(a.sessions[i].warmup, i < 3);
    EXPECT_EQ(a.sessions[i].start_s, b.sessions[i].start_s);
    for (size_t r = 0; r < a.sessions[i].rounds.size(); r++) {
      const Round& one = a.sessions[i].rounds[r];
      const Round& same = b.sessions[i].rounds[r];
      EXPECT_EQ(one.input_tokens, same.input_tokens);
      EXPECT_EQ(one.output_tokens, same.output_tokens);
      EXPECT_EQ(one.message[0].key, same.message[0].key);
      differs = differs || one.input_tokens != c.sessions[i].rounds[r].input_tokens;
    }
  }
  EXPECT_TRUE(differs);
}

constexpr char kMooncake[] =
    R"({"timestamp": 5000, "input_length": 1100, "output_length": 20, "hash_ids": [1, 2, 3]}
{"timestamp": 5500, "input_length": 1500, "output_length": 0, "hash_ids": [1, 2, 4]}

{"timestamp": 6000, "input_length": 9000, "output_length": 1, "hash_ids": [1,2,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19]}
{"timestamp": 8000, "input_length": 600, "output_length": 9, "hash_ids": [30, 31]}
)";

TEST(Trace, KeepsTimesLengthsAndSharedPrefixes) {
  LoadOptions options;
  options.context = 4000;
  options.time_scale = 0.5;
  const Result<Schedule> schedule = replay_trace(options, kMooncake);
  ASSERT_TRUE(schedule.ok()) << schedule.status().message();
  EXPECT_EQ(schedule->left_out, 1);
  ASSERT_EQ(schedule->sessions.size(), 3U);
  const auto round = [&](size_t i) { return schedule->sessions[i].rounds[0]; };
  EXPECT_EQ(schedule->sessions[0].start_s, 0);
  EXPECT_DOUBLE_EQ(schedule->sessions[1].start_s, 0.25);
  EXPECT_DOUBLE_EQ(schedule->sessions[2].start_s, 1.5);
  EXPECT_EQ(round(0).input_tokens, 1100);
  EXPECT_EQ(round(0).output_tokens, 20);
  EXPECT_EQ(round(0).message.back().tokens, 1100 - 1024);
  EXPECT_EQ(round(0).known_tokens, 0);
  EXPECT_FALSE(round(0).returning);
  EXPECT_EQ(round(1).output_tokens, 1);  // a request asks for something
  EXPECT_EQ(round(1).known_tokens, 1024);
  EXPECT_TRUE(round(1).returning);
  EXPECT_EQ(round(1).message[1].key, round(0).message[1].key);
  EXPECT_NE(round(1).message[2].key, round(0).message[2].key);
  EXPECT_EQ(round(2).known_tokens, 0);
}

TEST(Trace, ScalesLengthsAndCutsWhatIsAskedFor) {
  LoadOptions options;
  options.length_scale = 0.125;
  options.sessions = 1;
  options.warmup = 1;
  const Result<Schedule> schedule = replay_trace(options, kMooncake);
  ASSERT_TRUE(schedule.ok());
  ASSERT_EQ(schedule->sessions.size(), 2U);
  EXPECT_TRUE(schedule->sessions[0].warmup);
  EXPECT_FALSE(schedule->sessions[1].warmup);
  EXPECT_EQ(schedule->sessions[0].rounds[0].message[0].tokens, 64);
  EXPECT_EQ(schedule->sessions[1].rounds[0].known_tokens, 128);
}

TEST(Trace, ReadsAzuresCsv) {
  const Result<Schedule> schedule = replay_trace({},
                                                 "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
                                                 "2023-11-16 23:59:59.5000000,374,44\r\n"
                                                 "2023-11-17 00:00:01.2500000,396,109\r\n"
                                                 "2023-11-17 00:00:02,1,1");
  ASSERT_TRUE(schedule.ok()) << schedule.status().message();
  ASSERT_EQ(schedule->sessions.size(), 3U);
  EXPECT_NEAR(schedule->sessions[1].start_s, 1.75, 1e-6);
  EXPECT_NEAR(schedule->sessions[2].start_s, 2.5, 1e-6);
  const Round& round = schedule->sessions[1].rounds[0];
  EXPECT_EQ(round.input_tokens, 396);
  EXPECT_EQ(round.output_tokens, 109);
  EXPECT_FALSE(round.returning);
  EXPECT_NE(round.message[0].key, schedule->sessions[0].rounds[0].message[0].key);
}

TEST(Trace, NamesTheLineThatIsWrong) {
  const std::string good = R"({"timestamp":0,"input_length":1,"output_length":1,"hash_ids":[0]})";
  for (const char* bad :
       {"{", "{}", "nonsense", "1,2", "2023-11-16,3,4", "2023-11-16 18:15:46,3,x",
        "2023-11-16 18:15:46,-3,4", R"({"timestamp":0,"input_length":"1","output_length":1})",
        R"({"timestamp":0,"input_length":513,"output_length":1,"hash_ids":[0]})",
        R"({"timestamp":0,"input_length":1,"output_length":1,"hash_ids":["a"]})",
        R"({"timestamp":"x","input_length":1,"output_length":1,"hash_ids":[0]})",
        R"({"timestamp":0,"input_length":1e300,"output_length":1,"hash_ids":[0]})"}) {
    const Result<Schedule> schedule = replay_trace({}, good + "\n" + bad + "\n");
    EXPECT_EQ(schedule.code(), Code::kInvalidArgument) << bad;
    EXPECT_THAT(schedule.status().message(), StartsWith("line 2: ")) << bad;
  }
  LoadOptions options;
  options.warmup = 1;
  EXPECT_THAT(replay_trace(options, good).status().message(), HasSubstr("nothing to count"));
  EXPECT_EQ(replay_trace({}, "").code(), Code::kInvalidArgument);
}

TEST(Text, IsTheSameForTheSameKey) {
  const Result<TextSource> source = TextSource::make(built_in_text(), 4.5, 1);
  const Result<TextSource> other = TextSource::make(built_in_text(), 4.5, 2);
  ASSERT_TRUE(source.ok() && other.ok());
  EXPECT_EQ(source->passage(5, 100), source->passage(5, 100));
  EXPECT_NE(source->passage(5, 100), source->passage(6, 100));
  EXPECT_NE(source->passage(5, 100), other->passage(5, 100));
  EXPECT_THAT(source->passage(5, 100), StartsWith(source->passage(5, 99)));
  EXPECT_THAT(source->passage(5, 100), StartsWith(source->passage(5, 3)));
}

TEST(Text, IsAboutAsLongAsAsked) {
  const Result<TextSource> source = TextSource::make(built_in_text(), 4.5, 1);
  ASSERT_TRUE(source.ok());
  for (const int64_t tokens : {10, 100, 1000, 50000}) {
    const auto bytes = static_cast<double>(source->passage(3, tokens).size());
    EXPECT_LE(bytes, 4.5 * static_cast<double>(tokens));
    EXPECT_GE(bytes, 4.5 * static_cast<double>(tokens) - 24);  // a word and its space
  }
  EXPECT_FALSE(source->passage(3, 1).empty());
}

TEST(Text, TakesAnyText) {
  EXPECT_EQ(TextSource::make(" \n\t", 4.5, 1).code(), Code::kInvalidArgument);
  const Result<TextSource> one = TextSource::make("...", 4.5, 1);
  ASSERT_TRUE(one.ok());
  EXPECT_THAT(one->passage(1, 20), StartsWith("... ... ... ...: ... "));
}

}  // namespace
}  // namespace hcache::load
