// What agents write into every system prompt anew, and what an operator names, is left out of it.
#include <gtest/gtest.h>

#include "ignored_lines.h"

namespace hcache::server {
namespace {

std::vector<std::string> kept(std::vector<std::string> patterns,
                              const std::vector<model::ChatMessage>& messages) {
  model::ChatInput chat{.messages = messages};
  IgnoredLines(std::move(patterns)).drop_from(&chat);
  std::vector<std::string> out;
  for (const auto& message : chat.messages) out.push_back(message.role + ": " + message.content);
  return out;
}

std::string kept_of(const std::string& system, std::vector<std::string> patterns = {}) {
  const auto out = kept(std::move(patterns), {{"system", system}, {"user", "Hi"}});
  EXPECT_EQ(out.back(), "user: Hi");
  return out.size() == 1 ? "" : out.front().substr(8);
}

TEST(IgnoredLines, ABillingHeaderIsNoPartOfThePrompt) {
  const std::string header =
      "x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch=a5145;";
  EXPECT_EQ(kept_of(header + "\nYou are an agent."), "You are an agent.");
  EXPECT_EQ(kept_of(header + "You are an agent."), "You are an agent.");
  EXPECT_EQ(kept_of(header + " \n\nA=b; is code.\n"), "A=b; is code.\n");
  EXPECT_EQ(kept_of(header), "");
  EXPECT_EQ(kept_of("x-anthropic-billing-header: anything else\nYou are."), "You are.");
  EXPECT_EQ(kept_of("x-anthropic-billing-header:"), "");
  EXPECT_EQ(kept_of("x-anthropic-billing-header: a=b"), "");
}

TEST(IgnoredLines, ItIsOneAtTheBeginningAlone) {
  for (const char* text : {"You are. x-anthropic-billing-header: cch=1;", "", "\n",
                           "x-anthropic-billing-headers: cch=1;"}) {
    EXPECT_EQ(kept({}, {{"system", text}}),
              (std::vector<std::string>{std::string("system: ") + text}));
  }
  EXPECT_EQ(kept({}, {{"user", "x-anthropic-billing-header: cch=1;"}}),
            (std::vector<std::string>{"user: x-anthropic-billing-header: cch=1;"}));
}

TEST(IgnoredLines, PatternsNameWholeLinesOfSystemMessages) {
  const std::string text = "You are.\nToday is Monday.\nBe brief.\nToday is not told here.";
  EXPECT_EQ(kept_of(text, {"Today is *day."}), "You are.\nBe brief.\nToday is not told here.");
  EXPECT_EQ(kept_of(text, {"Today is *", "You*"}), "Be brief.\n");
  EXPECT_EQ(kept_of(text, {"Today"}), text);
  EXPECT_EQ(kept_of("Today is Monday.", {"Today*"}), "");
  EXPECT_EQ(kept_of("a\n\nb\n", {""}), "a\nb\n");
  EXPECT_EQ(kept({"x*"}, {{"system", "x"}, {"system", "y\nx"}, {"user", "x"}, {"system", "x"}}),
            (std::vector<std::string>{"system: y\n", "user: x", "system: x"}));
}

TEST(IgnoredLines, ALongLineIsKept) {
  const std::string line(100'000, 'x');
  EXPECT_EQ(kept_of(line + "\nx", {"x*"}), line + "\n");
}

}  // namespace
}  // namespace hcache::server
