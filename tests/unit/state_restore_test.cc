// A conversation outlives its process: for every architecture, weight type and method the restored
// state is held against the state that was never interrupted.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <thread>

#include "base/throttled_env.h"
#include "model/logits.h"
#include "model_fixtures.h"
#include "patience.h"
#include "state/runtime.h"

namespace hcache::state {
namespace {

using model::test::make_tiny;
using model::test::TempDir;
using model::test::tiny_options;

std::vector<int32_t> random_tokens(int n, uint32_t seed) {
  std::vector<int32_t> tokens(n);
  for (int32_t& token : tokens) {
    seed = seed * 1664525U + 1013904223U;
    token = static_cast<int32_t>((seed >> 8) % 200);
  }
  return tokens;
}

// Costs under which no method is out of the question.
CostProfile even_profile() {
  CostProfile profile;
  profile.layer.project = policy::CostCurve::affine(1e-5, 1e-6);
  profile.layer.load_kv = policy::CostCurve::affine(0, 1e-8);
  profile.layer.dense = policy::CostCurve::affine(1e-5, 6e-6);
  profile.layer.attn_per_key = policy::CostCurve::affine(0, 1e-10);
  profile.layer.hidden_bytes = 300;
  profile.layer.kv_bytes = 512;
  profile.read_bytes_per_s = 1e9;
  profile.gemm_flops_per_s = 1e10;
  return profile;
}

RuntimeOptions tiny_runtime(const std::string& model, const std::string& state_dir) {
  RuntimeOptions options;
  options.model_path = model;
  options.state_dir = state_dir;
  options.n_threads = 1;
  options.engine.arena_tokens = 1024;
  options.engine.max_batch_rows = 96;
  options.saver.ring_bytes = 16U << 20;
  options.save = policy::SaveMode::kAll;
  options.profile = even_profile();
  return options;
}

std::unique_ptr<Runtime> open(const RuntimeOptions& options, Env& env = Env::real()) {
  auto runtime = Runtime::open(env, options);
  EXPECT_TRUE(runtime.ok()) << runtime.status().to_string();
  return runtime.ok() ? std::move(runtime).value() : nullptr;
}

// K and V of the first n rows of every layer.
std::vector<std::byte> read_state(Runtime& runtime, engine::SeqId seq, int n) {
  engine::Engine& engine = runtime.engine();
  const size_t bytes = engine.kv_row_bytes() * n;
  std::vector<std::byte> state(2 * bytes * engine.n_layer());
  for (int layer = 0; layer < engine.n_layer(); ++layer) {
    std::byte* k = state.data() + 2 * bytes * layer;
    const Status status = engine.read_kv(seq, layer, 0, n, k, k + bytes);
    EXPECT_TRUE(status.ok()) << status.to_string();
  }
  return state;
}

struct Continued {
  std::vector<float> logits;    // of the last token of the question
  std::vector<int32_t> answer;  // greedy
};

std::vector<int32_t> decode(Runtime& runtime, engine::SeqId seq, std::vector<float> logits, int n) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < n; ++i) {
    tokens.push_back(model::argmax(logits));
    auto next = runtime.append(seq, {&tokens.back(), 1});
    EXPECT_TRUE(next.ok()) << next.status().to_string();
    if (!next.ok()) break;
    logits = std::move(*next);
  }
  return tokens;
}

// The uninterrupted run: a prompt, decoded rows, a question, an answer.
struct Reference {
  std::vector<int32_t> history;  // prompt and decoded tokens
  std::vector<int32_t> question;
  std::vector<std::byte> state;  // of the history
  Continued continued;

  [[nodiscard]] std::vector<int32_t> all() const {
    std::vector<int32_t> tokens = history;
    tokens.insert(tokens.end(), question.begin(), question.end());
    return tokens;
  }
};

Reference hold_conversation(Runtime& runtime, int n_prompt, int n_decoded) {
  Reference ref;
  // Not the first sequence of the engine: a sequence's number must not pass for a position.
  auto other = runtime.start(random_tokens(7, 3), {});
  EXPECT_TRUE(other.ok() && runtime.finish(other->seq).ok());
  ref.history = random_tokens(n_prompt, 1);
  ref.question = random_tokens(20, 2);
  auto started = runtime.start(ref.history, {});
  EXPECT_TRUE(started.ok()) << started.status().to_string();
  if (!started.ok()) return ref;
  const auto decoded = decode(runtime, started->seq, started->logits, n_decoded);
  ref.history.insert(ref.history.end(), decoded.begin(), decoded.end());
  EXPECT_TRUE(runtime.flush().ok());
  ref.state = read_state(runtime, started->seq, static_cast<int>(ref.history.size()));
  auto logits = runtime.append(started->seq, ref.question);
  EXPECT_TRUE(logits.ok());
  ref.continued.logits = *logits;
  ref.continued.answer = decode(runtime, started->seq, *logits, 8);
  EXPECT_TRUE(runtime.finish(started->seq).ok());
  return ref;
}

struct Restored {
  RestoreReport report;
  std::vector<std::byte> state;
  Continued continued;
};

Restored restore(const RuntimeOptions& options, const Reference& ref, StartOptions start,
                 Env& env = Env::real()) {
  Restored result;
  const auto runtime = open(options, env);
  if (!runtime) return result;
  auto started = runtime->start(ref.all(), start);
  EXPECT_TRUE(started.ok()) << started.status().to_string();
  if (!started.ok()) return result;
  result.report = started->report;
  result.state = read_state(*runtime, started->seq, static_cast<int>(ref.history.size()));
  result.continued.logits = started->logits;
  result.continued.answer = decode(*runtime, started->seq, started->logits, 8);
  EXPECT_TRUE(runtime->close().ok());
  return result;
}

// --- Every architecture, weight type and method ----------------------------------------------

struct Case {
  const char* arch;
  int n_head_kv;
  ggml_type type;
};

class RestoreTest : public testing::TestWithParam<Case> {};

TEST_P(RestoreTest, ContinuesAsIfNeverInterrupted) {
  const Case& c = GetParam();
  const TempDir dir;
  const std::string model = make_tiny(dir, tiny_options(c.arch, c.n_head_kv, c.type));
  RuntimeOptions options = tiny_runtime(model, dir.file("state"));
  Reference ref;
  ggml_type native = GGML_TYPE_COUNT;
  {
    const auto runtime = open(options);
    ASSERT_NE(runtime, nullptr);
    native = runtime->engine().native_hidden_type();
    ref = hold_conversation(*runtime, 150, 21);
    ASSERT_TRUE(runtime->close().ok());
  }
  // Integer products: a row's result does not depend on how many rows are multiplied at once, so
  // recomputation and what follows are exact too.
  const bool exact = native == GGML_TYPE_Q8_0 || native == GGML_TYPE_Q8_1;

  for (const policy::Mode mode :
       {policy::Mode::kKv, policy::Mode::kHidden, policy::Mode::kPlan, policy::Mode::kNaiveHybrid,
        policy::Mode::kTokenPartition, policy::Mode::kRecompute}) {
    SCOPED_TRACE(policy::mode_name(mode));
    StartOptions start;
    start.mode = mode;
    start.save = false;
    const Restored restored = restore(options, ref, start);
    // The last token of the conversation is computed in any case.
    const auto n_saved = static_cast<int64_t>(ref.all().size()) - 1;
    EXPECT_EQ(restored.report.restored_tokens, mode == policy::Mode::kRecompute ? 0 : n_saved)
        << restored.report.schedule;
    EXPECT_EQ(restored.report.damaged_pages, 0U);
    EXPECT_EQ(restored.report.project_busy_s > 0, restored.report.predicted_project_s > 0)
        << restored.report.schedule;
    // Whatever the type: what is not recomputed comes back to the bit.
    if (exact || mode == policy::Mode::kKv || mode == policy::Mode::kHidden) {
      EXPECT_TRUE(restored.state == ref.state) << restored.report.schedule;
    }
    if (exact) {
      EXPECT_EQ(restored.continued.logits, ref.continued.logits) << restored.report.schedule;
      EXPECT_EQ(restored.continued.answer, ref.continued.answer);
    }
    EXPECT_LT(model::kl_divergence(ref.continued.logits, restored.continued.logits), 1e-3)
        << restored.report.schedule;
  }
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  const std::vector<std::pair<const char*, int>> shapes = {
      {"llama", 4}, {"llama", 2}, {"qwen2", 2}, {"qwen3", 2}, {"falcon", 1}, {"opt", 4}};
  for (const auto& [arch, n_head_kv] : shapes) {
    for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0,
                                 GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q4_K}) {
      cases.push_back({arch, n_head_kv, type});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Models, RestoreTest, testing::ValuesIn(all_cases()),
                         [](const testing::TestParamInfo<Case>& info) {
                           std::string name = std::string(info.param.arch) +
                                              std::to_string(info.param.n_head_kv) + "_" +
                                              ggml_type_name(info.param.type);
                           return name;
                         });

// --- One model, many circumstances ------------------------------------------------------------

class ConversationTest : public testing::Test {
 protected:
  ConversationTest()
      : model_(make_tiny(dir_, tiny_options("llama", 2, GGML_TYPE_Q8_0))),
        options_(tiny_runtime(model_, dir_.file("state"))) {}

  Reference first_process(int n_prompt = 150, int n_decoded = 21) {
    const auto runtime = open(options_);
    if (!runtime) return {};
    Reference ref = hold_conversation(*runtime, n_prompt, n_decoded);
    EXPECT_TRUE(runtime->close().ok());
    return ref;
  }
  void expect_same(const Restored& restored, const Reference& ref) {
    EXPECT_TRUE(restored.state == ref.state) << restored.report.schedule;
    EXPECT_EQ(restored.continued.logits, ref.continued.logits) << restored.report.schedule;
    EXPECT_EQ(restored.continued.answer, ref.continued.answer) << restored.report.schedule;
  }

  TempDir dir_;
  std::string model_;
  RuntimeOptions options_;
};

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
    auto whole = uninterrupted->start(random_tokens(100, 7), {});
    ASSERT_TRUE(whole.ok());
    std::vector<float> expected = whole->logits;

    std::vector<int32_t> tokens = random_tokens(100, 7);
    for (int turn = 0; turn < 4; ++turn) {
      SCOPED_TRACE(turn);
      const auto runtime = open(options_);
      ASSERT_NE(runtime, nullptr);
      auto started = runtime->start(tokens, {});
      ASSERT_TRUE(started.ok()) << started.status().to_string();
      EXPECT_EQ(started->logits, expected);
      if (turn > 0) {
        EXPECT_EQ(started->report.restored_tokens, static_cast<int64_t>(tokens.size()) - 17);
      }
      const auto answer = decode(*runtime, started->seq, started->logits, 30);
      EXPECT_EQ(answer, decode(*uninterrupted, whole->seq, expected, 30));
      tokens.insert(tokens.end(), answer.begin(), answer.end());
      EXPECT_TRUE(read_state(*runtime, started->seq, static_cast<int>(tokens.size())) ==
                  read_state(*uninterrupted, whole->seq, static_cast<int>(tokens.size())));
      ASSERT_TRUE(runtime->close().ok());

      const auto question = random_tokens(17, 100 + turn);
      tokens.insert(tokens.end(), question.begin(), question.end());
      auto next = uninterrupted->append(whole->seq, question);
      ASSERT_TRUE(next.ok());
      expected = std::move(*next);
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
  auto expected = fresh->start(other, {});
  ASSERT_TRUE(expected.ok());

  const auto runtime = open(options_);
  ASSERT_NE(runtime, nullptr);
  auto started = runtime->start(other, {});
  ASSERT_TRUE(started.ok());
  const int64_t common = started->report.restored_tokens;
  EXPECT_GE(common, 100);
  EXPECT_EQ(started->logits, expected->logits);
  EXPECT_EQ(decode(*runtime, started->seq, started->logits, 8),
            decode(*fresh, expected->seq, expected->logits, 8));
  // The branch is saved as well, its first chunk completed from the other's rows.
  EXPECT_TRUE(runtime->flush().ok());
  EXPECT_EQ(runtime->saver()->stats().rows_skipped, 0U);
  auto match = runtime->store()->match(runtime->fingerprint(), runtime->salt(), other);
  ASSERT_TRUE(match.ok());
  EXPECT_EQ(match->n_tokens, other.size());
}

TEST_F(ConversationTest, AnotherSaltSeesNothing) {
  const Reference ref = first_process();
  options_.salt = "another tenant";
  const Restored restored = restore(options_, ref, {});
  EXPECT_EQ(restored.report.restored_tokens, 0);
  expect_same(restored, ref);
}

TEST_F(ConversationTest, AnotherKvTypeSeesNothing) {
  const Reference ref = first_process();
  options_.engine.kv_type = GGML_TYPE_F32;
  const auto runtime = open(options_);
  ASSERT_NE(runtime, nullptr);
  auto started = runtime->start(ref.all(), {});
  ASSERT_TRUE(started.ok()) << started.status().to_string();
  EXPECT_EQ(started->report.restored_tokens, 0);
}

// A slow link makes recomputing a prefix of the layers worth while.
TEST_F(ConversationTest, PlansMixAllThreeMethods) {
  const Reference ref = first_process();
  bool recomputed = false;
  bool hidden = false;
  bool kv = false;
  for (const double link : {2e5, 5e5, 1e6, 3e6, 1e7, 1e8, 1e9}) {
    SCOPED_TRACE(link);
    StartOptions start;
    // The slow ones are planned for, not waited for.
    ThrottledEnv env(Env::real(), link < 1e7 ? 0 : link);
    options_.profile->read_bytes_per_s = link;
    start.save = false;
    const Restored restored = restore(options_, ref, start, env);
    recomputed |= restored.report.schedule.find("RE:") != std::string::npos;
    hidden |= restored.report.schedule.find("H:") != std::string::npos;
    kv |= restored.report.schedule.find("KV:") != std::string::npos;
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
    told = paper_link_bytes_per_s(profile);
    env.set_read_bytes_per_s(told);
  };
  const auto runtime = open(options_, env);
  ASSERT_NE(runtime, nullptr);
  EXPECT_DOUBLE_EQ(told, options_.profile->gemm_flops_per_s / 9750);
  EXPECT_DOUBLE_EQ(runtime->costs().link.bytes_per_s, told);
  env.set_read_bytes_per_s(1e12);  // the disks are slower
  EXPECT_DOUBLE_EQ(runtime->costs().link.bytes_per_s, options_.profile->read_bytes_per_s);
  env.set_read_bytes_per_s(0);
  EXPECT_DOUBLE_EQ(runtime->costs().link.bytes_per_s, options_.profile->read_bytes_per_s);
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
  EXPECT_GT(restored.report.damaged_pages, 0U);
  expect_same(restored, ref);
  // What was dropped is saved again by the run that computed it, so restores become whole.
  for (int i = 0; i < 8 && restored.report.damaged_pages > 0; ++i) {
    restored = restore(options_, ref, {});
    expect_same(restored, ref);
  }
  EXPECT_EQ(restored.report.damaged_pages, 0U);
  EXPECT_EQ(restored.report.restored_tokens, static_cast<int64_t>(ref.all().size()) - 1);
}

// When the ring is too small rows are skipped and counted; what is saved stays right.
TEST_F(ConversationTest, SkipsRowsWhenTheRingIsFull) {
  options_.saver.ring_bytes = 200U << 10;
  const Reference ref = first_process();
  {
    const auto runtime = open(options_);
    auto match = runtime->store()->match(runtime->fingerprint(), runtime->salt(), ref.history);
    ASSERT_TRUE(match.ok());
    EXPECT_LT(match->n_tokens, ref.history.size());
  }
  expect_same(restore(options_, ref, {}), ref);
}

TEST_F(ConversationTest, CountsWhatWaitsForTheDisk) {
  options_.saver.flush_interval_ms = 3'600'000;
  const auto runtime = open(options_);
  ASSERT_NE(runtime, nullptr);
  ASSERT_TRUE(runtime->start(random_tokens(100, 1), {}).ok());
  ASSERT_TRUE(runtime->engine().synchronize().ok());
  hcache::test::Patience patience("100 captured rows");
  while (runtime->saver()->stats().rows_captured < 100 && patience.lasts()) {
  }
  EXPECT_GT(runtime->saver()->stats().backlog_bytes, 0U);  // a full chunk waits for others
  ASSERT_TRUE(runtime->flush().ok());
  EXPECT_EQ(runtime->saver()->stats().backlog_bytes, 0U);
}

TEST_F(ConversationTest, DirectSavingWritesTheSame) {
  options_.saver.direct = true;
  const Reference ref = first_process();
  const Restored restored = restore(options_, ref, {});
  EXPECT_EQ(restored.report.restored_tokens, static_cast<int64_t>(ref.all().size()) - 1);
  expect_same(restored, ref);
}

TEST_F(ConversationTest, ASecondWriterIsRefused) {
  const auto runtime = open(options_);
  ASSERT_NE(runtime, nullptr);
  const auto second = Runtime::open(Env::real(), options_);
  ASSERT_FALSE(second.ok());
  EXPECT_EQ(second.code(), Code::kFailedPrecondition);
}

TEST_F(ConversationTest, ReadsBesideAWriter) {
  const Reference ref = first_process();
  const auto writer = open(options_);
  RuntimeOptions reader = options_;
  reader.read_only_store = true;
  const Restored restored = restore(reader, ref, {});
  EXPECT_EQ(restored.report.restored_tokens, static_cast<int64_t>(ref.all().size()) - 1);
  expect_same(restored, ref);
}

TEST_F(ConversationTest, CancellingARestoreLeavesNothingBehind) {
  const Reference ref = first_process();
  const auto runtime = open(options_);
  ASSERT_NE(runtime, nullptr);
  const int64_t free_cells = runtime->engine().arena_free_cells();
  StartOptions start;
  start.progress = [](double fraction) { return fraction < 0.5; };
  const auto started = runtime->start(ref.all(), start);
  ASSERT_FALSE(started.ok());
  EXPECT_EQ(started.code(), Code::kCancelled);
  EXPECT_EQ(runtime->engine().arena_free_cells(), free_cells);
}

}  // namespace
}  // namespace hcache::state
