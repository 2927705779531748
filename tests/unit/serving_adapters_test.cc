// Low-rank adapters on both engines: conversations that have them, several at a time, and what is
// saved of them.
#include <string>
#include <thread>
#include <vector>

#include "model/tools.h"
#include "serving_testing.h"

namespace hcache::serving::testing {
namespace {

using model::AdapterOptions;
using state::EngineChoice;

struct Case {
  const char* arch;
  int n_head_kv;
  ggml_type type;
  EngineChoice engine;
  const char* only = "";  // matrices that are changed
};

class Adapters : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    const Case& c = GetParam();
    model_ = make_tiny(dir_, tiny_options(c.arch, c.n_head_kv, c.type));
    for (const uint64_t seed : {uint64_t{1}, uint64_t{2}}) {
      AdapterOptions options;
      options.model = model_;
      options.only = c.only;
      options.size = 1;
      options.seed = seed;
      files_.push_back({dir_.file("adapter-" + std::to_string(seed) + ".gguf")});
      const Status made = model::synthesise_adapter(options, files_.back().path);
      ASSERT_TRUE(made.ok()) << made.to_string();
    }
  }

  RuntimeOptions options() {
    RuntimeOptions options = tiny_runtime(model_, dir_.file("state"));
    options.forward = GetParam().engine;
    options.adapters = files_;
    return options;
  }

  // Of a request whose adapters count so much.
  static Said ask(Serving& serving, const std::vector<int32_t>& tokens, std::vector<float> scales,
                  const How& how = {}) {
    How with = how;
    with.adapters = std::move(scales);
    return say(serving, tokens, 6, with);
  }

  TempDir dir_;
  std::string model_;
  std::vector<state::AdapterFile> files_;
};

std::vector<Case> cases() {
  std::vector<Case> out = {{"llama", 2, GGML_TYPE_F32, EngineChoice::kLlama},
                           {"llama", 2, GGML_TYPE_Q8_0, EngineChoice::kOwn, "attn_q"},
                           {"llama", 4, GGML_TYPE_F16, EngineChoice::kOwn, "ffn_"}};
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K}) {
    out.push_back({"llama", 2, type, EngineChoice::kOwn});
  }
  for (const char* arch : {"phi3", "gptneox", "qwen3moe", "qwen2moe", "gemma3", "falcon"}) {
    out.push_back(
        {arch, std::string(arch) == "falcon" ? 1 : 2, GGML_TYPE_Q8_0, EngineChoice::kOwn});
  }
  out[out.size() - 6].n_head_kv = 4;  // phi3 has as many as query heads
  return out;
}

INSTANTIATE_TEST_SUITE_P(Serving, Adapters, ::testing::ValuesIn(cases()), [](const auto& info) {
  const Case& c = info.param;
  std::string name = std::string(c.arch) + std::to_string(c.n_head_kv) + "_" +
                     ggml_type_name(c.type) + (c.engine == EngineChoice::kOwn ? "" : "_libllama") +
                     (*c.only != '\0' ? std::string("_") + c.only : std::string());
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

// Each answers as if it were alone, whoever shares its steps, and other scales give other answers.
TEST_P(Adapters, EachConversationHasItsOwn) {
  const std::vector<int32_t> prompt = random_tokens(70, 1);
  const std::vector<std::vector<float>> settings = {{}, {1, 0}, {0, 1}, {0.5F, -1}};
  std::vector<Said> alone;
  for (const auto& scales : settings) {
    const auto serving = open(options());
    ASSERT_TRUE(serving);
    alone.push_back(ask(*serving, prompt, scales, {.save = false, .cache = CacheUse::kNone}));
  }
  for (size_t i = 0; i < alone.size(); ++i) {
    for (size_t j = 0; j < i; ++j) EXPECT_NE(alone[i].logits, alone[j].logits) << i << " " << j;
  }
  const auto serving = open(options());
  std::vector<Said> together(settings.size());
  std::vector<std::thread> clients;
  for (size_t i = 0; i < settings.size(); ++i) {
    clients.emplace_back([&, i] {
      together[i] = ask(*serving, prompt, settings[i], {.save = false, .cache = CacheUse::kNone});
    });
  }
  for (std::thread& client : clients) client.join();
  // libllama computes those of one setting in steps of their own; ours in one step.
  for (size_t i = 0; i < settings.size(); ++i) {
    if (GetParam().type == GGML_TYPE_F16) continue;  // ggml's sums depend on the number of rows
    EXPECT_EQ(together[i].answer, alone[i].answer) << i;
    if (GetParam().engine == EngineChoice::kOwn && GetParam().type != GGML_TYPE_F32) {
      EXPECT_EQ(together[i].logits, alone[i].logits) << i;
    }
  }
}

TEST_P(Adapters, RestoredAsTheyWere) {
  const std::vector<float> scales = {1, 0.5F};
  std::vector<int32_t> chain = random_tokens(150, 1);
  Said uninterrupted;
  {
    const auto serving = open(options());
    ASSERT_TRUE(serving);
    const Said begun = ask(*serving, chain, scales);
    chain.insert(chain.end(), begun.answer.begin(), begun.answer.end());
    EXPECT_TRUE(serving->flush().ok());
    const std::vector<int32_t> question = random_tokens(20, 2);
    chain.insert(chain.end(), question.begin(), question.end());
    uninterrupted = ask(*serving, chain, scales);
    EXPECT_GT(uninterrupted.outcome.resident_tokens, 140);
    EXPECT_TRUE(serving->close().ok());
  }
  for (const policy::Mode mode : {policy::Mode::kPlan, policy::Mode::kKv}) {
    const auto serving = open(options());
    const Said again = ask(*serving, chain, scales, {.mode = mode, .save = false});
    EXPECT_GE(again.record().restored_tokens, 128);
    EXPECT_EQ(again.answer, uninterrupted.answer);
    if (GetParam().type == GGML_TYPE_Q8_0) {
      EXPECT_EQ(again.logits, uninterrupted.logits);
    }
    // Nothing of it is anybody else's.
    EXPECT_EQ(ask(*serving, chain, {}, {.save = false}).record().restored_tokens, 0);
    EXPECT_EQ(ask(*serving, chain, {1, 0}, {.save = false}).record().restored_tokens, 0);
  }
}

TEST_P(Adapters, NoneIsTheModelItself) {
  const std::vector<int32_t> prompt = random_tokens(90, 3);
  RuntimeOptions plain = options();
  plain.adapters.clear();
  Said before;
  {
    const auto serving = open(plain);
    before = say(*serving, prompt, 6);
    EXPECT_TRUE(serving->flush().ok());
    EXPECT_TRUE(serving->close().ok());
  }
  const auto serving = open(options());
  const Said again = ask(*serving, prompt, {0, 0}, {.save = false});
  EXPECT_EQ(again.answer, before.answer);
  EXPECT_GE(again.record().restored_tokens, 64);  // what was saved without any
}

}  // namespace
}  // namespace hcache::serving::testing
