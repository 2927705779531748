// Requests that are served together over two devices, with steps in flight on both, are answered
// as one after another; and what they restore goes to both at once.
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
    model::SynthOptions options = tiny_options("llama", 2, GGML_TYPE_Q8_0);
    options.shape.n_layer = 4;  // two on each
    runtime_ = tiny_runtime(make_tiny(dir_, options), dir_.file("state"));
    runtime_.device = (*first)->device() + "," + (*second)->device();
    for (uint32_t i = 0; i < 4; ++i)
      prompts_.push_back(random_tokens(70 + 7 * static_cast<int>(i), i + 1));
  }

  // All but the last, whose logits are wanted.
  [[nodiscard]] int restored_rows(size_t request) const {
    return static_cast<int>(prompts_[request].size()) - 1;
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

// What is saved of steps in flight is whole: it comes back on the same devices. The last row of a
// prompt is then computed alone, for which such a device may choose another kernel than for many:
// the answer is that of one who goes on from the rows while they are there.
TEST_F(PipelineTest, WhatTheySaveComesBack) {
  std::vector<Said> said(prompts_.size());
  std::vector<std::vector<std::byte>> states;
  {
    const std::unique_ptr<Serving> serving = open(runtime_);
    ASSERT_NE(serving, nullptr);
    std::vector<std::thread> users;
    for (size_t i = 0; i < prompts_.size(); ++i) {
      users.emplace_back([&, i] { said[i] = say(*serving, prompts_[i], kAnswer); });
    }
    for (std::thread& user : users) user.join();
    for (size_t i = 0; i < prompts_.size(); ++i) {
      states.push_back(read_state(*serving, said[i].seq, restored_rows(i)));
      said[i] = say(*serving, prompts_[i], kAnswer, {.save = false});
    }
    EXPECT_TRUE(serving->flush().ok());
    EXPECT_TRUE(serving->close().ok());
  }
  const std::unique_ptr<Serving> serving = open(runtime_);
  ASSERT_NE(serving, nullptr);
  for (size_t i = 0; i < prompts_.size(); ++i) {
    const Said again = say(*serving, prompts_[i], kAnswer, {.mode = policy::Mode::kHidden});
    EXPECT_EQ(again.record().restored_tokens, restored_rows(i)) << "request " << i;
    EXPECT_TRUE(read_state(*serving, again.seq, restored_rows(i)) == states[i]) << "request " << i;
    ASSERT_EQ(again.record().devices.size(), 2U);
    EXPECT_EQ(again.record().devices[0].pages.total(), again.record().devices[1].pages.total());
    EXPECT_EQ(again.answer, said[i].answer) << "request " << i;
  }
  EXPECT_TRUE(serving->close().ok());
}

// Both servers' layers are restored at once, to the bits of one server, and each is sent half.
TEST_F(PipelineTest, ARestoreReadsHalfForEach) {
  const RuntimeOptions servers = runtime_;
  runtime_.device = runtime_.device.substr(0, runtime_.device.find(','));
  Reference ref;
  {
    const std::unique_ptr<Serving> serving = open(runtime_);
    ASSERT_NE(serving, nullptr);
    ref = hold_conversation(*serving, 300, 21);
    EXPECT_TRUE(serving->close().ok());
  }
  for (const policy::Mode mode : {policy::Mode::kHidden, policy::Mode::kKv}) {
    const How how{.mode = mode, .save = false};
    const Restored on_one = restore(runtime_, ref, how);
    const Restored restored = restore(servers, ref, how);
    EXPECT_TRUE(restored.state == ref.state) << restored.record.schedule;
    EXPECT_EQ(restored.said.answer, on_one.said.answer);
    EXPECT_EQ(restored.said.logits, on_one.said.logits);
    EXPECT_EQ(on_one.record.devices.size(), 1U);
    ASSERT_EQ(restored.record.devices.size(), 2U);
    const policy::RestoredDevice& first = restored.record.devices[0];
    const policy::RestoredDevice& second = restored.record.devices[1];
    EXPECT_EQ(first.n_layers, 2);
    EXPECT_NE(first.device, second.device);
    EXPECT_GT(first.pages.disk, 0U);
    EXPECT_EQ(first.pages.disk, second.pages.disk);
    EXPECT_EQ(first.pages.total() + second.pages.total(),
              restored.record.hidden_pages.total() + restored.record.kv_pages.total());
  }
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
        const scheduler::StepItem item = {sequences.back(), prompt, scheduler::LogitsOf::kLast};
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
