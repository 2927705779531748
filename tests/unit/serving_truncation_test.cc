// Conversations that outgrow the context, on the engine: they are answered and held alike whether
// they are computed in one go, turn by turn, beside others or again from what was saved.
#include <ggml.h>

#include <cmath>
#include <cstring>

#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr policy::TruncationLimits kLimits{
    .context = 256, .share = 0.5, .keep_first = 4, .important = 0.5};

class TruncationTest : public ::testing::TestWithParam<const char*> {
 protected:
  TruncationTest()
      : model_(make_tiny(dir_, tiny_options(GetParam(), 2, GGML_TYPE_Q8_0))),
        options_(tiny_runtime(model_, dir_.file("state"))) {}

  void check_chosen(const policy::TruncationLimits& wanted);

  // Of the rows that are held in the end.
  static std::vector<std::byte> held_state(Serving& serving, const Said& said, int64_t length) {
    return read_state(serving, said.seq, static_cast<int>(length - said.outcome.dropped_tokens));
  }

  // K and V in turn, a layer's after the other's: V to the bit, K within what F16 rounds.
  static void expect_near(const std::vector<std::byte>& a, const std::vector<std::byte>& b,
                          size_t halves) {
    ASSERT_EQ(a.size(), b.size());
    const size_t n = a.size() / halves;
    for (size_t half = 0; half < halves; ++half) {
      float largest = 0;
      float difference = 0;
      for (size_t at = half * n; at < (half + 1) * n; at += sizeof(ggml_fp16_t)) {
        const auto value = [&](const std::vector<std::byte>& from) {
          ggml_fp16_t x;
          std::memcpy(&x, from.data() + at, sizeof(x));
          return ggml_fp16_to_fp32(x);
        };
        largest = std::max(largest, std::abs(value(a)));
        difference = std::max(difference, std::abs(value(a) - value(b)));
      }
      EXPECT_LE(difference, half % 2 == 0 ? 4e-3F * largest : 0.0F);
    }
  }

  TempDir dir_;
  std::string model_;
  RuntimeOptions options_;
};

TEST_P(TruncationTest, ItDoesNotMatterHowTheChainCameAbout) {
  const How cut{.truncation = kLimits};
  std::vector<int32_t> chain = random_tokens(200, 1);
  std::vector<Said> turns;
  std::vector<std::byte> state;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    for (uint32_t turn = 0; turn < 12; ++turn) {
      // Another conversation, which shares its steps and takes its place in the arena.
      say(*serving, random_tokens(300, 50 + turn), 20, cut);
      turns.push_back(say(*serving, chain, 30, cut));
      const Said& said = turns.back();
      EXPECT_EQ(said.outcome.dropped_before + said.outcome.resident_tokens +
                    said.record().restored_tokens + said.outcome.new_tokens,
                static_cast<int64_t>(chain.size()));
      if (turn > 0) {
        EXPECT_GT(said.outcome.resident_tokens + said.record().restored_tokens, 0);
      }
      chain.insert(chain.end(), said.answer.begin(), said.answer.end());
      if (turn < 11) {
        const auto question = random_tokens(25, 100 + turn);
        chain.insert(chain.end(), question.begin(), question.end());
      }
    }
    ASSERT_GT(turns.back().outcome.dropped_tokens, 256);
    state = held_state(*serving, turns.back(), static_cast<int64_t>(chain.size()));
    ASSERT_TRUE(serving->close().ok());
  }
  std::vector<int32_t> asked = chain;
  asked.resize(asked.size() - 30);
  const auto expect_same = [&](Serving& serving, const Said& said) {
    EXPECT_EQ(said.logits, turns.back().logits);
    EXPECT_EQ(said.answer, turns.back().answer);
    EXPECT_EQ(said.outcome.dropped_tokens, turns.back().outcome.dropped_tokens);
    EXPECT_TRUE(held_state(serving, said, static_cast<int64_t>(chain.size())) == state);
    ASSERT_TRUE(serving.close().ok());
  };
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    How anew = cut;
    anew.cache = CacheUse::kNone;
    expect_same(*serving, say(*serving, asked, 30, anew));
  }
  // From what was saved. Of the rows that are held none has moved more than once with these limits:
  // so moving them from where they were saved gives the same bits.
  const int64_t restored = static_cast<int64_t>(asked.size()) - 1;
  const auto restore = [&](Serving& serving, policy::Mode mode, int n_answer) {
    How again = cut;
    again.mode = mode;
    again.save = false;
    Said said = say(serving, asked, n_answer, again);
    EXPECT_EQ(said.record().restored_tokens + said.outcome.dropped_before, restored);
    EXPECT_EQ(said.outcome.new_tokens, 1);
    return said;
  };
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    expect_same(*serving, restore(*serving, policy::Mode::kKv, 30));
  }
  // K that is projected where it stands now was rounded once, and not before it was moved, too.
  std::vector<std::byte> loaded;
  for (const policy::Mode mode : {policy::Mode::kKv, policy::Mode::kHidden, policy::Mode::kPlan}) {
    SCOPED_TRACE(policy::mode_name(mode));
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    const Said said = restore(*serving, mode, 0);
    const std::vector<std::byte> held = held_state(*serving, said, restored);
    if (loaded.empty()) loaded = held;
    const int n_layer = serving->runtime().model().hparams().n_layer;
    expect_near(held, loaded, 2 * static_cast<size_t>(n_layer));
    const bool projected = said.record().hidden_pages.total() > 0;
    EXPECT_TRUE(mode == policy::Mode::kPlan || projected == (mode == policy::Mode::kHidden));
    EXPECT_EQ(held == loaded, !projected);
    ASSERT_TRUE(serving->close().ok());
  }
}

// As plans save by default: the first layer's K and V come from the tokens.
TEST_P(TruncationTest, WhatIsHeldComesBackWithoutTheFirstLayersPages) {
  options_.save = policy::SaveMode::kPlan;
  const How cut{.truncation = kLimits};
  std::vector<int32_t> chain = random_tokens(200, 1);
  std::vector<std::byte> state;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    ASSERT_EQ(serving->runtime().save_plan().layers[0], policy::kNoEncoding);
    for (int turn = 0; turn < 5; ++turn) {
      const Said said = say(*serving, chain, 60, cut);
      chain.insert(chain.end(), said.answer.begin(), said.answer.end());
      if (turn < 4) continue;
      ASSERT_GT(said.outcome.dropped_tokens, 128);
      state = held_state(*serving, said, static_cast<int64_t>(chain.size()) - 1);
    }
    ASSERT_TRUE(serving->close().ok());
  }
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const auto restored = static_cast<int64_t>(chain.size()) - 1;
  const Said said = say(*serving, chain, 0, cut);
  EXPECT_EQ(said.record().restored_tokens + said.outcome.dropped_before, restored);
  EXPECT_EQ(said.outcome.new_tokens, 1);
  const int n_layer = serving->runtime().model().hparams().n_layer;
  expect_near(held_state(*serving, said, restored), state, 2 * static_cast<size_t>(n_layer));
  ASSERT_TRUE(serving->close().ok());
}

// Rows that attention chose stay in their places, whatever their number of cuts, unless it is asked
// not to choose; a page that tells of them and is damaged costs what it tells of.
void TruncationTest::check_chosen(const policy::TruncationLimits& wanted) {
  const How cut{.truncation = wanted};
  std::vector<int32_t> chain = random_tokens(900, 1);
  Said said;
  std::vector<std::byte> state;
  int64_t cut_at = 0;
  bool chooses = false;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    chooses = serving->why_no_choice().empty();
    EXPECT_EQ(chooses, GetParam() != std::string("gemma3"));  // whose layers see windows
    said = say(*serving, chain, 10, cut);
    state = held_state(*serving, said, 910);
    How recent = cut;
    recent.truncation->important = 0;
    const Said other = say(*serving, chain, 10, recent);
    EXPECT_EQ(other.outcome.dropped_tokens, said.outcome.dropped_tokens);
    EXPECT_EQ(held_state(*serving, other, 910) == state, !chooses);
    policy::TruncationLimits limits = wanted;
    limits.context = std::min<int64_t>(limits.context, serving->context());
    if (!chooses) limits.important = 0;
    const auto cuts = policy::cuts_of(chain, limits, {});
    cut_at = cuts.back().cut_at;
    EXPECT_EQ(cuts.back().chosen > 0, chooses);
    ASSERT_TRUE(serving->close().ok());
  }
  if (!chooses) return;
  for (const bool damaged : {false, true}) {
    SCOPED_TRACE(damaged);
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    if (damaged) {
      // As a checksum that fails leaves it.
      const auto cuts = policy::cuts_of(chain, wanted, {});
      const auto match = serving->runtime().match(chain, own_salt("").id, cuts);
      const auto at =
          std::find_if(match.chunks.begin(), match.chunks.end(), [&](const auto& chunk) {
            return chunk.chunk.info().first_position == static_cast<uint64_t>(cut_at);
          });
      ASSERT_NE(at, match.chunks.end());
      const store::ChunkInfo& info = at->chunk.info();
      ASSERT_NE(info.find_page(0, store::Encoding::kChosen), nullptr);
      ASSERT_TRUE(
          serving->runtime().store()->quarantine(info.id, 0, store::Encoding::kChosen).ok());
    }
    How again = cut;
    again.mode = policy::Mode::kKv;
    const Said back = say(*serving, chain, 10, again);
    EXPECT_EQ(back.record().restored_tokens, damaged ? 255 : 899 - back.outcome.dropped_before);
    EXPECT_EQ(back.logits, said.logits);
    EXPECT_EQ(back.answer, said.answer);
    EXPECT_TRUE(held_state(*serving, back, 910) == state);
    ASSERT_TRUE(serving->close().ok());
  }
}

TEST_P(TruncationTest, ChosenRowsComeBackOrAreChosenAgain) { check_chosen(kLimits); }

// Some of those that an earlier cut chose stay at the next one.
TEST_P(TruncationTest, RowsThatWereChosenTwiceDoAsWell) {
  policy::TruncationLimits limits = kLimits;
  limits.share = 0.25;
  check_chosen(limits);
}

TEST_P(TruncationTest, WhatFitsIsAnsweredAsWithoutIt) {
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const std::vector<int32_t> chain = random_tokens(200, 1);
  const Said exact = say(*serving, chain, 30, {.cache = CacheUse::kNone});
  const Said cut = say(*serving, chain, 30, {.cache = CacheUse::kNone, .truncation = kLimits});
  EXPECT_EQ(cut.logits, exact.logits);
  EXPECT_EQ(cut.answer, exact.answer);
  EXPECT_EQ(cut.outcome.dropped_tokens, 0);
}

// What is saved of a conversation that was cut is exact, and ends where it was cut.
TEST_P(TruncationTest, NothingIsSavedThatIsNotExact) {
  const std::vector<int32_t> chain = random_tokens(500, 1);
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  say(*serving, chain, 5, {.truncation = kLimits});
  ASSERT_TRUE(serving->flush().ok());
  EXPECT_EQ(saved_tokens(*serving, chain), 256);
  const Said exact = say(*serving, chain, 5);
  EXPECT_EQ(exact.record().restored_tokens, 256);
  const Said fresh = say(*serving, chain, 5, {.cache = CacheUse::kNone});
  EXPECT_EQ(exact.logits, fresh.logits);
  EXPECT_EQ(exact.answer, fresh.answer);
}

INSTANTIATE_TEST_SUITE_P(Architectures, TruncationTest,
                         ::testing::Values("llama", "qwen3", "gemma3"),
                         [](const auto& info) { return std::string(info.param); });

TEST(TruncationRefused, WithLearnedPositions) {
  const TempDir dir;
  const auto serving =
      open(tiny_runtime(make_tiny(dir, tiny_options("opt", 2, GGML_TYPE_F16)), dir.file("state")));
  ASSERT_NE(serving, nullptr);
  EXPECT_NE(serving->why_no_cuts().find("learned positions"), std::string::npos);
  scheduler::Request request;
  request.tokens = random_tokens(static_cast<int>(serving->context()) + 1, 1);
  request.max_new_tokens = 0;
  request.truncation = kLimits;
  EXPECT_EQ(serving->run(std::move(request)).code(), Code::kOutOfRange);
  // What fits needs no cut.
  EXPECT_EQ(say(*serving, random_tokens(50, 1), 5, {.truncation = kLimits}).answer.size(), 5U);
}

}  // namespace
}  // namespace hcache::serving
