// Guessed tokens change nothing but how many steps an answer takes: what is said, held and saved is
// that of one token a step.
#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int kAnswer = 250;

class DraftingTest : public ::testing::TestWithParam<const char*> {
 protected:
  DraftingTest() : model_(make_tiny(dir_, tiny_options(GetParam(), 2, GGML_TYPE_Q8_0))) {}

  // It is not asked whether a few guesses pay: that depends on what else the machine does.
  std::unique_ptr<Serving> serve(const std::string& name, int32_t draft) {
    return open(tiny_runtime(model_, dir_.file(name)), Env::real(),
                {.most = draft, .least = std::min(draft, 4), .least_match = 2});
  }

  TempDir dir_;
  std::string model_;
};

TEST_P(DraftingTest, AnswersAndStateAreThoseWithoutIt) {
  // A passage twice, so that there is something to guess from the start.
  std::vector<int32_t> prompt = random_tokens(60, 1);
  prompt.insert(prompt.end(), prompt.begin(), prompt.begin() + 40);
  std::vector<int32_t> chain = prompt;
  Said plain;
  std::vector<std::byte> state;
  {
    const auto serving = serve("plain", 0);
    plain = say(*serving, prompt, kAnswer);
    EXPECT_EQ(plain.outcome.drafted_tokens, 0);
    chain.insert(chain.end(), plain.answer.begin(), plain.answer.end());
    state = read_state(*serving, plain.seq, static_cast<int>(chain.size()));
    ASSERT_TRUE(serving->close().ok());
  }
  const std::vector<int32_t> question = random_tokens(9, 5);
  std::vector<int32_t> next = chain;
  next.insert(next.end(), question.begin(), question.end());
  Said then;
  {
    const auto serving = serve("drafted", 24);
    const Said said = say(*serving, prompt, kAnswer);
    EXPECT_EQ(said.logits, plain.logits);
    EXPECT_EQ(said.answer, plain.answer);
    // Random models repeat themselves sooner or later.
    EXPECT_GT(said.outcome.accepted_tokens, 20);
    EXPECT_GE(said.outcome.drafted_tokens, said.outcome.accepted_tokens);
    EXPECT_TRUE(read_state(*serving, said.seq, static_cast<int>(chain.size())) == state);
    ASSERT_TRUE(serving->flush().ok());
    then = say(*serving, next, 40);
    EXPECT_EQ(then.outcome.resident_tokens, static_cast<int64_t>(chain.size()));
    ASSERT_TRUE(serving->close().ok());
  }
  // What was saved is of the tokens that came true.
  const auto serving = serve("drafted", 24);
  const Said again = say(*serving, next, 40, {.mode = policy::Mode::kKv, .save = false});
  EXPECT_EQ(again.record().restored_tokens, static_cast<int64_t>(next.size()) - 1);
  EXPECT_EQ(again.logits, then.logits);
  EXPECT_EQ(again.answer, then.answer);
  ASSERT_TRUE(serving->close().ok());
}

// A second model guesses: the same one, which is always right, or one with coarser weights.
class DraftModelTest : public ::testing::TestWithParam<bool> {
 protected:
  DraftModelTest() : model_(make_tiny(dir_, tiny_options("llama", 2, GGML_TYPE_Q8_0))) {
    draft_ = GetParam() ? model_ : make_tiny(dir_, tiny_options("llama", 2, GGML_TYPE_Q4_0));
  }

  std::unique_ptr<Serving> serve(int32_t most) {
    ServingOptions options;
    options.runtime = tiny_runtime(model_, dir_.file("state"));
    options.scheduler.reuse.cheap_tokens = 0;
    // Nothing is copied, and it is not asked whether it pays.
    options.scheduler.draft = {.most = most, .least = most, .least_match = 1000};
    options.draft = DraftOptions{.runtime = tiny_runtime(draft_, dir_.file("draft"))};
    auto serving = Serving::open(Env::real(), options);
    EXPECT_TRUE(serving.ok()) << serving.status().to_string();
    return serving.ok() ? std::move(serving).value() : nullptr;
  }
  // What the drafting model's store has of it.
  uint64_t saved_chunks() {
    store::StoreOptions options;
    options.dirs = {dir_.file("draft") + "/store"};
    options.read_only = true;
    const auto store = store::Store::open(Env::real(), options);
    EXPECT_TRUE(store.ok()) << store.status().to_string();
    return store.ok() ? (*store)->stat()->chunks : 0;
  }

  TempDir dir_;
  std::string model_;
  std::string draft_;
};

TEST_P(DraftModelTest, AnswersAreThoseWithoutItAndItsStateIsSaved) {
  const std::vector<int32_t> prompt = random_tokens(150, 1);
  Said plain;
  {
    const auto serving = serve(0);
    plain = say(*serving, prompt, 60, {.save = false});
    ASSERT_TRUE(serving->close().ok());
  }
  std::vector<int32_t> next = prompt;
  next.insert(next.end(), plain.answer.begin(), plain.answer.end());
  for (const int32_t token : random_tokens(9, 5)) next.push_back(token);
  Said then;
  {
    const auto serving = serve(6);
    const Said said = say(*serving, prompt, 60);
    EXPECT_EQ(said.logits, plain.logits);
    EXPECT_EQ(said.answer, plain.answer);
    EXPECT_GE(said.outcome.drafted_tokens, 40);
    if (GetParam()) {
      EXPECT_EQ(said.outcome.accepted_tokens, said.outcome.drafted_tokens);
    } else {
      EXPECT_LT(said.outcome.accepted_tokens, said.outcome.drafted_tokens);
    }
    then = say(*serving, next, 40);
    ASSERT_TRUE(serving->close().ok());
  }
  EXPECT_GE(saved_chunks(), next.size() / 64);
  {
    const auto serving = serve(6);
    Said again = say(*serving, next, 40);
    EXPECT_EQ(again.answer, then.answer);
    // Until the drafting model's state is back, replies go on without it.
    for (int tries = 0; again.outcome.drafted_tokens < 20 && tries < 50; ++tries) {
      again = say(*serving, next, 400, {.save = false});
    }
    EXPECT_GE(again.outcome.drafted_tokens, 20);
    // Erasing a conversation erases what the drafting model holds of it.
    std::vector<int32_t> chain = next;
    chain.insert(chain.end(), again.answer.begin(), again.answer.end());
    serving->scheduler().forget(own_salt("").id, chain);
    ASSERT_TRUE(serving->flush().ok());
    ASSERT_TRUE(serving->close().ok());
  }
  EXPECT_EQ(saved_chunks(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Models, DraftModelTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "TheSame" : "Coarser");
});

TEST(DraftModel, AnErrorSaysThatItIsAboutThatModel) {
  TempDir dir;
  const std::string model = make_tiny(dir, tiny_options("llama", 2, GGML_TYPE_Q8_0));
  ServingOptions options;
  options.runtime = tiny_runtime(model, dir.file("state"));
  options.scheduler.draft.most = 4;
  options.draft = DraftOptions{.runtime = tiny_runtime(dir.file("none.gguf"), dir.file("draft"))};
  const auto serving = Serving::open(Env::real(), options);
  EXPECT_EQ(serving.code(), Code::kNotFound);
  EXPECT_NE(serving.status().message().find("drafts"), std::string::npos)
      << serving.status().to_string();
}

INSTANTIATE_TEST_SUITE_P(Models, DraftingTest, ::testing::Values("llama", "qwen3", "gemma3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace hcache::serving
