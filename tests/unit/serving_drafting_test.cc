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

  std::unique_ptr<Serving> serve(const std::string& name, int32_t draft) {
    return open(tiny_runtime(model_, dir_.file(name)), Env::real(),
                {.most = draft, .least_match = 2});
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

INSTANTIATE_TEST_SUITE_P(Models, DraftingTest, ::testing::Values("llama", "qwen3", "gemma3"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace hcache::serving
