// Conversations with pictures: restored by another process they answer as if they had never been
// interrupted, and no projector runs for what comes back.
#include <gmock/gmock.h>

#include "media_testing.h"
#include "model/chat.h"
#include "serving/media.h"
#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using hcache::testing::kMediaCases;
using hcache::testing::make_media_model;
using hcache::testing::MediaCase;
using hcache::testing::MediaModel;
using hcache::testing::picture;

struct Prompt {
  std::vector<int32_t> tokens;
  scheduler::MediaRef media;
};

// Text around each picture that is longer than a chunk.
std::string story(size_t n_pictures) {
  std::string text;
  for (size_t i = 0; i < n_pictures; ++i) {
    for (int k = 0; k < 20; ++k) text += " The ship " + std::to_string(i * 20 + k) + " sails on.";
    text += model::kMediaMarker;
  }
  return text + " What is it that can be seen here?";
}

class ServingMedia : public ::testing::TestWithParam<MediaCase> {
 protected:
  ServingMedia() : files_(make_media_model(dir_, GetParam())) {
    options_ = tiny_runtime(files_.model, dir_.file("state"));
    options_.device = "cpu";
    options_.engine.arena_tokens = 2048;
    options_.forward = state::EngineChoice::kAuto;
    options_.projector.path = files_.projector;
  }

  static Prompt prompt(Serving& serving, const std::vector<std::string>& files,
                       const std::string& more = "") {
    auto made = serving.media()->tokenise(story(files.size()) + more, files, true);
    EXPECT_TRUE(made.ok()) << made.status().to_string();
    if (!made.ok()) return {};
    return {made->tokens, std::make_shared<MediaParts>(*made)};
  }
  static Said say(Serving& serving, const Prompt& prompt, int n, How how = {}) {
    how.media = prompt.media;
    return testing::say(serving, prompt.tokens, n, how);
  }

  TempDir dir_;
  MediaModel files_;
  RuntimeOptions options_;
};

TEST_P(ServingMedia, AnotherProcessGoesOn) {
  const std::vector<std::string> files = {picture(90, 60, 1), picture(50, 120, 2)};
  Said first, second;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    ASSERT_NE(serving->media(), nullptr);
    first = say(*serving, prompt(*serving, files), 9);
    EXPECT_EQ(serving->media()->encoded(), 2);
    // Another turn, of the same sequence.
    second = say(*serving, prompt(*serving, files, " And then there was nothing more to see."), 9);
    EXPECT_GT(second.outcome.resident_tokens, 0);
    EXPECT_EQ(serving->media()->encoded(), 2);
    const Said alone =
        say(*serving, prompt(*serving, files, " And then there was nothing more to see."), 9,
            {.save = false, .cache = CacheUse::kNone});
    EXPECT_EQ(second.answer, alone.answer);
    ASSERT_TRUE(serving->close().ok());
  }
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Said again =
      say(*serving, prompt(*serving, files, " And then there was nothing more to see."), 9);
  EXPECT_GT(again.record().restored_tokens, 128);
  EXPECT_EQ(again.answer, second.answer);
  EXPECT_LE(serving->media()->encoded(), 1);  // the last picture's may lie behind the last snapshot
  if (!GetParam().snapshots) {
    EXPECT_EQ(serving->media()->encoded(), 0);
  }
  // Another picture in the same words shares what is before it alone.
  const std::vector<std::string> others = {picture(90, 60, 7), files[1]};
  const Prompt other = prompt(*serving, others);
  const Said shared = say(*serving, other, 9);
  const Said alone = say(*serving, other, 9, {.save = false, .cache = CacheUse::kNone});
  EXPECT_EQ(shared.answer, alone.answer);
  EXPECT_LE(shared.outcome.resident_tokens + shared.record().restored_tokens,
            static_cast<const MediaParts&>(*other.media).rows()->runs()[0].first);
}

TEST_P(ServingMedia, StepsAreAsSmallAsTheyMayBe) {
  const std::vector<std::string> files = {picture(90, 60, 1), picture(50, 120, 2)};
  const auto whole = open(options_);
  ASSERT_NE(whole, nullptr);
  const Said expected = say(*whole, prompt(*whole, files), 9, {.cache = CacheUse::kNone});
  ASSERT_TRUE(whole->close().ok());
  ServingOptions options;
  options.runtime = options_;
  options.runtime.use_store = false;
  options.scheduler.batch.max_step_tokens = 5;
  options.scheduler.batch.max_sequences = 4;
  auto small = Serving::open(Env::real(), options);
  ASSERT_TRUE(small.ok()) << small.status().to_string();
  EXPECT_EQ(say(**small, prompt(**small, files), 9).answer, expected.answer);
}

TEST_P(ServingMedia, AChainWithPicturesNeedsThem) {
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Prompt with = prompt(*serving, {picture(90, 60, 1)});
  scheduler::Request request;
  request.tokens = with.tokens;
  request.max_new_tokens = 0;
  const auto refused = serving->run(std::move(request));
  EXPECT_EQ(refused.code(), Code::kFailedPrecondition);
}

INSTANTIATE_TEST_SUITE_P(Kinds, ServingMedia, ::testing::ValuesIn(kMediaCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(ServingProjector, NeedsLibllama) {
  const TempDir dir;
  const MediaModel files = make_media_model(dir, kMediaCases[0]);
  ServingOptions options;
  options.runtime = tiny_runtime(files.model, dir.file("state"));
  options.runtime.projector.path = files.projector;
  options.runtime.forward = state::EngineChoice::kOwn;
  const auto refused = Serving::open(Env::real(), options);
  EXPECT_EQ(refused.code(), Code::kUnimplemented);
  EXPECT_THAT(refused.status().to_string(), ::testing::HasSubstr("--mmproj"));
}

}  // namespace
}  // namespace hcache::serving
