// Conversations with models on libllama: what is saved of them, restored by another process,
// forked, cut back and damaged, they answer as without. By rows (llama, and a multi-head model with
// fused weights), and by rows and snapshots of windows (gemma3).
#include <gmock/gmock.h>

#include <csignal>

#include "redis_testing.h"
#include "serving_testing.h"
#include "state/snapshot_pages.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

constexpr int kPrompt = 700;  // longer than the tiny windows
constexpr int kAnswer = 21;

struct Case {
  const char* arch;
  int n_head_kv;
  ggml_type type;
  bool snapshots;
};

class LlamaServing : public ::testing::TestWithParam<Case> {
 protected:
  LlamaServing()
      : model_(
            make_tiny(dir_, tiny_options(GetParam().arch, GetParam().n_head_kv, GetParam().type))),
        options_(tiny_runtime(model_, dir_.file("state"))) {
    options_.device = "cpu";
    options_.engine.arena_tokens = 4096;
    options_.forward = state::EngineChoice::kLlama;
  }

  // A prompt with its answer, then a question with another.
  struct Talk {
    std::vector<int32_t> history = random_tokens(kPrompt, 1);
    Said second;

    [[nodiscard]] std::vector<int32_t> all() const {
      std::vector<int32_t> tokens = history;
      const std::vector<int32_t> question = random_tokens(20, 2);
      tokens.insert(tokens.end(), question.begin(), question.end());
      return tokens;
    }
  };
  static Talk talk(Serving& serving) {
    Talk talk;
    say(serving, random_tokens(7, 3), 0);  // a sequence's number must not pass for a position
    const Said first = say(serving, talk.history, kAnswer);
    talk.history.insert(talk.history.end(), first.answer.begin(), first.answer.end());
    EXPECT_TRUE(serving.flush().ok());
    talk.second = say(serving, talk.all(), 8);
    return talk;
  }
  // Of the second prompt, what another process restores: the answer to it has been saved, so that
  // there is a snapshot behind the last whole chunk alone.
  [[nodiscard]] static int64_t restored(const Talk& talk) {
    const auto all = static_cast<int64_t>(talk.all().size()) - 1;
    return GetParam().snapshots ? all / 64 * 64 : all;
  }
  // What the second prompt goes on from in the process that made the first answer.
  [[nodiscard]] static int64_t flushed(const Talk& talk) {
    return static_cast<int64_t>(talk.history.size());
  }

  TempDir dir_;
  std::string model_;
  RuntimeOptions options_;
};

TEST_P(LlamaServing, AnotherProcessGoesOn) {
  Talk before;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    ASSERT_NE(serving->runtime().llama(), nullptr);
    EXPECT_EQ(serving->runtime().llama()->engine->layout().snapshots, GetParam().snapshots);
    before = talk(*serving);
    EXPECT_EQ(before.second.outcome.resident_tokens, flushed(before));
    ASSERT_TRUE(serving->close().ok());
  }
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Said again = say(*serving, before.all(), 8);
  EXPECT_EQ(again.record().restored_tokens, restored(before));
  EXPECT_GT(again.record().kv_pages.total(), 0U);
  EXPECT_EQ(again.answer, before.second.answer);
  // And the conversation that was restored is saved in its turn.
  ASSERT_TRUE(serving->flush().ok());
  std::vector<int32_t> longer = before.all();
  longer.insert(longer.end(), again.answer.begin(), again.answer.end());
  EXPECT_EQ(saved_tokens(*serving, longer), static_cast<int64_t>(longer.size()));
  EXPECT_TRUE(serving->runtime().store()->check_integrity().ok());
}

// What another server has put into the remote store comes from there, snapshots included; where
// that store answers no more, it is computed.
TEST_P(LlamaServing, AnotherServerGoesOnFromTheRemoteStore) {
  hcache::testing::RedisServer redis;
  options_.remote.url = redis.url();
  Talk before;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    before = talk(*serving);
    ASSERT_TRUE(serving->close().ok());
  }
  const auto look_up = [&](Serving& serving) {
    serving.runtime().look_up(before.all(), own_salt("").id, {});
    return saved_tokens(serving, before.all());
  };
  for (const bool answers : {true, false}) {
    options_.state_dir = dir_.file(answers ? "second" : "third");
    options_.remote.timeout_s = answers ? 60 : 5;
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    // Where it knows how fast it computes, it waits no longer than that takes, or than it was told.
    if (!answers) say(*serving, random_tokens(96, 4), 1, {.save = false});
    EXPECT_GT(look_up(*serving), kPrompt);
    if (!answers) redis.signal(SIGSTOP);
    const Said again = say(*serving, before.all(), 8);
    if (!answers) redis.signal(SIGCONT);
    EXPECT_EQ(again.answer, before.second.answer);
    if (answers) {
      EXPECT_EQ(again.record().restored_tokens, restored(before) / 64 * 64);  // whole chunks
      EXPECT_GT(again.record().read.remote, 0U);
      EXPECT_EQ(again.record().read.disk, 0U);
    } else {
      EXPECT_EQ(again.record().restored_tokens, 0);
    }
    ASSERT_TRUE(serving->close().ok());
  }
}

// The beginnings of a conversation: those that a model can't be cut back to come from the store, or
// are computed.
TEST_P(LlamaServing, BranchesAnswerAsAlone) {
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Talk before = talk(*serving);
  std::vector<int32_t> branch(before.history.begin(), before.history.begin() + 500);
  const std::vector<int32_t> other = random_tokens(30, 9);
  branch.insert(branch.end(), other.begin(), other.end());
  const Said reused = say(*serving, branch, 8);
  const Said alone = say(*serving, branch, 8, {.cache = CacheUse::kNone});
  EXPECT_EQ(reused.answer, alone.answer);
  if (!GetParam().snapshots) {
    EXPECT_EQ(reused.outcome.resident_tokens, 500);
  }
}

TEST_P(LlamaServing, DamagedStateIsComputedAgain) {
  Talk before;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    before = talk(*serving);
    ASSERT_TRUE(serving->close().ok());
  }
  EXPECT_GT(damage_page(options_, before.all(), 5, 0, false), 0U);
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Said again = say(*serving, before.all(), 8);
  EXPECT_EQ(again.record().restored_tokens, GetParam().snapshots ? 0 : 5 * 64);
  EXPECT_EQ(again.record().damaged_pages, 1U);
  EXPECT_EQ(again.answer, before.second.answer);
}

// Nothing of one engine's state is taken by the other.
TEST_P(LlamaServing, StateIsOneEnginesOwn) {
  Talk before;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    before = talk(*serving);
    ASSERT_TRUE(serving->close().ok());
  }
  RuntimeOptions own = options_;
  own.forward = state::EngineChoice::kAuto;  // which has the architecture
  const auto serving = open(own);
  ASSERT_NE(serving, nullptr);
  EXPECT_EQ(serving->runtime().llama(), nullptr);
  EXPECT_EQ(serving->runtime().card().engine, "own");
  EXPECT_EQ(saved_tokens(*serving, before.all()), 0);
}

TEST_P(LlamaServing, WithoutAStoreItStaysInMemory) {
  options_.use_store = false;
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Talk before = talk(*serving);
  EXPECT_EQ(before.second.outcome.resident_tokens, flushed(before));
  EXPECT_EQ(serving->runtime().saver_stats(), std::nullopt);
}

// More conversations than the cache holds: the oldest leave it, and come back from the store.
TEST_P(LlamaServing, WhatLeavesTheCacheComesBack) {
  options_.engine.arena_tokens = 1024;
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  std::vector<std::vector<int32_t>> answers;
  for (uint32_t i = 0; i < 4; ++i) {
    answers.push_back(say(*serving, random_tokens(600, 10 + i), 8).answer);
    ASSERT_TRUE(serving->flush().ok());
  }
  for (uint32_t i = 0; i < 4; ++i) {
    std::vector<int32_t> tokens = random_tokens(600, 10 + i);
    const std::vector<int32_t>& answer = answers[i];
    tokens.insert(tokens.end(), answer.begin(), answer.end());
    const Said again = say(*serving, tokens, 4);
    const Said alone = say(*serving, tokens, 4, {.save = false, .cache = CacheUse::kNone});
    EXPECT_EQ(again.answer, alone.answer) << i;
    EXPECT_GT(again.outcome.resident_tokens + again.record().restored_tokens, 0) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, LlamaServing,
                         ::testing::Values(Case{"llama", 2, GGML_TYPE_F16, false},
                                           Case{"phi3", 4, GGML_TYPE_Q8_0, false},
                                           Case{"gemma3", 2, GGML_TYPE_F16, true}),
                         [](const auto& info) { return std::string(info.param.arch); });

// A conversation whose prompts go on from each other, with snapshots before its replies and at
// their ends.
class LlamaSnapshots : public ::testing::Test {
 protected:
  LlamaSnapshots()
      : options_(tiny_runtime(make_tiny(dir_, tiny_options("gemma3", 2, GGML_TYPE_F16)),
                              dir_.file("state"))) {
    options_.device = "cpu";
    options_.engine.arena_tokens = 4096;
    options_.forward = state::EngineChoice::kLlama;
  }

  static std::vector<int32_t> prompt(int n) { return random_tokens(n, 1); }
  static void converse(Serving& serving) {
    for (const int n : {300, 420, 480, 1000}) say(serving, prompt(n), 6);
    EXPECT_TRUE(serving.flush().ok());
  }
  // Tokens of the conversation at which there is a snapshot.
  static std::vector<uint64_t> places(Serving& serving) {
    state::Runtime& runtime = serving.runtime();
    const store::Match match = runtime.match(prompt(1000), own_salt("").id, {});
    std::vector<uint64_t> places;
    for (const store::MatchedChunk& matched : match.chunks) {
      const store::ChunkInfo& chunk = matched.chunk.info();
      if (matched.usable_rows < chunk.tokens.size()) break;
      if (state::snapshot_parts(chunk) == 0) continue;
      places.push_back(chunk.first_position + chunk.tokens.size());
    }
    return places;
  }
  static uint64_t bytes(Serving& serving) {
    return serving.runtime().store()->stat().value_or({}).snapshot_bytes;
  }

  TempDir dir_;
  RuntimeOptions options_;
};

// What has a snapshot is not written again, though it is computed again.
TEST_F(LlamaSnapshots, TheSameConversationIsSavedOnce) {
  uint64_t saved = 0;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    converse(*serving);
    EXPECT_EQ(places(*serving), (std::vector<uint64_t>{256, 384, 448, 960}));
    EXPECT_GT(serving->runtime().saver_stats()->bytes_written, 0U);
    saved = bytes(*serving);
    ASSERT_TRUE(serving->close().ok());
  }
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Said again = say(*serving, prompt(1000), 6, {.cache = CacheUse::kNone});
  EXPECT_EQ(again.record().restored_tokens, 0);
  ASSERT_TRUE(serving->flush().ok());
  EXPECT_EQ(serving->runtime().saver_stats()->bytes_written, 0U);
  EXPECT_EQ(bytes(*serving), saved);
}

// What lost its snapshot is restored up to the one before and computed from there on, with the same
// answer; its rows are still of use.
TEST_F(LlamaSnapshots, ADroppedOneIsComputedAgainFromTheOneBefore) {
  uint64_t saved = 0;
  std::vector<int32_t> branch = prompt(440);
  const std::vector<int32_t> other = random_tokens(30, 9);
  branch.insert(branch.end(), other.begin(), other.end());
  const How alone = {.save = false, .cache = CacheUse::kNone};
  std::vector<int32_t> expected;
  std::vector<int32_t> expected_end;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    converse(*serving);
    saved = bytes(*serving);
    ASSERT_TRUE(serving->close().ok());
  }
  {  // with all of them
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    const Said said = say(*serving, branch, 8, {.save = false});
    EXPECT_EQ(said.record().restored_tokens, 384);
    expected = say(*serving, branch, 8, alone).answer;
    expected_end = say(*serving, prompt(1000), 8, alone).answer;
    EXPECT_EQ(said.answer, expected);
    ASSERT_TRUE(serving->close().ok());
  }
  options_.snapshot_quota_bytes = saved * 13 / 16;  // about six of the eight
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  say(*serving, random_tokens(100, 5), 1);  // something is saved, and older ones make room
  ASSERT_TRUE(serving->flush().ok());
  EXPECT_LE(bytes(*serving), *options_.snapshot_quota_bytes);
  EXPECT_EQ(places(*serving), (std::vector<uint64_t>{256, 448, 960}));
  EXPECT_EQ(saved_tokens(*serving, prompt(1000)), 1000);  // its rows are all there

  const Said said = say(*serving, branch, 8, {.save = false});
  EXPECT_EQ(said.record().restored_tokens, 256);
  EXPECT_EQ(said.answer, expected);
  const Said end = say(*serving, prompt(1000), 8, {.save = false});
  EXPECT_EQ(end.record().restored_tokens, 960);
  EXPECT_EQ(end.answer, expected_end);
  EXPECT_TRUE(serving->runtime().store()->check_integrity().ok());
}

TEST_F(LlamaSnapshots, UnlessItIsSaidTheyHaveHalfOfTheQuota) {
  options_.store_quota_bytes = 64U << 20;
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  EXPECT_EQ(serving->runtime().store()->stat().value_or({}).snapshot_quota_bytes, 32U << 20);
}

// Whatever is said, there are never more of them than may be, and a conversation comes back.
TEST_F(LlamaSnapshots, AQuotaIsKeptToWhileConversationsGoOn) {
  constexpr uint64_t kMost = 256U << 10;  // some six
  options_.snapshot_quota_bytes = kMost;
  std::vector<int32_t> last;
  uint64_t dropped = 0;
  {
    const auto serving = open(options_);
    ASSERT_NE(serving, nullptr);
    for (uint32_t talk = 0; talk < 3; ++talk) {
      std::vector<int32_t> tokens = random_tokens(200, 20 + talk);
      for (uint32_t turn = 0; turn < 6; ++turn) {
        const Said said = say(*serving, tokens, 10);
        tokens.insert(tokens.end(), said.answer.begin(), said.answer.end());
        const std::vector<int32_t> question = random_tokens(60, 100 + turn);
        tokens.insert(tokens.end(), question.begin(), question.end());
        ASSERT_TRUE(serving->flush().ok());
        EXPECT_LE(bytes(*serving), kMost);
      }
      last = tokens;
    }
    const store::StoreStat stat = serving->runtime().store()->stat().value_or({});
    EXPECT_EQ(stat.snapshot_quota_bytes, kMost);
    dropped = stat.snapshots_dropped;
    EXPECT_TRUE(serving->runtime().store()->check_integrity().ok());
    ASSERT_TRUE(serving->close().ok());
  }
  EXPECT_GT(dropped, 0U);
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Said again = say(*serving, last, 8);
  // How much depends on the machine: snapshots are weighed by the time since they were used.
  EXPECT_GT(again.record().restored_tokens, 0);
  EXPECT_EQ(again.answer, say(*serving, last, 8, {.save = false, .cache = CacheUse::kNone}).answer);
}

TEST(LlamaServingOptions, WhatOnlyOurEngineDoesIsRefused) {
  const TempDir dir;
  const std::string model = make_tiny(dir, tiny_options("llama", 2, GGML_TYPE_F16));
  RuntimeOptions options = tiny_runtime(model, dir.file("state"));
  options.device = "cpu";
  options.forward = state::EngineChoice::kLlama;
  options.weights = model::WeightPlace::kDisk;
  ServingOptions serving;
  serving.runtime = options;
  const auto opened = Serving::open(Env::real(), serving);
  EXPECT_EQ(opened.code(), Code::kUnimplemented);
  EXPECT_THAT(opened.status().message(), HasSubstr("--weights"));
}

TEST(LlamaServingOptions, FilesThatAreNoModelsSaySo) {
  const TempDir dir;
  model::test::write_file(dir.file("bad.gguf"), std::vector<uint8_t>(100, 7));
  RuntimeOptions options = tiny_runtime(dir.file("bad.gguf"), dir.file("state"));
  options.device = "cpu";
  options.forward = state::EngineChoice::kLlama;
  ServingOptions serving;
  serving.runtime = options;
  const auto opened = Serving::open(Env::real(), serving);
  EXPECT_EQ(opened.code(), Code::kDataLoss) << opened.status().to_string();
  EXPECT_THAT(opened.status().message(), HasSubstr("bad.gguf"));
}

}  // namespace
}  // namespace hcache::serving
