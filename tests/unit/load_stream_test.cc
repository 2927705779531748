// What servers stream, cut into pieces at every place.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "bench_serve_stream.h"

namespace hcache::load {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> events_of(const std::vector<std::string>& pieces) {
  SseParser parser;
  std::vector<std::string> events;
  for (const std::string& piece : pieces) {
    parser.feed(piece, [&](std::string_view data) {
      events.emplace_back(data);
      return true;
    });
  }
  return events;
}

TEST(Sse, CutAnywhereIsTheSame) {
  const std::string stream =
      ": a comment\n\nevent: x\nid: 7\ndata: one\n\ndata:two\r\ndata: lines\r\n\r\n"
      "data: th\xC3\xA9n\r\rdata:\n\n\n\ndata:  spaced \n\ndata: never ended\n";
  const auto expected = ElementsAre("one", "two\nlines", "th\xC3\xA9n", "", " spaced ");
  EXPECT_THAT(events_of({stream}), expected);
  for (size_t a = 0; a <= stream.size(); a++) {
    for (size_t b = a; b <= stream.size(); b++) {
      ASSERT_THAT(events_of({stream.substr(0, a), stream.substr(a, b - a), stream.substr(b)}),
                  expected)
          << a << ' ' << b;
    }
  }
}

TEST(Sse, StopsWhenToldTo) {
  SseParser parser;
  int n = 0;
  parser.feed("data: 1\n\ndata: 2\n\n", [&](std::string_view) { return ++n < 1; });
  EXPECT_EQ(n, 1);
}

constexpr char kAnswer[] =
    "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null},"
    "\"finish_reason\":null}]}\n\n"
    "data: {\"choices\":[{\"delta\":{\"content\":\"Hel\"}}]}\n\n"
    "data: {\"choices\":[{\"delta\":{\"content\":\"l\xC3\xB6\"},\"finish_reason\":null}]}\n\n"
    "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":3,"
    "\"prompt_tokens_details\":{\"cached_tokens\":4}},\"timings\":{\"cache_n\":4}}\n\n"
    "data: [DONE]\n\n";

TEST(AnswerReader, ReadsAWholeAnswer) {
  const std::string stream = kAnswer;
  for (size_t cut = 0; cut <= stream.size(); cut++) {
    AnswerReader reader;
    const bool more = reader.feed(stream.substr(0, cut), 1);
    EXPECT_EQ(more, cut < stream.size());
    reader.feed(stream.substr(cut), 2);
    const Answer& answer = reader.answer();
    ASSERT_EQ(answer.text, "Hell\xC3\xB6") << cut;
    EXPECT_EQ(answer.finish_reason, "stop");
    EXPECT_EQ(answer.error, "");
    EXPECT_EQ(answer.prompt_tokens, 9);
    EXPECT_EQ(answer.completion_tokens, 3);
    EXPECT_EQ(answer.cached_tokens, 4);
    EXPECT_EQ(answer.server["timings"]["cache_n"], 4);
    EXPECT_EQ(answer.token_times_s.size(), 2U);
  }
}

TEST(AnswerReader, TimesReasoningButKeepsItOut) {
  AnswerReader reader;
  EXPECT_TRUE(
      reader.feed("data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}\n\n", 1.5));
  EXPECT_TRUE(reader.feed("data: {\"choices\":[{\"delta\":{\"content\":\"yes\"}}]}\n\n", 2));
  EXPECT_THAT(reader.answer().token_times_s, ElementsAre(1.5, 2));
  EXPECT_EQ(reader.answer().text, "yes");
  EXPECT_FALSE(reader.answer().completion_tokens.has_value());
}

TEST(AnswerReader, SurvivesWhatIsNoAnswer) {
  for (const char* nonsense :
       {"data: {}\n\n", "data: {\"choices\":3}\n\n", "data: {\"choices\":[7]}\n\n",
        "data: {\"choices\":[{\"delta\":[]}],\"usage\":null}\n\n",
        "data: {\"choices\":[{\"delta\":{\"content\":5},\"finish_reason\":5}]}\n\n",
        "data: {\"usage\":{\"prompt_tokens\":\"x\",\"prompt_tokens_details\":null}}\n\n"}) {
    AnswerReader reader;
    EXPECT_TRUE(reader.feed(nonsense, 1)) << nonsense;
    EXPECT_EQ(reader.answer().text + reader.answer().error + reader.answer().finish_reason, "");
    EXPECT_FALSE(reader.answer().prompt_tokens.has_value());
  }
}

TEST(AnswerReader, TellsErrors) {
  const auto error_of = [](const char* stream) {
    AnswerReader reader;
    EXPECT_FALSE(reader.feed(stream, 1)) << stream;
    EXPECT_FALSE(reader.feed("data: {}\n\n", 1));
    return reader.answer().error;
  };
  EXPECT_EQ(error_of("data: {\"error\":{\"message\":\"no room\",\"code\":500}}\n\n"), "no room");
  EXPECT_EQ(error_of("data: {\"error\":\"no room\"}\n\n"), "no room");
  EXPECT_THAT(error_of("data: {\"error\":{\"code\":500}}\n\n"), HasSubstr("500"));
  EXPECT_EQ(error_of("data: {\"choices\n\n"), "an event is not a JSON object");
  EXPECT_EQ(error_of("data: \xFF\n\n"), "an event is not a JSON object");
}

TEST(ErrorMessage, IsWhatTheServerSaid) {
  EXPECT_EQ(error_message(R"({"error":{"message":"busy"}})"), "busy");
  EXPECT_EQ(error_message("<html>"), "<html>");
  EXPECT_EQ(error_message(std::string(5000, 'x')).size(), 300U);
  EXPECT_EQ(error_message(""), "");
}

}  // namespace
}  // namespace hcache::load
