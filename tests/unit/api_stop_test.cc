#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "api/stop_matcher.h"

namespace hcache::api {
namespace {

TEST(StopMatcher, LetsTextThroughAtOnceWithoutStops) {
  StopMatcher m({});
  EXPECT_EQ(m.push("Hello"), "Hello");
  EXPECT_EQ(m.push(" there"), " there");
  EXPECT_EQ(m.flush(), "");
  EXPECT_FALSE(m.stopped());
}

TEST(StopMatcher, HoldsBackWhatMayBecomeAStop) {
  StopMatcher m({"###"});
  EXPECT_EQ(m.push("a#"), "a");
  EXPECT_EQ(m.push("#"), "");
  EXPECT_EQ(m.push("b#"), "##b");
  EXPECT_EQ(m.flush(), "#");
}

TEST(StopMatcher, CutsAtTheStop) {
  StopMatcher m({"</s>", "\n\n"});
  EXPECT_EQ(m.push("one\n"), "one");
  EXPECT_EQ(m.push("\ntwo"), "");
  EXPECT_TRUE(m.stopped());
  EXPECT_EQ(m.stop_string(), "\n\n");
  EXPECT_EQ(m.push("three"), "");
  EXPECT_EQ(m.flush(), "");
}

TEST(StopMatcher, TheStopThatIsCompleteFirstWins) {
  StopMatcher first({"abcd", "bc"});
  EXPECT_EQ(first.push("xabcd"), "xa");
  EXPECT_EQ(first.stop_string(), "bc");
  StopMatcher longest({"c", "abc"});
  EXPECT_EQ(longest.push("xabc"), "x");
  EXPECT_EQ(longest.stop_string(), "abc");
}

TEST(StopMatcher, CharactersStayWhole) {
  StopMatcher m({"é!"});
  EXPECT_EQ(m.push("a\xC3"), "a");
  EXPECT_EQ(m.push("\xA9"), "");
  EXPECT_EQ(m.push("?"), "é?");
  EXPECT_EQ(m.push("\xE2\x82"), "");
  EXPECT_EQ(m.flush(), "\uFFFD");
}

// However the bytes are cut, the text and the stop are the same, and nothing is lost.
TEST(StopMatcher, TheCutsDoNotMatter) {
  std::mt19937 rng(11);
  const std::string letters[] = {"a", "b", "c", "é", "\xFF", "\xC3"};
  const auto word = [&](size_t n) {
    std::string out;
    for (size_t i = 0; i < n; i++) out += letters[rng() % std::size(letters)];
    return out;
  };
  for (int round = 0; round < 2000; round++) {
    std::vector<std::string> stops;
    for (size_t i = rng() % 4; i > 0; i--) {
      std::string stop;
      for (size_t n = 1 + rng() % 3; n > 0; n--) stop += letters[rng() % 4];
      stops.push_back(stop);
    }
    const std::string text = word(rng() % 24);
    StopMatcher whole(stops);
    std::string expected = whole.push(text);
    expected += whole.flush();
    StopMatcher pieces(stops);
    std::string got;
    for (size_t at = 0; at < text.size();) {
      const size_t n = 1 + rng() % 4;
      got += pieces.push(text.substr(at, n));
      at += n;
    }
    got += pieces.flush();
    ASSERT_EQ(got, expected);
    ASSERT_EQ(pieces.stop_string(), whole.stop_string());
    for (const std::string& stop : stops) ASSERT_EQ(got.find(stop), std::string::npos);
  }
}

}  // namespace
}  // namespace hcache::api
