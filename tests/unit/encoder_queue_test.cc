// Which texts are computed together, and what becomes of jobs that can't be.
#include <gtest/gtest.h>

#include <future>

#include "encode_queue.h"

namespace hcache::encoder {
namespace {

// Gives each text its first token. It waits in its first batch until it is let go on.
class FakeEncoder final : public libllama::LlamaEncoder {
 public:
  struct Seen {
    std::promise<void> begun;
    std::promise<void> go_on;
    std::vector<std::vector<int32_t>> batches;  // the first tokens of each one's texts
    bool fails = false;
  };
  explicit FakeEncoder(Seen* seen) : seen_(seen) {
    options_.pooling = model::Pooling::kMean;
    options_.max_text_tokens = 10;
    options_.max_batch_tokens = 6;
    options_.max_batch_texts = 3;
  }
  const libllama::LlamaModelInfo& info() const override { return info_; }
  const libllama::EncoderOptions& options() const override { return options_; }
  int32_t width() const override { return 1; }
  Result<std::vector<libllama::EncodedText>> encode(
      std::span<const std::vector<int32_t>> texts) override {
    if (seen_->batches.empty()) {
      seen_->begun.set_value();
      seen_->go_on.get_future().wait();
    }
    std::vector<int32_t>& batch = seen_->batches.emplace_back();
    std::vector<libllama::EncodedText> rows;
    for (const std::vector<int32_t>& text : texts) {
      batch.push_back(text.front());
      rows.push_back({{static_cast<float>(text.front())}});
    }
    if (seen_->fails && seen_->batches.size() > 1) return internal_error("broken");
    return rows;
  }

 private:
  Seen* seen_;
  libllama::LlamaModelInfo info_;
  libllama::EncoderOptions options_;
};

class EncodeQueueTest : public ::testing::Test {
 protected:
  using Rows = Result<std::vector<libllama::EncodedText>>;

  std::unique_ptr<EncodeQueue> start(int64_t max_queued = 10) {
    return std::move(*EncodeQueue::start(
        Env::real(), max_queued, [&]() -> Result<std::unique_ptr<libllama::LlamaEncoder>> {
          return std::unique_ptr<libllama::LlamaEncoder>(std::make_unique<FakeEncoder>(&seen_));
        }));
  }
  // Texts of two tokens each.
  static EncodeJobPtr job(const std::vector<int32_t>& firsts, std::promise<Rows>* rows) {
    auto made = std::make_shared<EncodeJob>();
    for (const int32_t first : firsts) made->texts.push_back({first, 0});
    made->done = [rows](Rows given) { rows->set_value(std::move(given)); };
    return made;
  }
  // Occupies the queue until go_on.
  void occupy(EncodeQueue& queue) {
    ASSERT_TRUE(queue.submit(job({0}, &first_)).ok());
    seen_.begun.get_future().wait();
  }
  static std::vector<float> numbers(Rows rows) {
    std::vector<float> out;
    for (const auto& text : rows.value()) out.push_back(text.front().front());
    return out;
  }

  FakeEncoder::Seen seen_;
  std::promise<Rows> first_;
};

TEST_F(EncodeQueueTest, TakesATextOfEachJobInTurns) {
  const auto queue = start();
  occupy(*queue);
  std::promise<Rows> long_one;
  std::promise<Rows> short_one;
  ASSERT_TRUE(queue->submit(job({1, 2, 3, 4, 5}, &long_one)).ok());
  ASSERT_TRUE(queue->submit(job({6, 7}, &short_one)).ok());
  seen_.go_on.set_value();
  EXPECT_EQ(numbers(long_one.get_future().get()), (std::vector<float>{1, 2, 3, 4, 5}));
  EXPECT_EQ(numbers(short_one.get_future().get()), (std::vector<float>{6, 7}));
  queue->stop();
  EXPECT_EQ(seen_.batches, (std::vector<std::vector<int32_t>>{{0}, {1, 6, 2}, {7, 3, 4}, {5}}));
  EXPECT_EQ(queue->counts().done, 3);
  EXPECT_EQ(queue->counts().texts, 8);
  EXPECT_EQ(queue->counts().tokens, 16);
  EXPECT_EQ(queue->counts().waiting, 0);
}

TEST_F(EncodeQueueTest, RefusesWhatIsTooMuchAndDropsWhatNobodyWaitsFor) {
  const auto queue = start(2);
  occupy(*queue);
  std::promise<Rows> none;
  const EncodeJobPtr left = job({1}, &none);
  ASSERT_TRUE(queue->submit(left).ok());
  std::promise<Rows> more;
  EXPECT_EQ(queue->submit(job({2}, &more)).code(), Code::kResourceExhausted);
  left->gone.store(true);
  seen_.go_on.set_value();
  EXPECT_EQ(numbers(first_.get_future().get()), std::vector<float>{0});
  while (queue->counts().waiting > 0) std::this_thread::yield();
  ASSERT_TRUE(queue->submit(job({3}, &more)).ok());
  EXPECT_EQ(numbers(more.get_future().get()), std::vector<float>{3});
  queue->stop();
  EXPECT_EQ(seen_.batches, (std::vector<std::vector<int32_t>>{{0}, {3}}));
  EXPECT_EQ(queue->counts().refused, 1);
  EXPECT_EQ(queue->counts().dropped, 1);
}

TEST_F(EncodeQueueTest, FailsTheJobsOfABatchThatFails) {
  const auto queue = start();
  seen_.fails = true;
  occupy(*queue);
  std::promise<Rows> a;
  std::promise<Rows> b;
  ASSERT_TRUE(queue->submit(job({1, 2, 3, 4, 5}, &a)).ok());
  ASSERT_TRUE(queue->submit(job({6}, &b)).ok());
  seen_.go_on.set_value();
  EXPECT_EQ(a.get_future().get().status().message(), "broken");
  EXPECT_EQ(b.get_future().get().status().message(), "broken");
  queue->stop();
  EXPECT_EQ(seen_.batches.size(), 2U) << "a job that failed goes on";
  EXPECT_EQ(queue->counts().failed, 2);
}

TEST_F(EncodeQueueTest, TellsWhyLoadingFails) {
  const auto queue = EncodeQueue::start(
      Env::real(), 1,
      []() -> Result<std::unique_ptr<libllama::LlamaEncoder>> { return not_found("nowhere"); });
  EXPECT_EQ(queue.status().message(), "nowhere");
}

}  // namespace
}  // namespace hcache::encoder
