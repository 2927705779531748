// Requests that are served together over two devices, with steps in flight on both, are answered
// as one after another.
#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "engine_executor.h"
#include "rpc_server.h"
#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)
using hcache::testing::RpcServer;

constexpr int kAnswer = 12;

class PipelineTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto first = RpcServer::shared();
    const auto second = RpcServer::second();
    ASSERT_TRUE(first.ok() && second.ok());
    runtime_ =
        tiny_runtime(make_tiny(dir_, tiny_options("llama", 2, GGML_TYPE_Q8_0)), dir_.file("state"));
    runtime_.device = (*first)->device() + "," + (*second)->device();
    for (uint32_t i = 0; i < 4; ++i)
      prompts_.push_back(random_tokens(70 + 7 * static_cast<int>(i), i + 1));
  }

  TempDir dir_;
  RuntimeOptions runtime_;
  std::vector<std::vector<int32_t>> prompts_;
};

TEST_F(PipelineTest, AnswersAsOneAfterAnother) {
  std::vector<Said> alone(prompts_.size());
  std::vector<Said> together(prompts_.size());
  const std::unique_ptr<Serving> serving = open(runtime_);
  ASSERT_NE(serving, nullptr);
  const How own{.mode = policy::Mode::kPlan, .save = true, .cache = CacheUse::kNone, .salt = {}};
  for (size_t i = 0; i < prompts_.size(); ++i) {
    alone[i] = say(*serving, prompts_[i], kAnswer, own);
  }
  std::vector<std::thread> users;
  for (size_t i = 0; i < prompts_.size(); ++i) {
    users.emplace_back([&, i] { together[i] = say(*serving, prompts_[i], kAnswer, own); });
  }
  for (std::thread& user : users) user.join();
  for (size_t i = 0; i < prompts_.size(); ++i) {
    EXPECT_EQ(together[i].answer, alone[i].answer) << "request " << i;
    EXPECT_EQ(together[i].logits, alone[i].logits) << "request " << i;
    const int n = static_cast<int>(prompts_[i].size()) + kAnswer;
    EXPECT_EQ(read_state(*serving, together[i].seq, n), read_state(*serving, alone[i].seq, n));
  }
  EXPECT_TRUE(serving->close().ok());
}

// What is saved of steps in flight is whole: it comes back on the same devices.
TEST_F(PipelineTest, WhatTheySaveComesBack) {
  std::vector<Said> said(prompts_.size());
  {
    const std::unique_ptr<Serving> serving = open(runtime_);
    ASSERT_NE(serving, nullptr);
    std::vector<std::thread> users;
    for (size_t i = 0; i < prompts_.size(); ++i) {
      users.emplace_back([&, i] { said[i] = say(*serving, prompts_[i], kAnswer); });
    }
    for (std::thread& user : users) user.join();
    EXPECT_TRUE(serving->flush().ok());
    EXPECT_TRUE(serving->close().ok());
  }
  const std::unique_ptr<Serving> serving = open(runtime_);
  ASSERT_NE(serving, nullptr);
  for (size_t i = 0; i < prompts_.size(); ++i) {
    const Said again = say(*serving, prompts_[i], kAnswer, {.mode = policy::Mode::kHidden});
    EXPECT_GT(again.record().restored_tokens, 0) << "request " << i;
    EXPECT_EQ(again.answer, said[i].answer) << "request " << i;
  }
  EXPECT_TRUE(serving->close().ok());
}

TEST_F(PipelineTest, TheExecutorKeepsStepsInFlight) {
  auto runtime = state::Runtime::open(Env::real(), runtime_);
  ASSERT_TRUE(runtime.ok()) << runtime.status().to_string();
  {
    EngineExecutor executor(Env::real(), **runtime, {});
    EXPECT_EQ(executor.steps_in_flight(1), 1);
    EXPECT_EQ(executor.steps_in_flight(4), 2);
    std::vector<SeqId> sequences;
    std::vector<std::vector<float>> logits;
    for (int round = 0; round < 2; ++round) {
      for (const auto& prompt : prompts_) {
        sequences.push_back(executor.create(own_salt(""), /*save=*/false).value());
        const scheduler::StepItem item = {sequences.back(), prompt, true};
        ASSERT_TRUE(executor.begin_step({&item, 1}).ok());
        // In the first round one by one, then two at a time.
        if (round == 1 && sequences.size() % 2 == 1) continue;
        for (int i = 0; i <= round; ++i) {
          const auto output = executor.finish_step();
          ASSERT_TRUE(output.ok()) << output.status().to_string();
          logits.emplace_back(output->logits[0].begin(), output->logits[0].end());
        }
      }
    }
    ASSERT_EQ(logits.size(), 2 * prompts_.size());
    for (size_t i = 0; i < prompts_.size(); ++i) {
      EXPECT_EQ(logits[prompts_.size() + i], logits[i]) << "prompt " << i;
    }
  }
  EXPECT_TRUE((*runtime)->close().ok());
}

}  // namespace
}  // namespace hcache::serving
