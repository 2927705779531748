// A conversation outlives its process: for every architecture, weight type and method the restored
// state is held against the state that was never interrupted. Runs on HCACHE_TEST_DEVICE.
#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

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

class RestoreTest : public ::testing::TestWithParam<Case> {};

TEST_P(RestoreTest, ContinuesAsIfNeverInterrupted) {
  const Case& c = GetParam();
  const TempDir dir;
  const std::string model = c.make(dir);
  RuntimeOptions options = tiny_runtime(model, dir.file("state"));
  Reference ref;
  // Integer products: a row's result does not depend on how many rows are multiplied at once, so
  // recomputation and what follows are exact too. (IQ4_NL has another kernel for few rows.)
  const bool on_cpu = hcache::testing::on_cpu();
  bool exact = on_cpu && c.mixture.ftype != LLAMA_FTYPE_MOSTLY_IQ4_XS;
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
    // Whatever the type: what is not recomputed comes back to the bit. (Elsewhere than on the CPU
    // the product of saved rows may be another kernel than that of the step.)
    if (exact || mode == policy::Mode::kKv || (on_cpu && mode == policy::Mode::kHidden)) {
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
  if (!hcache::testing::on_cpu()) {
    return {{"llama", 4, GGML_TYPE_F16},  {"llama", 2, GGML_TYPE_Q8_0},
            {"llama", 4, GGML_TYPE_Q4_K}, {"qwen2", 4, GGML_TYPE_F16},
            {"qwen3", 2, GGML_TYPE_Q4_0}, {"falcon", 1, GGML_TYPE_F16}};
  }
  std::vector<Case> cases;
  // What is really new in these is what the oracle sees; here each comes back by every method.
  for (const auto& [arch, n_head_kv] : model::test::kMoreArchitectures) {
    cases.push_back({arch, n_head_kv, GGML_TYPE_F16});
    cases.push_back({arch, n_head_kv, GGML_TYPE_Q8_0});
    cases.push_back({arch, n_head_kv, GGML_TYPE_Q4_K});
  }
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

INSTANTIATE_TEST_SUITE_P(Models, RestoreTest, ::testing::ValuesIn(all_cases()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           std::string name = std::string(info.param.arch) +
                                              std::to_string(info.param.n_head_kv) + "_" +
                                              ggml_type_name(info.param.type);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

std::vector<Case> all_mixtures() {
  if (!hcache::testing::on_cpu()) return {};
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

INSTANTIATE_TEST_SUITE_P(Mixtures, RestoreTest, ::testing::ValuesIn(all_mixtures()),
                         [](const ::testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.mixture.name) + "_" +
                                  std::to_string(info.param.n_head) + "heads_" +
                                  std::to_string(info.param.n_head_kv) + "kv";
                         });

// What the layers of a mixture are saved in, and that it is what is read.
TEST(Mixtures, EveryLayerHasATypeOfItsOwn) {
  if (!hcache::testing::on_cpu()) GTEST_SKIP() << "types of the CPU";
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

}  // namespace
}  // namespace hcache::serving
