// A server whose two devices share every layer: requests beside each other are answered as alone,
// and conversations come back on the same devices, on one, and from one.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "rpc_server.h"
#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using hcache::testing::RpcServer;

constexpr int kAnswer = 12;

class SharedLayersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto first = RpcServer::shared();
    const auto second = RpcServer::second();
    ASSERT_TRUE(first.ok() && second.ok());
    one_ =
        tiny_runtime(make_tiny(dir_, tiny_options("llama", 2, GGML_TYPE_Q8_0)), dir_.file("state"));
    one_.device = (*first)->device();
    two_ = one_;
    two_.device += "," + (*second)->device();
    two_.offload.share_layers = true;
  }

  TempDir dir_;
  RuntimeOptions one_;
  RuntimeOptions two_;
};

TEST_F(SharedLayersTest, RequestsBesideEachOtherAreAnsweredAsAlone) {
  std::vector<std::vector<int32_t>> prompts;
  for (uint32_t i = 0; i < 4; ++i) {
    prompts.push_back(random_tokens(70 + 7 * static_cast<int>(i), i + 1));
  }
  std::vector<Said> alone(prompts.size());
  std::vector<Said> together(prompts.size());
  const std::unique_ptr<Serving> serving = open(two_);
  ASSERT_NE(serving, nullptr);
  const How own{.mode = policy::Mode::kPlan, .save = true, .cache = CacheUse::kNone, .salt = {}};
  for (size_t i = 0; i < prompts.size(); ++i) alone[i] = say(*serving, prompts[i], kAnswer, own);
  std::vector<std::thread> users;
  for (size_t i = 0; i < prompts.size(); ++i) {
    users.emplace_back([&, i] { together[i] = say(*serving, prompts[i], kAnswer, own); });
  }
  for (std::thread& user : users) user.join();
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(together[i].answer, alone[i].answer) << "request " << i;
    EXPECT_EQ(together[i].logits, alone[i].logits) << "request " << i;
    const int n = static_cast<int>(prompts[i].size()) + kAnswer;
    EXPECT_EQ(read_state(*serving, together[i].seq, n), read_state(*serving, alone[i].seq, n));
  }
  EXPECT_TRUE(serving->close().ok());
}

TEST_F(SharedLayersTest, ConversationsComeBackExactly) {
  Reference ref;
  {
    const std::unique_ptr<Serving> serving = open(two_);
    ASSERT_NE(serving, nullptr);
    ref = hold_conversation(*serving, 150, 30);
    EXPECT_TRUE(serving->close().ok());
  }
  for (const policy::Mode mode : {policy::Mode::kHidden, policy::Mode::kKv, policy::Mode::kPlan}) {
    const Restored again = restore(two_, ref, {.mode = mode, .save = false});
    EXPECT_GT(again.record.restored_tokens, 128);
    EXPECT_TRUE(again.state == ref.state);
    // The question was saved but for its last token, which runs as a single row: in the servers'
    // attention that is another kernel.
    EXPECT_LT(model::kl_divergence(ref.said.logits, again.said.logits), 1e-3);
    EXPECT_EQ(again.said.answer, ref.said.answer);
  }
}

// Saved rows of K and V are the same bytes on one device and on two.
TEST_F(SharedLayersTest, StateMovesBetweenOneDeviceAndTwo) {
  for (const bool from_one : {true, false}) {
    SCOPED_TRACE(from_one ? "one to two" : "two to one");
    one_.state_dir = two_.state_dir = dir_.file(from_one ? "from-one" : "from-two");
    Reference ref;
    {
      const std::unique_ptr<Serving> serving = open(from_one ? one_ : two_);
      ASSERT_NE(serving, nullptr);
      ref = hold_conversation(*serving, 150, 30);
      EXPECT_TRUE(serving->close().ok());
    }
    const RuntimeOptions& other = from_one ? two_ : one_;
    for (const policy::Mode mode : {policy::Mode::kHidden, policy::Mode::kKv}) {
      const Restored moved = restore(other, ref, {.mode = mode, .save = false});
      EXPECT_GT(moved.record.restored_tokens, 128);
      EXPECT_LT(model::kl_divergence(ref.said.logits, moved.said.logits), 1e-3);
    }
  }
}

}  // namespace
}  // namespace hcache::serving
