// Conversations longer than the window that some layers see: a restore reads what these need alone,
// and goes on as if nothing had been dropped.
#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int kPrompt = 1380;
constexpr policy::TruncationLimits kLimits{.context = 1600, .share = 0.5, .keep_first = 4};

struct Case {
  const char* arch;
  ggml_type type;
};

class WindowsTest : public ::testing::TestWithParam<Case> {
 protected:
  WindowsTest()
      : model_(make_tiny(dir_, tiny_options(GetParam().arch, 2, GetParam().type))),
        options_(tiny_runtime(model_, dir_.file("state"))) {
    options_.engine.arena_tokens = 4096;
    options_.engine.window_sequences = 4;
  }

  // Of the K and V of a conversation's n rows, those that a restore may read: whole chunks, of
  // which the last has more tokens by now.
  static int64_t needed_rows(const engine::Engine& engine, int64_t n) {
    int64_t rows = 0;
    for (int layer = 0; layer < engine.n_layer(); ++layer) {
      rows += (n + 63) / 64 * 64 - engine.first_row_needed(layer, n) / 64 * 64;
    }
    return rows;
  }

  TempDir dir_;
  std::string model_;
  RuntimeOptions options_;
};

TEST_P(WindowsTest, RestoresReadTheWindowAndGoOn) {
  Reference ref;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    ref = hold_conversation(*serving, kPrompt, 21);
    ASSERT_TRUE(serving->close().ok());
  }
  const auto n_saved = static_cast<int64_t>(ref.all().size()) - 1;
  for (const policy::Mode mode :
       {policy::Mode::kKv, policy::Mode::kHidden, policy::Mode::kPlan, policy::Mode::kNaiveHybrid,
        policy::Mode::kTokenPartition, policy::Mode::kRecompute}) {
    SCOPED_TRACE(policy::mode_name(mode));
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    const Said said = say(*serving, ref.all(), 8, {.mode = mode, .save = false});
    const policy::RestoreRecord record = said.record();
    SCOPED_TRACE(record.schedule);
    EXPECT_EQ(record.restored_tokens, mode == policy::Mode::kRecompute ? 0 : n_saved);
    EXPECT_EQ(said.answer, ref.said.answer);
    // Other types' products have kernels of their own for few rows.
    if (mode == policy::Mode::kKv && GetParam().type == GGML_TYPE_Q8_0) {
      EXPECT_EQ(said.logits, ref.said.logits);
    }
    if (mode == policy::Mode::kKv && options_.pack == policy::PackMode::kOff) {
      const engine::Engine& engine = serving->runtime().engine();
      const auto row_bytes = static_cast<int64_t>(2 * engine.kv_row_bytes());
      EXPECT_LE(static_cast<int64_t>(record.kv_pages.total()),
                needed_rows(engine, n_saved) * row_bytes);
      EXPECT_LT(3 * needed_rows(engine, n_saved), 2 * n_saved * engine.n_layer());
    }
    ASSERT_TRUE(serving->close().ok());
  }
}

// What a conversation holds may be too late for one that leaves it early: that one comes from the
// store.
TEST_P(WindowsTest, AnEarlyBranchIsRestored) {
  std::vector<int32_t> branch = random_tokens(400, 1);
  const auto more = random_tokens(25, 9);
  branch.insert(branch.end(), more.begin(), more.end());
  Said expected;
  {
    RuntimeOptions elsewhere = options_;
    elsewhere.state_dir = dir_.file("elsewhere");
    const auto serving = open(elsewhere);
    expected = say(*serving, branch, 8);
    ASSERT_TRUE(serving->close().ok());
  }
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const auto long_one = random_tokens(kPrompt, 1);
  say(*serving, long_one, 20);
  ASSERT_TRUE(serving->flush().ok());
  const Said said = say(*serving, branch, 8, {.mode = policy::Mode::kKv});
  EXPECT_EQ(said.outcome.resident_tokens, 0);
  EXPECT_EQ(said.record().restored_tokens, 400);
  EXPECT_EQ(said.logits, expected.logits);
  EXPECT_EQ(said.answer, expected.answer);

  // A late one goes on from what is there.
  std::vector<int32_t> late(long_one.begin(), long_one.end() - 30);
  late.insert(late.end(), more.begin(), more.end());
  EXPECT_EQ(say(*serving, late, 8).outcome.resident_tokens, kPrompt - 30);
  ASSERT_TRUE(serving->close().ok());
}

// A page that is damaged costs the other encoding of it, or what comes behind its chunk.
TEST_P(WindowsTest, DamageCostsRowsAndNoAnswer) {
  if (options_.pack != policy::PackMode::kOff) GTEST_SKIP() << "pages are found by their bytes";
  options_.save = policy::SaveMode::kKv;
  Reference ref;
  {
    const auto serving = open(options_);
    ref = hold_conversation(*serving, kPrompt, 21);
    ASSERT_TRUE(serving->close().ok());
  }
  const size_t chunk = kPrompt / 64 - 1;  // in the window
  damage_page(options_, ref.all(), chunk, 1, false);
  const Restored restored = restore(options_, ref, {.mode = policy::Mode::kKv});
  EXPECT_EQ(restored.record.damaged_pages, 1U);
  EXPECT_EQ(restored.record.restored_tokens, static_cast<int64_t>(chunk) * 64);
  EXPECT_EQ(restored.said.answer, ref.said.answer);
}

// Cut in the arena with a part of the rows there, and restored.
TEST_P(WindowsTest, LongConversationsAreTruncated) {
  const How cut{.mode = policy::Mode::kKv, .truncation = kLimits};
  std::vector<int32_t> chain = random_tokens(kPrompt, 1);
  std::vector<int32_t> asked;
  Said last;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    for (uint32_t turn = 0; turn < 3; ++turn) {
      const auto question = random_tokens(100, 100 + turn);
      chain.insert(chain.end(), question.begin(), question.end());
      asked = chain;
      last = say(*serving, chain, 30, cut);
      EXPECT_TRUE(turn == 0 || last.outcome.resident_tokens > 0);
      chain.insert(chain.end(), last.answer.begin(), last.answer.end());
    }
    EXPECT_GT(last.outcome.dropped_tokens, 0);
    ASSERT_TRUE(serving->close().ok());
  }
  for (const bool anew : {true, false}) {
    SCOPED_TRACE(anew ? "computed" : "restored");
    How again = cut;
    again.save = false;
    if (anew) again.cache = CacheUse::kNone;
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    const Said said = say(*serving, asked, 30, again);
    EXPECT_EQ(said.record().restored_tokens > 0, !anew);
    EXPECT_EQ(said.outcome.dropped_tokens, last.outcome.dropped_tokens);
    EXPECT_EQ(said.answer, last.answer);
    ASSERT_TRUE(serving->close().ok());
  }
}

// Five of six layers see 1,024 rows, as Gemma 3's do: of 8,192 tokens a restore reads less than a
// third.
TEST(Windows, ARestoreReadsLessThanAThirdOfGemma3sRows) {
  const TempDir dir;
  model::SynthOptions shape = tiny_options("gemma3", 1, GGML_TYPE_Q8_0);
  shape.shape.n_layer = 12;
  shape.shape.n_window = 1024;
  shape.shape.window_period = 6;
  shape.shape.n_ctx = 16384;
  RuntimeOptions options = tiny_runtime(make_tiny(dir, shape), dir.file("state"));
  options.engine.arena_tokens = 8704;
  options.engine.max_batch_rows = 512;
  options.engine.window_sequences = 1;
  options.save = policy::SaveMode::kKv;
  options.pack = policy::PackMode::kOff;
  constexpr int kTokens = 8192;
  const std::vector<int32_t> tokens = random_tokens(kTokens + 1, 1);
  Said before;
  {
    const auto serving = open(options);
    before = say(*serving, tokens, 6);
    ASSERT_TRUE(serving->close().ok());
  }
  const auto serving = open(options);
  const Said said = say(*serving, tokens, 6, {.mode = policy::Mode::kKv, .save = false});
  const policy::RestoreRecord record = said.record();
  const engine::Engine& engine = serving->runtime().engine();
  EXPECT_EQ(record.restored_tokens, kTokens);
  const auto all = static_cast<double>(2 * engine.kv_row_bytes()) * kTokens * engine.n_layer();
  EXPECT_LE(static_cast<double>(record.kv_pages.total()), 0.32 * all);
  EXPECT_EQ(said.logits, before.logits);
  EXPECT_EQ(said.answer, before.answer);
  ASSERT_TRUE(serving->close().ok());
}

INSTANTIATE_TEST_SUITE_P(
    Models, WindowsTest,
    ::testing::Values(Case{"gemma3", GGML_TYPE_Q8_0}, Case{"gemma3", GGML_TYPE_F16},
                      Case{"gpt-oss", GGML_TYPE_Q8_0}, Case{"cohere2", GGML_TYPE_Q4_K}),
    [](const auto& info) {
      std::string name = std::string(info.param.arch) + "_" + ggml_type_name(info.param.type);
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

}  // namespace
}  // namespace hcache::serving
