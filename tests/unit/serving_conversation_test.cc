// One model, many circumstances: conversations over several processes, shared prefixes, damage.
#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "base/throttled_env.h"
#include "patience.h"
#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

class ConversationTest : public ::testing::Test {
 protected:
  ConversationTest()
      : model_(make_tiny(dir_, tiny_options("llama", 2, GGML_TYPE_Q8_0))),
        options_(tiny_runtime(model_, dir_.file("state"))) {}

  Reference first_process(int n_prompt = 150, int n_decoded = 21) {
    const auto serving = open(options_);
    if (!serving) return {};
    Reference ref = hold_conversation(*serving, n_prompt, n_decoded);
    EXPECT_TRUE(serving->close().ok());
    return ref;
  }
  void expect_same(const Restored& restored, const Reference& ref) {
    EXPECT_TRUE(restored.state == ref.state) << restored.record.schedule;
    EXPECT_EQ(restored.said.logits, ref.said.logits) << restored.record.schedule;
    EXPECT_EQ(restored.said.answer, ref.said.answer) << restored.record.schedule;
  }

  TempDir dir_;
  std::string model_;
  RuntimeOptions options_;
};

// Rotary positions other than the file's make other state, and longer contexts.
TEST_F(ConversationTest, OtherPositionsMakeAnotherState) {
  for (const state::EngineChoice engine :
       {state::EngineChoice::kOwn, state::EngineChoice::kLlama}) {
    SCOPED_TRACE(engine == state::EngineChoice::kOwn ? "own" : "libllama");
    const std::vector<int32_t> tokens = random_tokens(150, 7);
    RuntimeOptions file = options_;
    file.forward = engine;
    file.state_dir = dir_.file(engine == state::EngineChoice::kOwn ? "own" : "llama");
    RuntimeOptions yarn = file;
    yarn.rope = {
        .scaling = model::RopeOverride::Scaling::kYarn, .freq_scale = 0.25F, .orig_ctx = 64};
    RuntimeOptions linear = file;
    linear.rope.freq_scale = 0.5F;
    std::vector<Said> said;
    for (const RuntimeOptions& options : {file, yarn, linear}) {
      const auto serving = open(options);
      ASSERT_NE(serving, nullptr);
      said.push_back(say(*serving, tokens, 8));
      EXPECT_EQ(said.back().record().restored_tokens, 0);
      EXPECT_TRUE(serving->close().ok());
      if (options.rope == yarn.rope) {
        EXPECT_EQ(serving->runtime().card().n_ctx_train, 256);
      }
    }
    EXPECT_NE(said[0].logits, said[1].logits);
    EXPECT_NE(said[0].logits, said[2].logits);
    for (size_t i = 0; i < said.size(); ++i) {
      const auto serving = open(std::array{file, yarn, linear}[i]);
      const Said again = say(*serving, tokens, 8);
      EXPECT_GE(again.record().restored_tokens, 128);
      EXPECT_EQ(again.answer, said[i].answer);
    }
  }
}

// Three processes, each taking up where the last one stopped in the middle of a chunk.
TEST_F(ConversationTest, GrowsOverSeveralProcessesInEverySaveMode) {
  for (const policy::SaveMode mode : {policy::SaveMode::kKv, policy::SaveMode::kHidden,
                                      policy::SaveMode::kPlan, policy::SaveMode::kAll}) {
    SCOPED_TRACE(policy::save_mode_name(mode));
    options_.save = mode;
    options_.state_dir = dir_.file(std::string(policy::save_mode_name(mode)));

    RuntimeOptions unsaved = options_;
    unsaved.use_store = false;
    const auto uninterrupted = open(unsaved);
    ASSERT_NE(uninterrupted, nullptr);

    std::vector<int32_t> tokens = random_tokens(100, 7);
    for (int turn = 0; turn < 4; ++turn) {
      SCOPED_TRACE(turn);
      const Said expected = say(*uninterrupted, tokens, 30);
      const auto serving = open(options_);
      ASSERT_NE(serving, nullptr);
      const Said said = say(*serving, tokens, 30);
      EXPECT_EQ(said.logits, expected.logits);
      EXPECT_EQ(said.answer, expected.answer);
      if (turn > 0) {
        EXPECT_EQ(said.record().restored_tokens, static_cast<int64_t>(tokens.size()) - 17);
      }
      tokens.insert(tokens.end(), said.answer.begin(), said.answer.end());
      EXPECT_TRUE(read_state(*serving, said.seq, static_cast<int>(tokens.size())) ==
                  read_state(*uninterrupted, expected.seq, static_cast<int>(tokens.size())));
      ASSERT_TRUE(serving->close().ok());
      const auto question = random_tokens(17, 100 + turn);
      tokens.insert(tokens.end(), question.begin(), question.end());
    }
  }
}

// Two conversations that part in the middle of a chunk share what they have in common.
TEST_F(ConversationTest, SharesAPrefixDownToTheToken) {
  const Reference ref = first_process();
  std::vector<int32_t> other = ref.history;
  other.resize(100);
  const auto rest = random_tokens(40, 9);
  other.insert(other.end(), rest.begin(), rest.end());

  RuntimeOptions unsaved = options_;
  unsaved.use_store = false;
  const auto fresh = open(unsaved);
  const Said expected = say(*fresh, other, 8);

  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const Said said = say(*serving, other, 8);
  EXPECT_GE(said.record().restored_tokens, 100);
  EXPECT_EQ(said.logits, expected.logits);
  EXPECT_EQ(said.answer, expected.answer);
  // The branch is saved as well, its first chunk completed from the other's rows.
  EXPECT_TRUE(serving->flush().ok());
  EXPECT_EQ(serving->runtime().saver()->stats().rows_skipped, 0U);
  EXPECT_EQ(saved_tokens(*serving, other), static_cast<int64_t>(other.size()));
}

TEST_F(ConversationTest, AnotherSaltSeesNothing) {
  const Reference ref = first_process();
  const Restored restored = restore(options_, ref, {.salt = "another tenant"});
  EXPECT_EQ(restored.record.restored_tokens, 0);
  expect_same(restored, ref);
}

TEST_F(ConversationTest, AnotherKvTypeSeesNothing) {
  const Reference ref = first_process();
  options_.engine.kv_type = GGML_TYPE_F32;
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  EXPECT_EQ(say(*serving, ref.all(), 0).record().restored_tokens, 0);
}

// A slow link makes recomputing a prefix of the layers worth while.
TEST_F(ConversationTest, PlansMixAllThreeMethods) {
  const Reference ref = first_process();
  bool recomputed = false;
  bool hidden = false;
  bool kv = false;
  for (const double link : {2e5, 5e5, 1e6, 3e6, 1e7, 1e8, 1e9}) {
    SCOPED_TRACE(link);
    options_.profile->read_bytes_per_s = link;  // planned for, not waited for
    const Restored restored = restore(options_, ref, {.save = false});
    recomputed |= restored.record.schedule.find("RE:") != std::string::npos;
    hidden |= restored.record.schedule.find("H:") != std::string::npos;
    kv |= restored.record.schedule.find("KV:") != std::string::npos;
    expect_same(restored, ref);
  }
  EXPECT_TRUE(recomputed);
  EXPECT_TRUE(hidden);
  EXPECT_TRUE(kv);
}

TEST_F(ConversationTest, PlansKnowHowFastTheEnvReads) {
  ThrottledEnv env(Env::real());
  double told = 0;
  options_.on_profile = [&](const CostProfile& profile) {
    told = state::paper_link_bytes_per_s(profile);
    env.set_read_bytes_per_s(told);
  };
  const auto serving = open(options_, env);
  ASSERT_NE(serving, nullptr);
  const state::Runtime& runtime = serving->runtime();
  EXPECT_DOUBLE_EQ(told, options_.profile->gemm_flops_per_s / 9750);
  EXPECT_DOUBLE_EQ(runtime.costs().link.bytes_per_s, told);
  env.set_read_bytes_per_s(1e12);  // the disks are slower
  EXPECT_DOUBLE_EQ(runtime.costs().link.bytes_per_s, options_.profile->read_bytes_per_s);
  env.set_read_bytes_per_s(0);
  EXPECT_DOUBLE_EQ(runtime.costs().link.bytes_per_s, options_.profile->read_bytes_per_s);
}

// A bit flipped anywhere in the segment files is found, dropped and computed again.
TEST_F(ConversationTest, DamagedPagesAreRecomputed) {
  const Reference ref = first_process();
  std::vector<std::filesystem::path> segments;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(options_.state_dir + "/store")) {
    if (entry.is_regular_file() && entry.file_size() >= 64 * 1024 &&
        entry.path().filename().string().find("catalog") == std::string::npos) {
      segments.push_back(entry.path());
    }
  }
  ASSERT_FALSE(segments.empty());
  for (const auto& path : segments) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    const auto size = static_cast<std::streamoff>(std::filesystem::file_size(path));
    for (std::streamoff at = 2000; at < size; at += 40'000) {
      file.seekg(at);
      const int byte = file.get();
      file.seekp(at);
      file.put(static_cast<char>(byte ^ 0x10));
    }
  }
  Restored restored = restore(options_, ref, {});
  EXPECT_GT(restored.record.damaged_pages, 0U);
  expect_same(restored, ref);
  // What was dropped is saved again by the run that computed it, so restores become whole.
  for (int i = 0; i < 8 && restored.record.damaged_pages > 0; ++i) {
    restored = restore(options_, ref, {});
    expect_same(restored, ref);
  }
  EXPECT_EQ(restored.record.damaged_pages, 0U);
  EXPECT_EQ(restored.record.restored_tokens, static_cast<int64_t>(ref.all().size()) - 1);
}

// One damaged page of a long chain costs its own rows of its own layer: nothing else is read again
// or computed again, and the next process finds the chain whole.
TEST_F(ConversationTest, ADamagedPageCostsItsOwnRowsOnly) {
  for (const policy::SaveMode saved :
       {policy::SaveMode::kKv, policy::SaveMode::kHidden, policy::SaveMode::kAll}) {
    options_.save = saved;
    const bool both = saved == policy::SaveMode::kAll;
    for (const policy::Mode mode : {policy::Mode::kKv, policy::Mode::kHidden}) {
      const bool hidden = mode == policy::Mode::kHidden;
      if (!both && hidden != (saved == policy::SaveMode::kHidden)) continue;
      for (const uint16_t layer : {0, 1}) {
        SCOPED_TRACE(std::string(policy::save_mode_name(saved)) + " " + std::to_string(hidden) +
                     " layer " + std::to_string(layer));
        options_.state_dir =
            dir_.file("damage" + std::to_string(static_cast<int>(saved)) +
                      std::to_string(static_cast<int>(hidden)) + std::to_string(layer));
        const Reference ref = first_process(400, 21);
        const How how{.mode = mode};
        const Restored sound = restore(options_, ref, how);
        const size_t page = damage_page(options_, ref.all(), 2, layer, hidden);
        const Restored restored = restore(options_, ref, how);
        expect_same(restored, ref);
        const policy::RestoreRecord& r = restored.record;
        EXPECT_EQ(r.damaged_pages, 1U);
        EXPECT_EQ(r.replaced_pages, both ? 1U : 0U);
        EXPECT_EQ(r.repaired_layer_rows, both ? 0 : 64 * (layer + 1));
        EXPECT_EQ(r.restored_tokens, sound.record.restored_tokens);
        EXPECT_EQ(restored.said.outcome.new_tokens, sound.said.outcome.new_tokens);
        const auto used = [](const policy::RestoreRecord& record) {
          return record.hidden_pages.total() + record.kv_pages.total();
        };
        if (!both) {
          EXPECT_EQ(used(r) + page, used(sound.record));
        }
        // Alignment, and the page that was read in vain.
        EXPECT_LT(r.read.disk, sound.record.read.disk + 4 * page + 16384);
        const Restored later = restore(options_, ref, how);
        expect_same(later, ref);
        EXPECT_EQ(later.record.damaged_pages, 0U);
        EXPECT_EQ(later.record.restored_tokens, sound.record.restored_tokens);
      }
    }
  }
}

// The chunk that new rows complete is read by the saver too: its rows count as new ones.
TEST_F(ConversationTest, ADamagedTailIsComputedAgain) {
  options_.save = policy::SaveMode::kKv;
  const Reference ref = first_process();
  const size_t tail = ref.all().size() / 64;
  damage_page(options_, ref.all(), tail, 1, false);
  const Restored restored = restore(options_, ref, {});
  expect_same(restored, ref);
  EXPECT_EQ(restored.record.damaged_pages, 1U);
  EXPECT_EQ(restored.record.restored_tokens, static_cast<int64_t>(tail * 64));
  EXPECT_EQ(restored.record.repaired_layer_rows, 0);
  const Restored later = restore(options_, ref, {});
  expect_same(later, ref);
  EXPECT_EQ(later.record.damaged_pages, 0U);
  EXPECT_EQ(later.record.restored_tokens, static_cast<int64_t>(ref.all().size()) - 1);
}

// When the ring is too small rows are skipped and counted; what is saved stays right.
TEST_F(ConversationTest, SkipsRowsWhenTheRingIsFull) {
  options_.saver.ring_bytes = 200U << 10;
  const Reference ref = first_process();
  EXPECT_LT(saved_tokens(*open(options_), ref.history), static_cast<int64_t>(ref.history.size()));
  expect_same(restore(options_, ref, {}), ref);
}

TEST_F(ConversationTest, CountsWhatWaitsForTheDisk) {
  options_.saver.flush_interval_ms = 3'600'000;
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  scheduler::Request request;
  request.tokens = random_tokens(100, 1);
  // While the request runs: at its end its tail is asked to be written, and the rest with it.
  request.next = [&](std::span<const float>) -> Result<scheduler::NextToken> {
    state::Runtime& runtime = serving->runtime();
    EXPECT_TRUE(runtime.engine().synchronize().ok());
    hcache::test::Patience patience("100 captured rows");
    while (runtime.saver()->stats().rows_captured < 100 && patience.lasts()) {
    }
    EXPECT_GT(runtime.saver()->stats().backlog_bytes, 0U);  // a full chunk waits for others
    return scheduler::NextToken{.token = 1, .stop = true, .finish_reason = {}};
  };
  ASSERT_TRUE(serving->run(std::move(request)).ok());
  ASSERT_TRUE(serving->flush().ok());
  EXPECT_EQ(serving->runtime().saver()->stats().backlog_bytes, 0U);
}

TEST_F(ConversationTest, DirectSavingWritesTheSame) {
  options_.saver.direct = true;
  const Reference ref = first_process();
  const Restored restored = restore(options_, ref, {});
  EXPECT_EQ(restored.record.restored_tokens, static_cast<int64_t>(ref.all().size()) - 1);
  expect_same(restored, ref);
}

TEST_F(ConversationTest, ASecondWriterIsRefused) {
  const auto serving = open(options_);
  ASSERT_NE(serving, nullptr);
  const auto second = state::Runtime::open(Env::real(), options_);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.code(), Code::kFailedPrecondition);
}

TEST_F(ConversationTest, ReadsBesideAWriter) {
  const Reference ref = first_process();
  const auto writer = open(options_);
  RuntimeOptions reader = options_;
  reader.read_only_store = true;
  const Restored restored = restore(reader, ref, {});
  EXPECT_EQ(restored.record.restored_tokens, static_cast<int64_t>(ref.all().size()) - 1);
  expect_same(restored, ref);
}

TEST_F(ConversationTest, CancellingARestoreLeavesNothingBehind) {
  const Reference ref = first_process();
  ThrottledEnv env(Env::real());
  const auto serving = open(options_, env);
  ASSERT_NE(serving, nullptr);
  const auto free_cells = [&] {
    int64_t cells = 0;
    EXPECT_TRUE(serving
                    ->on_engine([&](state::Runtime& runtime) {
                      cells = runtime.engine().arena_free_cells();
                      return Status();
                    })
                    .ok());
    return cells;
  };
  const int64_t before = free_cells();
  env.set_read_bytes_per_s(1e5);  // seconds for its pages
  scheduler::Request request;
  request.tokens = ref.all();
  request.salt = own_salt("");
  request.restore.mode = policy::Mode::kKv;
  request.next = [](std::span<const float>) -> Result<scheduler::NextToken> {
    return internal_error("a token was chosen");
  };
  const auto outcome = serving->run(std::move(request), [] { return false; });
  ASSERT_TRUE(outcome.ok());
  EXPECT_EQ(outcome->status.code(), Code::kCancelled);
  EXPECT_EQ(free_cells(), before);
}

}  // namespace
}  // namespace hcache::serving
