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
#include "mixture_models.h"
#include "model/logits.h"
#include "model_fixtures.h"
#include "patience.h"
#include "serving/serving.h"

namespace hcache::serving {
namespace {

using model::test::make_mixture;
using model::test::make_tiny;
using model::test::Mixture;
using model::test::TempDir;
using model::test::tiny_options;
using scheduler::CacheUse;
using scheduler::SeqId;
using state::CostProfile;
using state::RuntimeOptions;

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

std::unique_ptr<Serving> open(const RuntimeOptions& runtime, Env& env = Env::real()) {
  ServingOptions options;
  options.runtime = runtime;
  options.scheduler.reuse.cheap_tokens = 0;
  auto serving = Serving::open(env, options);
  EXPECT_TRUE(serving.ok()) << serving.status().to_string();
  return serving.ok() ? std::move(serving).value() : nullptr;
}

// How a chain is taken up.
struct How {
  policy::Mode mode = policy::Mode::kPlan;
  bool save = true;
  CacheUse cache = CacheUse::kAll;
  std::string salt = {};
};

// A chain that was computed, and the greedy answer to it, every token of which has its row.
struct Said {
  SeqId seq = scheduler::kNoSeq;  // idle
  std::vector<float> logits;      // of the chain's last token
  std::vector<int32_t> answer;
  scheduler::Outcome outcome;

  [[nodiscard]] policy::RestoreRecord record() const {
    return outcome.restores.empty() ? policy::RestoreRecord() : outcome.restores.back();
  }
};

Said say(Serving& serving, const std::vector<int32_t>& tokens, int n_answer, const How& how = {}) {
  Said said;
  scheduler::Request request;
  request.tokens = tokens;
  request.max_new_tokens = n_answer + 1;
  request.salt = own_salt(how.salt);
  request.save = how.save;
  request.cache = how.cache;
  request.restore.mode = how.mode;
  request.next = [&](std::span<const float> logits) -> Result<scheduler::NextToken> {
    if (said.logits.empty()) said.logits.assign(logits.begin(), logits.end());
    const bool stop = static_cast<int>(said.answer.size()) == n_answer;
    const int32_t token = model::argmax(logits);
    if (!stop) said.answer.push_back(token);
    return scheduler::NextToken{.token = token, .stop = stop, .finish_reason = {}};
  };
  auto outcome = serving.run(std::move(request));
  EXPECT_TRUE(outcome.ok()) << outcome.status().to_string();
  if (!outcome.ok()) return said;
  EXPECT_TRUE(outcome->status.ok()) << outcome->status.to_string();
  said.outcome = *outcome;
  said.seq = outcome->seq;
  return said;
}

// K and V of the first n rows of every layer.
std::vector<std::byte> read_state(Serving& serving, SeqId seq, int n) {
  std::vector<std::byte> state;
  const Status status = serving.on_engine([&](state::Runtime& runtime) -> Status {
    engine::Engine& engine = runtime.engine();
    const size_t bytes = engine.kv_row_bytes() * static_cast<size_t>(n);
    state.resize(2 * bytes * static_cast<size_t>(engine.n_layer()));
    for (int layer = 0; layer < engine.n_layer(); ++layer) {
      std::byte* k = state.data() + 2 * bytes * static_cast<size_t>(layer);
      HCACHE_RETURN_IF_ERROR(engine.read_kv(seq, layer, 0, n, k, k + bytes));
    }
    return {};
  });
  EXPECT_TRUE(status.ok()) << status.to_string();
  return state;
}

int64_t saved_tokens(Serving& serving, const std::vector<int32_t>& tokens,
                     const std::string& salt = "") {
  state::Runtime& runtime = serving.runtime();
  const auto match = runtime.store()->match(runtime.fingerprint(), own_salt(salt).id, tokens);
  EXPECT_TRUE(match.ok()) << match.status().to_string();
  return match.ok() ? static_cast<int64_t>(match->n_tokens) : -1;
}

// The uninterrupted run: a prompt, decoded rows, a question, an answer.
struct Reference {
  std::vector<int32_t> history;  // prompt and decoded tokens
  std::vector<int32_t> question;
  std::vector<std::byte> state;  // of the history
  Said said;                     // the question and its answer

  [[nodiscard]] std::vector<int32_t> all() const {
    std::vector<int32_t> tokens = history;
    tokens.insert(tokens.end(), question.begin(), question.end());
    return tokens;
  }
};

Reference hold_conversation(Serving& serving, int n_prompt, int n_decoded,
                            const std::string& salt = "") {
  Reference ref;
  // Not the first sequence of the engine: a sequence's number must not pass for a position.
  say(serving, random_tokens(7, 3), 0);
  ref.history = random_tokens(n_prompt, 1);
  ref.question = random_tokens(20, 2);
  const Said begun = say(serving, ref.history, n_decoded, {.salt = salt});
  ref.history.insert(ref.history.end(), begun.answer.begin(), begun.answer.end());
  EXPECT_TRUE(serving.flush().ok());
  ref.state = read_state(serving, begun.seq, static_cast<int>(ref.history.size()));
  ref.said = say(serving, ref.all(), 8, {.salt = salt});
  EXPECT_EQ(ref.said.outcome.resident_tokens, static_cast<int64_t>(ref.history.size()));
  return ref;
}

struct Restored {
  Said said;
  policy::RestoreRecord record;
  std::vector<std::byte> state;
};

// In a process of its own.
Restored restore(const RuntimeOptions& options, const Reference& ref, const How& how) {
  Restored result;
  const auto serving = open(options);
  if (!serving) return result;
  result.said = say(*serving, ref.all(), 8, how);
  result.record = result.said.record();
  result.state = read_state(*serving, result.said.seq, static_cast<int>(ref.history.size()));
  EXPECT_TRUE(serving->close().ok());
  return result;
}

// --- Every architecture, weight type and method ----------------------------------------------

struct Case {
  const char* arch;
  int n_head_kv;
  ggml_type type;  // of all weights, or
  Mixture mixture = {};
  int n_head = 4;  // of 64 each: 4 make rows of 256, 5 rows that no block of 256 divides

  [[nodiscard]] std::string make(const TempDir& dir) const {
    return mixture.name[0] != '\0' ? make_mixture(dir, mixture, n_head, n_head_kv)
                                   : make_tiny(dir, tiny_options(arch, n_head_kv, type));
  }
};

class RestoreTest : public testing::TestWithParam<Case> {};

TEST_P(RestoreTest, ContinuesAsIfNeverInterrupted) {
  const Case& c = GetParam();
  const TempDir dir;
  const std::string model = c.make(dir);
  RuntimeOptions options = tiny_runtime(model, dir.file("state"));
  Reference ref;
  // Integer products: a row's result does not depend on how many rows are multiplied at once, so
  // recomputation and what follows are exact too. (IQ4_NL has another kernel for few rows.)
  bool exact = c.mixture.ftype != LLAMA_FTYPE_MOSTLY_IQ4_XS;
  {
    const auto serving = open(options);
    ASSERT_NE(serving, nullptr);
    const engine::Engine& engine = serving->runtime().engine();
    for (int layer = 0; layer < engine.n_layer(); ++layer) {
      const ggml_type native = engine.native_hidden_type(layer);
      exact = exact && (native == GGML_TYPE_Q8_0 || native == GGML_TYPE_Q8_1);
    }
    ref = hold_conversation(*serving, 150, 21);
    ASSERT_TRUE(serving->close().ok());
  }

  for (const policy::Mode mode :
       {policy::Mode::kKv, policy::Mode::kHidden, policy::Mode::kPlan, policy::Mode::kNaiveHybrid,
        policy::Mode::kTokenPartition, policy::Mode::kRecompute}) {
    SCOPED_TRACE(policy::mode_name(mode));
    const Restored restored = restore(options, ref, {.mode = mode, .save = false});
    // The last token of the conversation is computed in any case.
    const auto n_saved = static_cast<int64_t>(ref.all().size()) - 1;
    EXPECT_EQ(restored.record.restored_tokens, mode == policy::Mode::kRecompute ? 0 : n_saved)
        << restored.record.schedule;
    EXPECT_EQ(restored.record.damaged_pages, 0U);
    EXPECT_EQ(restored.record.project_busy_s > 0, restored.record.predicted_project_s > 0)
        << restored.record.schedule;
    // Whatever the type: what is not recomputed comes back to the bit.
    if (exact || mode == policy::Mode::kKv || mode == policy::Mode::kHidden) {
      EXPECT_TRUE(restored.state == ref.state) << restored.record.schedule;
    }
    if (exact) {
      EXPECT_EQ(restored.said.logits, ref.said.logits) << restored.record.schedule;
      EXPECT_EQ(restored.said.answer, ref.said.answer);
    }
    EXPECT_LT(model::kl_divergence(ref.said.logits, restored.said.logits), 1e-3)
        << restored.record.schedule;
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

std::vector<Case> all_mixtures() {
  std::vector<Case> cases;
  const std::vector<Mixture> mixtures = {{"Q4_K_M", LLAMA_FTYPE_MOSTLY_Q4_K_M},
                                         {"Q5_K_M", LLAMA_FTYPE_MOSTLY_Q5_K_M},
                                         {"Q3_K_L", LLAMA_FTYPE_MOSTLY_Q3_K_L},
                                         {"Q6_K", LLAMA_FTYPE_MOSTLY_Q6_K},
                                         {"IQ4_XS", LLAMA_FTYPE_MOSTLY_IQ4_XS}};
  for (const Mixture& mixture : mixtures) {
    for (const auto& [n_head, n_head_kv] :
         {std::pair(4, 4), std::pair(4, 1), std::pair(5, 5), std::pair(5, 1)}) {
      cases.push_back({"llama", n_head_kv, GGML_TYPE_F16, mixture, n_head});
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Mixtures, RestoreTest, testing::ValuesIn(all_mixtures()),
                         [](const testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.mixture.name) + "_" +
                                  std::to_string(info.param.n_head) + "heads_" +
                                  std::to_string(info.param.n_head_kv) + "kv";
                         });

// What the layers of a mixture are saved in, and that it is what is read.
TEST(Mixtures, EveryLayerHasATypeOfItsOwn) {
  constexpr ggml_type kNone = GGML_TYPE_COUNT;
  struct Expected {
    Mixture mixture;
    int n_head;
    int n_head_kv;
    std::vector<ggml_type> types;
    ggml_type kv_type = GGML_TYPE_F16;
  };
  const Mixture q5 = {"Q5_K_M", LLAMA_FTYPE_MOSTLY_Q5_K_M};
  const Mixture q3 = {"Q3_K_L", LLAMA_FTYPE_MOSTLY_Q3_K_L};
  const Mixture odd = {"Q4_K_M", LLAMA_FTYPE_MOSTLY_Q4_K_M, GGML_TYPE_Q8_0};
  for (const Expected& e : std::vector<Expected>{
           // K Q5_K, V Q5_K or Q6_K
           {q5, 4, 4, {GGML_TYPE_Q8_K, GGML_TYPE_Q8_K, GGML_TYPE_Q8_K}},
           // K Q5_1, V Q5_1 or, in the last layer, Q8_0
           {q5, 5, 5, {GGML_TYPE_Q8_1, GGML_TYPE_Q8_1, GGML_TYPE_Q8_1}},
           // K Q4_0, V Q5_1
           {q3, 5, 5, {GGML_TYPE_Q8_1, GGML_TYPE_Q8_1, GGML_TYPE_Q8_1}},
           // K Q4_K, V Q8_0: what both consume is larger than K and V, unless these are F32
           {odd, 4, 4, {kNone, kNone, kNone}},
           {odd, 4, 4, {GGML_TYPE_F32, GGML_TYPE_F32, GGML_TYPE_F32}, GGML_TYPE_F32}}) {
    SCOPED_TRACE(std::string(e.mixture.name) + " " + std::to_string(e.n_head));
    const TempDir dir;
    RuntimeOptions options =
        tiny_runtime(make_mixture(dir, e.mixture, e.n_head, e.n_head_kv), dir.file("state"));
    options.save = policy::SaveMode::kHidden;
    options.engine.kv_type = e.kv_type;
    Reference ref;
    {
      const auto serving = open(options);
      ASSERT_NE(serving, nullptr);
      const engine::Engine& engine = serving->runtime().engine();
      for (int layer = 0; layer < engine.n_layer(); ++layer) {
        EXPECT_EQ(engine.native_hidden_type(layer), e.types[static_cast<size_t>(layer)]) << layer;
      }
      ref = hold_conversation(*serving, 150, 21);
      ASSERT_TRUE(serving->close().ok());
    }
    const Restored restored = restore(options, ref, {.mode = policy::Mode::kHidden, .save = false});
    const bool as_kv = e.types[0] == kNone;
    EXPECT_EQ(restored.record.kv_pages.disk > 0, as_kv);
    EXPECT_EQ(restored.record.hidden_pages.disk > 0, !as_kv);
    EXPECT_TRUE(restored.state == ref.state) << restored.record.schedule;
    EXPECT_EQ(restored.record.restored_tokens, static_cast<int64_t>(ref.all().size()) - 1);
  }
}

// --- One model, many circumstances ------------------------------------------------------------

class ConversationTest : public testing::Test {
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

// Flips a bit of one page on disk, found by its bytes. Gives back the page's size.
size_t damage(const RuntimeOptions& options, const std::vector<int32_t>& tokens, size_t chunk,
              uint16_t layer, bool hidden) {
  std::vector<std::byte> page;
  {
    const auto serving = open(options);
    state::Runtime& runtime = serving->runtime();
    const auto match = runtime.store()->match(runtime.fingerprint(), own_salt("").id, tokens);
    const store::ChunkRef& ref = match->chunks.at(chunk).chunk;
    for (const store::PageInfo& info : ref.info().pages) {
      if (info.layer != layer || store::is_hidden(info.encoding) != hidden) continue;
      auto reader = runtime.store()->new_reader({});
      const store::PageRequest request{ref, info.layer, info.encoding};
      EXPECT_TRUE((*reader)->submit({&request, 1}).ok());
      const auto view = (*reader)->next();
      page.assign(view->bytes.begin(), view->bytes.end());
      (*reader)->release(view->index);
    }
  }
  EXPECT_FALSE(page.empty());
  int found = 0;
  for (const auto& entry :
       std::filesystem::recursive_directory_iterator(options.state_dir + "/store")) {
    if (!entry.is_regular_file()) continue;
    std::fstream file(entry.path(), std::ios::in | std::ios::out | std::ios::binary);
    std::vector<char> bytes(std::filesystem::file_size(entry.path()));
    file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    const char* wanted = reinterpret_cast<const char*>(page.data());
    const auto at = std::search(bytes.begin(), bytes.end(), wanted, wanted + page.size());
    if (at == bytes.end()) continue;
    ++found;
    file.clear();
    file.seekp(at - bytes.begin() + static_cast<std::ptrdiff_t>(page.size() / 2));
    file.put(static_cast<char>(at[static_cast<std::ptrdiff_t>(page.size() / 2)] ^ 0x10));
  }
  EXPECT_EQ(found, 1);
  return page.size();
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
        const size_t page = damage(options_, ref.all(), 2, layer, hidden);
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
  damage(options_, ref.all(), tail, 1, false);
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
