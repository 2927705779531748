// Options as fields: what is typed, the defaults, what is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "options.h"

namespace hcache::cli {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

struct Limits {
  int queued = 256;
  double wait_s = 0.25;
};

struct SharedArgs : Options {
  using Options::Options;

  std::string folder = text(&folder, "--folder", "DIR", "", "where things lie");
  uint64_t room = bytes(&room, "--room", 4ULL << 20, "how much of them");
};

struct SendArgs : Options {
  SendArgs() {
    integer(&limits.queued, "--queued", "N", limits.queued, {1}, "most that wait");
    duration(&limits.wait_s, "--wait", limits.wait_s, "how long");
    after_parsing([this] {
      if (shared.folder.empty()) shared.folder = "home";
    });
  }

  std::string kind = choice(&kind, "--kind", "plain", "plain|fancy", "which");
  int64_t delay_ns = duration(&delay_ns, "-d,--delay", 90 * kSecond, "before it begins");
  float share = number(&share, "--share", "X", 0.5F, {0, 1}, "of the whole");
  std::string secret = text(&secret, "--secret", "TEXT", "", "what", {.variable = "HCACHE_SECRET"});
  std::vector<int64_t> sizes = integers(&sizes, "--sizes", "N,...", "1,2", {0}, "of each");
  bool loud = flag(&loud, "--loud", "say it", {.needs = "--folder"});
  bool quiet = flag(&quiet, "--quiet", "don't", {.excludes = "--loud,--not-here"});
  Limits limits;
  SharedArgs shared{this};
};

struct FewArgs : Options {
  SharedArgs shared{nullptr};
  FewArgs() { offer(shared, {&shared.room}); }
};

struct WithheldArgs : Options {
  SharedArgs shared{this};
  WithheldArgs() { withhold({&shared.room}); }
};

// The error's text; empty: it parsed.
template <typename Args>
std::string parse(CLI::App* app, Args* args, std::vector<std::string> line) {
  args->add_to(*app);
  std::reverse(line.begin(), line.end());
  try {
    app->parse(line);
  } catch (const CLI::ParseError& e) {
    return e.what();
  }
  return {};
}
template <typename Args>
std::string parse(Args* args, std::vector<std::string> line) {
  CLI::App app;
  return parse(&app, args, std::move(line));
}

TEST(Options, FieldsBeginWithTheirDefaults) {
  const SendArgs args;
  EXPECT_EQ(args.kind, "plain");
  EXPECT_EQ(args.delay_ns, 90 * kSecond);
  EXPECT_EQ(args.share, 0.5F);
  EXPECT_THAT(args.sizes, ElementsAre(1, 2));
  EXPECT_EQ(args.limits.queued, 256);
  EXPECT_EQ(args.shared.room, 4ULL << 20);
}

TEST(Options, WhatIsTypedIsRead) {
  SendArgs args;
  EXPECT_EQ(parse(&args, {"--kind", "fancy", "-d", "2m", "--share=0.25", "--sizes", "3,4",
                          "--sizes", "5", "--queued", "7", "--wait", "1s", "--room", "1GiB",
                          "--folder", "here", "--loud"}),
            "");
  EXPECT_EQ(args.kind, "fancy");
  EXPECT_EQ(args.delay_ns, 120 * kSecond);
  EXPECT_EQ(args.share, 0.25F);
  EXPECT_THAT(args.sizes, ElementsAre(3, 4, 5));
  EXPECT_EQ(args.limits.queued, 7);
  EXPECT_EQ(args.limits.wait_s, 1.0);
  EXPECT_EQ(args.shared.room, 1ULL << 30);
  EXPECT_EQ(args.shared.folder, "here");
  EXPECT_TRUE(args.loud);
}

TEST(Options, WhatFollowsIsFilledInAfterParsing) {
  SendArgs args;
  EXPECT_EQ(parse(&args, {}), "");
  EXPECT_EQ(args.shared.folder, "home");
}

TEST(Options, HelpShowsUnitsAndDefaults) {
  SendArgs args;
  CLI::App app;
  args.add_to(app);
  const std::string help = app.help();
  EXPECT_THAT(help, HasSubstr("plain|fancy"));
  EXPECT_THAT(help, HasSubstr("TIME=90s"));
  EXPECT_THAT(help, HasSubstr("TIME=250ms"));
  EXPECT_THAT(help, HasSubstr("BYTES=4MiB"));
  EXPECT_THAT(help, HasSubstr("=256"));
}

TEST(Options, WhatIsWrongIsNamed) {
  SendArgs args;
  EXPECT_THAT(parse(&args, {"--share", "2"}), HasSubstr("--share: 2 is not between 0 and 1"));
  EXPECT_THAT(parse(&args, {"--queued", "many"}), HasSubstr("'many' is not a whole number"));
  EXPECT_THAT(parse(&args, {"--kind", "odd"}), HasSubstr("'odd' is none of plain|fancy"));
  EXPECT_THAT(parse(&args, {"-d", "soon"}), HasSubstr("--delay"));
  EXPECT_THAT(parse(&args, {"--sizes", "1,-2"}), HasSubstr("--sizes"));
}

TEST(Options, WhatWouldDoNothingIsRefused) {
  SendArgs args;
  EXPECT_THAT(parse(&args, {"--loud"}), HasSubstr("--folder"));
  SendArgs both;
  EXPECT_THAT(parse(&both, {"--loud", "--quiet", "--folder", "x"}), HasSubstr("excludes"));
  CLI::App app;  // asked for what was given
  SendArgs given;
  EXPECT_EQ(parse(&app, &given, {"--queued", "3"}), "");
  EXPECT_TRUE(given.refuse({&given.kind}, "does nothing").ok());
  const Status refused = given.refuse({&given.kind, &given.limits.queued}, "does nothing here");
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_EQ(refused.message(), "--queued does nothing here");
}

TEST(Options, WhatWasGivenCanBeSaidAgain) {
  CLI::App app;  // asked for what was given
  SendArgs given;
  EXPECT_EQ(parse(&app, &given,
                  {"-d", "2m", "--sizes", "3,4", "--sizes=5", "--share", "0.25", "--folder", "x y",
                   "--loud", "--secret", "s"}),
            "");
  const Options::Given said = given.given_but({&given.share});
  EXPECT_THAT(said.args,
              ElementsAre("--delay=2m", "--sizes=3,4", "--sizes=5", "--loud", "--folder=x y"));
  EXPECT_THAT(said.environment, ElementsAre("HCACHE_SECRET=s"));
  SendArgs again;
  EXPECT_EQ(parse(&again, said.args), "");
  EXPECT_EQ(again.sizes, given.sizes);
  EXPECT_EQ(again.delay_ns, given.delay_ns);
  EXPECT_EQ(again.shared.folder, "x y");
}

TEST(Options, AVerbMayTakeAPartOfAGroup) {
  FewArgs few;
  EXPECT_EQ(parse(&few, {"--room", "1KiB"}), "");
  EXPECT_EQ(few.shared.room, 1024U);
  EXPECT_NE(parse(&few, {"--folder", "x"}), "");
  WithheldArgs withheld;
  EXPECT_NE(parse(&withheld, {"--room", "1KiB"}), "");
  EXPECT_EQ(parse(&withheld, {"--folder", "x"}), "");
}

}  // namespace
}  // namespace hcache::cli
