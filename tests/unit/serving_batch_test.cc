// Requests on the batch engine, through the scheduler: the same answers as on the ordinary one, and
// saved state that each of them takes up from the other.
#include <algorithm>
#include <string>
#include <vector>

#include "serving_testing.h"

namespace hcache::serving {
namespace {

using namespace testing;  // NOLINT(google-build-using-namespace)

constexpr int kAnswer = 8;

// Costs of an engine on which a mix of kinds pays.
state::MeasuredBatchCosts even_costs(int n_layer) {
  state::MeasuredBatchCosts measured;
  measured.costs.n_layer = n_layer;
  measured.costs.kv_gen = {.slope = 1e-6};
  measured.costs.load_kv = {.slope = 1e-6};
  measured.costs.load_act = {.slope = 0.5e-6};
  measured.costs.forward = {.slope = 1e-6};
  measured.costs.attend = {.slope = 1e-9};
  measured.sizes = {.block_tokens = 64, .kv_bytes = 2000, .act_bytes = 1000};
  return measured;
}

class ServingBatch : public ::testing::Test {
 protected:
  ServingBatch()
      : shape_(tiny_options("llama", 4, GGML_TYPE_Q8_0)), model_(make_tiny(dir_, shape_)) {}

  RuntimeOptions ordinary(const std::string& state = "state") {
    return tiny_runtime(model_, dir_.file(state));
  }
  RuntimeOptions batch(policy::HybridMode mode, const std::string& state = "state") {
    RuntimeOptions options = ordinary(state);
    options.batch.use = state::BatchEngineUse::kAlways;
    options.batch.mode = mode;
    options.batch.measured = even_costs(shape_.shape.n_layer);
    options.batch.engine.buffer_tokens = 512;
    options.batch.engine.max_step_rows = 200;
    options.batch.engine.host_bytes = 0;
    options.batch.engine.disk_bytes = 32U << 20;
    options.batch.engine.disk_dir = dir_.file("blocks");
    return options;
  }
  static Said ask(Serving& serving, const std::vector<int32_t>& tokens, int n = kAnswer) {
    return say(serving, tokens, n, {.cache = CacheUse::kSaved});
  }

  TempDir dir_;
  model::SynthOptions shape_;
  std::string model_;
};

// A layer's weights take as long to come as one sequence's K and V to be generated, but not as
// those of many.
TEST_F(ServingBatch, TheFirstPromptsArePlannedForThoseThatCome) {
  const auto act_share = [&](int sequences) {
    RuntimeOptions options = batch(policy::HybridMode::kSearch);
    options.use_store = false;
    options.batch.measured->costs.kv_gen = {.slope = 3e-6};
    options.batch.measured->costs.load_weights_s = 1e-3;
    options.batch.sequences = sequences;
    const auto serving = open(options);
    if (serving == nullptr) return -1.0;
    ask(*serving, random_tokens(300, 5), 2);
    const double share = serving->batch_report()->act_share;
    EXPECT_TRUE(serving->close().ok());
    return share;
  };
  EXPECT_GT(act_share(1), 0.9);
  const double many = act_share(16);
  EXPECT_GT(many, 0);
  EXPECT_LT(many, 0.5);
}

TEST_F(ServingBatch, AnswersLikeTheOrdinaryEngineInEveryMode) {
  RuntimeOptions reference = ordinary();
  reference.use_store = false;
  const auto serving = open(reference);
  ASSERT_NE(serving, nullptr);
  const std::vector<int32_t> tokens = random_tokens(300, 5);
  const Said expected = say(*serving, tokens, kAnswer);
  for (const policy::HybridModeInfo& mode : policy::hybrid_modes()) {
    SCOPED_TRACE(mode.name);
    RuntimeOptions options = batch(mode.mode);
    options.use_store = false;
    const auto hybrid = open(options);
    ASSERT_NE(hybrid, nullptr);
    const Said said = ask(*hybrid, tokens);
    EXPECT_EQ(said.logits, expected.logits);
    EXPECT_EQ(said.answer, expected.answer);
    const auto report = hybrid->batch_report();
    ASSERT_TRUE(report.has_value());
    EXPECT_EQ(report->mode, mode.mode);
    EXPECT_GT(report->decode_steps, 0);
    EXPECT_TRUE(hybrid->close().ok());
  }
}

// More requests than the cache has room for at a time: some wait, some give way and come back.
TEST_F(ServingBatch, ManyRequestsShareALittleRoom) {
  RuntimeOptions reference = ordinary();
  reference.use_store = false;
  const auto serving = open(reference);
  ASSERT_NE(serving, nullptr);
  RuntimeOptions options = batch(policy::HybridMode::kKv);
  options.use_store = false;
  // Twelve blocks of K and V in F16.
  const model::ModelShape& shape = shape_.shape;
  options.batch.engine.disk_bytes = static_cast<size_t>(12 * 64 * shape.n_layer) * 2 * 2 *
                                    static_cast<size_t>(shape.n_head_kv * shape.head_dim);
  const auto hybrid = open(options);
  ASSERT_NE(hybrid, nullptr);
  EXPECT_EQ(hybrid->context(), 512);

  constexpr int kRequests = 8;
  constexpr int kReply = 90;
  std::vector<std::vector<int32_t>> answers(kRequests);
  for (int i = 0; i < kRequests; ++i) {
    scheduler::Request request;
    request.tokens = random_tokens(130, 20 + static_cast<uint32_t>(i));
    request.max_new_tokens = kReply;
    request.cache = CacheUse::kSaved;
    request.next = [&answer = answers[static_cast<size_t>(i)]](
                       std::span<const float> logits) -> Result<scheduler::NextToken> {
      answer.push_back(model::argmax(logits));
      return scheduler::NextToken{.token = answer.back(), .stop = false, .finish_reason = {}};
    };
    request.on_done = [](const scheduler::Outcome& outcome) {
      EXPECT_TRUE(outcome.status.ok()) << outcome.status.to_string();
    };
    const auto id = hybrid->scheduler().submit(std::move(request));
    ASSERT_TRUE(id.ok()) << id.status().to_string();
  }
  // It comes behind all of them.
  const std::vector<int32_t> last = random_tokens(300, 40);
  EXPECT_EQ(ask(*hybrid, last).answer, say(*serving, last, kAnswer).answer);
  hybrid->stop(int64_t{3600} * 1'000'000'000);
  for (int i = 0; i < kRequests; ++i) {
    SCOPED_TRACE(i);
    const Said expected =
        say(*serving, random_tokens(130, 20 + static_cast<uint32_t>(i)), kReply - 1);
    std::vector<int32_t> answer = answers[static_cast<size_t>(i)];
    ASSERT_EQ(answer.size(), static_cast<size_t>(kReply));
    answer.pop_back();
    EXPECT_EQ(answer, expected.answer);
  }
}

TEST_F(ServingBatch, ARequestThatNeverFitsHasAnErrorOfItsOwn) {
  RuntimeOptions options = batch(policy::HybridMode::kKv);
  options.use_store = false;
  const auto hybrid = open(options);
  ASSERT_NE(hybrid, nullptr);
  scheduler::Request request;
  request.tokens = random_tokens(513, 1);
  request.max_new_tokens = 0;
  const auto refused = hybrid->run(std::move(request));
  EXPECT_EQ(refused.status().code(), Code::kOutOfRange) << refused.status().to_string();
  EXPECT_EQ(ask(*hybrid, random_tokens(40, 1)).answer.size(), static_cast<size_t>(kAnswer));
}

// What a batch computed is restored by the ordinary engine, down to the tail's last row.
TEST_F(ServingBatch, WhatABatchSavedTheOrdinaryEngineRestores) {
  for (const policy::HybridMode mode :
       {policy::HybridMode::kKv, policy::HybridMode::kAct, policy::HybridMode::kUnmanaged}) {
    const std::string name(policy::hybrid_mode_name(mode));
    SCOPED_TRACE(name);
    std::vector<int32_t> tokens = random_tokens(200, 9);
    {
      const auto hybrid = open(batch(mode, name));
      ASSERT_NE(hybrid, nullptr);
      const Said said = ask(*hybrid, tokens, 20);
      tokens.insert(tokens.end(), said.answer.begin(), said.answer.end());
      EXPECT_TRUE(hybrid->close().ok());
    }
    const auto serving = open(ordinary(name));
    ASSERT_NE(serving, nullptr);
    EXPECT_EQ(saved_tokens(*serving, tokens), 220);
    // One that is saved itself completes a tail only if it has every encoding that it captures.
    const Said again = say(*serving, tokens, kAnswer, {.save = false});
    const scheduler::Outcome& outcome = again.outcome;
    EXPECT_EQ(outcome.hidden_tokens + outcome.kv_tokens + outcome.recomputed_tokens, 219);
    if (mode == policy::HybridMode::kKv) {
      EXPECT_EQ(outcome.hidden_tokens, 0);
    }
    if (mode == policy::HybridMode::kAct) {
      EXPECT_EQ(outcome.kv_tokens, 0);
    }

    RuntimeOptions reference = ordinary();
    reference.use_store = false;
    const auto uninterrupted = open(reference);
    ASSERT_NE(uninterrupted, nullptr);
    const Said expected = say(*uninterrupted, tokens, kAnswer);
    EXPECT_EQ(again.logits, expected.logits);
    EXPECT_EQ(again.answer, expected.answer);
  }
}

// And the reverse: blocks take whole chunks, whichever way they were saved; the tail is computed.
TEST_F(ServingBatch, WhatTheOrdinaryEngineSavedABatchRestores) {
  for (const policy::SaveMode mode : {policy::SaveMode::kKv, policy::SaveMode::kHidden}) {
    const std::string name(policy::save_mode_name(mode));
    SCOPED_TRACE(name);
    std::vector<int32_t> tokens = random_tokens(200, 9);
    Said expected;
    {
      RuntimeOptions options = ordinary(name);
      options.save = mode;
      const auto serving = open(options);
      ASSERT_NE(serving, nullptr);
      const Said said = say(*serving, tokens, 20);
      tokens.insert(tokens.end(), said.answer.begin(), said.answer.end());
      EXPECT_TRUE(serving->flush().ok());
      expected = say(*serving, tokens, kAnswer);
      EXPECT_TRUE(serving->close().ok());
    }
    // Whatever the batch would have kept itself.
    for (const policy::HybridMode own : {policy::HybridMode::kKv, policy::HybridMode::kAct}) {
      const auto hybrid = open(batch(own, name));
      ASSERT_NE(hybrid, nullptr);
      const Said again = ask(*hybrid, tokens);
      const bool kv = mode == policy::SaveMode::kKv;
      EXPECT_EQ(again.outcome.kv_tokens, kv ? 192 : 0);
      EXPECT_EQ(again.outcome.hidden_tokens, kv ? 0 : 192);
      EXPECT_EQ(again.logits, expected.logits);
      EXPECT_EQ(again.answer, expected.answer);
      EXPECT_TRUE(hybrid->close().ok());
    }
  }
}

// Chunks before a damaged one are taken, those behind it computed; and nothing is read wrong.
TEST_F(ServingBatch, ADamagedPageEndsARestoreAtItsChunk) {
  for (const policy::SaveMode mode : {policy::SaveMode::kKv, policy::SaveMode::kHidden}) {
    const std::string name(policy::save_mode_name(mode));
    SCOPED_TRACE(name);
    const std::vector<int32_t> tokens = random_tokens(400, 9);
    RuntimeOptions options = ordinary(name);
    options.save = mode;
    Said expected;
    {
      const auto serving = open(options);
      ASSERT_NE(serving, nullptr);
      expected = say(*serving, tokens, kAnswer);
      EXPECT_TRUE(serving->close().ok());
    }
    const bool hidden = mode == policy::SaveMode::kHidden;
    damage_page(options, tokens, 3, 1, hidden);
    damage_page(options, tokens, 2, 1, hidden);
    const auto hybrid = open(batch(policy::HybridMode::kKv, name));
    ASSERT_NE(hybrid, nullptr);
    const Said again = ask(*hybrid, tokens);
    const scheduler::Outcome& outcome = again.outcome;
    EXPECT_EQ(again.record().damaged_pages, 2U);
    EXPECT_EQ(outcome.kv_tokens + outcome.hidden_tokens, 128);
    EXPECT_EQ(again.logits, expected.logits);
    EXPECT_EQ(again.answer, expected.answer);
    EXPECT_TRUE(hybrid->close().ok());
  }
}

}  // namespace
}  // namespace hcache::serving
