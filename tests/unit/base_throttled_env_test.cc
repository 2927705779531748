// The throttled Env on a simulated clock: a base Env whose transfers take no time, and whose time
// passes only when somebody sleeps.
#include <deque>
#include <map>
#include <thread>

#include "base/fault_env.h"
#include "base/throttled_env.h"
#include "base_testing.h"

namespace hcache {
namespace {

using testing::TempDir;

constexpr std::size_t kPiece = 100'000;
constexpr double kRate = 1e6;  // bytes/s: a piece takes 100 ms
constexpr std::int64_t kMs = 1'000'000;

class ThrottledEnvTest : public ::testing::Test {
 protected:
  void SetUp() override {
    OpenOptions options;
    options.write = true;
    options.create = true;
    auto file = env_.open_file("/file", options);
    ASSERT_OK(file);
    file_ = std::move(*file);
    ASSERT_OK(file_->write_at(0, std::vector<std::byte>(4 * kPiece, std::byte{7})));
    queue_ = new_queue();
  }
  std::unique_ptr<IoQueue> new_queue() {
    auto queue = env_.new_io_queue(4);
    EXPECT_OK(queue);
    return std::move(*queue);
  }
  // A read of one piece.
  void read(IoQueue& queue, std::uint64_t tag, std::uint64_t offset = 0) {
    auto& buffer = buffers_.emplace_back(std::make_unique<std::vector<std::byte>>(kPiece));
    ASSERT_OK(queue.submit({IoOp::kRead, file_.get(), offset, *buffer, tag}));
  }
  // The next completion that is not partial; the partial ones before it must grow.
  IoCompletion next(IoQueue& queue) {
    std::deque<IoCompletion>& done = done_[&queue];
    std::size_t before = 0;
    while (true) {
      if (done.empty()) {
        std::vector<IoCompletion> more;
        EXPECT_OK(queue.reap(true, &more));
        if (more.empty()) return {};
        done.insert(done.end(), more.begin(), more.end());
      }
      const IoCompletion first = done.front();
      done.pop_front();
      if (!first.partial) return first;
      EXPECT_OK(first.status);
      EXPECT_GT(first.bytes, before);
      EXPECT_LT(first.bytes, kPiece);
      before = first.bytes;
      ++partial_;
    }
  }
  void expect_elapsed_ms(double ms) {
    EXPECT_NEAR(static_cast<double>(env_.monotonic_ns() - start_ns_) / kMs, ms, 0.5);
  }

  FaultEnv base_;
  ThrottledEnv env_{base_, kRate};
  std::unique_ptr<File> file_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> buffers_;
  std::unique_ptr<IoQueue> queue_;
  std::map<IoQueue*, std::deque<IoCompletion>> done_;  // reaped and not looked at yet
  std::int64_t start_ns_ = env_.monotonic_ns();
  int partial_ = 0;
};

TEST_F(ThrottledEnvTest, ReadsTakeTheTimeOfTheirBytesAndReportOnTheWay) {
  EXPECT_EQ(env_.nominal_read_bytes_per_s(), kRate);
  read(*queue_, 1);
  const IoCompletion done = next(*queue_);
  EXPECT_OK(done.status);
  EXPECT_EQ(done.tag, 1U);
  EXPECT_EQ(done.bytes, kPiece);
  expect_elapsed_ms(100);
  EXPECT_GT(partial_, 40);  // every two milliseconds
  EXPECT_EQ(buffers_[0]->back(), std::byte{7});
  EXPECT_EQ(queue_->in_flight(), 0U);
}

TEST_F(ThrottledEnvTest, QueuesShareTheLinkInTheOrderOfSubmission) {
  const auto other = new_queue();
  read(*queue_, 1);
  read(*other, 2);
  read(*queue_, 3);
  EXPECT_EQ(next(*other).tag, 2U);
  expect_elapsed_ms(200);
  EXPECT_EQ(next(*queue_).tag, 1U);
  expect_elapsed_ms(200);
  EXPECT_EQ(next(*queue_).tag, 3U);
  expect_elapsed_ms(300);
}

TEST_F(ThrottledEnvTest, AnIdleLinkSavesNothingUp) {
  env_.sleep_ns(500 * kMs);
  read(*queue_, 1);
  next(*queue_);
  expect_elapsed_ms(600);
}

TEST_F(ThrottledEnvTest, ReapWithoutWaitingTakesNoTime) {
  read(*queue_, 1);
  std::vector<IoCompletion> done;
  ASSERT_OK(queue_->reap(false, &done));
  EXPECT_TRUE(done.empty());
  expect_elapsed_ms(0);
  EXPECT_EQ(queue_->in_flight(), 1U);
}

TEST_F(ThrottledEnvTest, TheRateCanChangeUnderWay) {
  read(*queue_, 1);
  read(*queue_, 2);
  env_.sleep_ns(50 * kMs);
  env_.set_read_bytes_per_s(2 * kRate);
  EXPECT_EQ(next(*queue_).tag, 1U);
  expect_elapsed_ms(75);
  env_.set_read_bytes_per_s(0);  // not slowed
  EXPECT_EQ(env_.nominal_read_bytes_per_s(), 0);
  EXPECT_EQ(next(*queue_).tag, 2U);
  read(*queue_, 3);
  EXPECT_EQ(next(*queue_).tag, 3U);
  expect_elapsed_ms(75);
}

TEST_F(ThrottledEnvTest, ACancelledReadGivesTheLinkBack) {
  const auto other = new_queue();
  read(*other, 1);
  read(*other, 2);
  read(*queue_, 3);
  env_.sleep_ns(120 * kMs);  // the first is over the link, a fifth of the second
  other->cancel();
  EXPECT_OK(next(*other).status);
  EXPECT_EQ(next(*other).status.code(), Code::kCancelled);
  EXPECT_EQ(other->in_flight(), 0U);
  expect_elapsed_ms(120);
  EXPECT_EQ(next(*queue_).tag, 3U);
  expect_elapsed_ms(220);
  // What is submitted afterwards is not cancelled.
  read(*other, 4);
  EXPECT_OK(next(*other).status);
}

TEST_F(ThrottledEnvTest, AQueueThatEndsGivesTheLinkBack) {
  auto other = new_queue();
  read(*other, 1);
  read(*queue_, 2);
  other.reset();
  next(*queue_);
  expect_elapsed_ms(100);
}

TEST_F(ThrottledEnvTest, WhatIsNotReadNeedNotCross) {
  read(*queue_, 1, 10 * kPiece);          // beyond the end
  read(*queue_, 2, 3 * kPiece + 50'000);  // half of it
  const IoCompletion none = next(*queue_);
  EXPECT_OK(none.status);
  EXPECT_EQ(none.bytes, 0U);
  EXPECT_EQ(next(*queue_).bytes, 50'000U);
  expect_elapsed_ms(50);
  base_.set_failing_reads("file");
  read(*queue_, 3);
  EXPECT_EQ(next(*queue_).status.code(), Code::kDataLoss);
  expect_elapsed_ms(50);
}

TEST_F(ThrottledEnvTest, WritesAndReadsOfFilesAreNotSlowed) {
  std::vector<std::byte> data(kPiece);
  ASSERT_OK(queue_->submit({IoOp::kWrite, file_.get(), 0, data, 1}));
  EXPECT_EQ(next(*queue_).bytes, kPiece);
  ASSERT_OK(file_->read_at(0, data));
  expect_elapsed_ms(0);
}

// In real time: whoever waits for a read that takes an hour is woken when it is cancelled.
TEST(ThrottledRealEnvTest, CancelWakesReap) {
  const TempDir temp;
  ThrottledEnv env(Env::real(), 10);
  ASSERT_OK(write_whole_file(env, temp / "f", std::string(40'000, 'x')));
  const auto file = env.open_file(temp / "f", {});
  ASSERT_OK(file);
  auto queue = env.new_io_queue(4);
  ASSERT_OK(queue);
  std::vector<std::byte> buffer(40'000);
  ASSERT_OK((*queue)->submit({IoOp::kRead, file->get(), 0, buffer, 1}));
  std::thread canceller([&] {
    Env::real().sleep_ns(20 * kMs);
    (*queue)->cancel();
  });
  std::vector<IoCompletion> done;
  while (done.empty() || done.back().partial) ASSERT_OK((*queue)->reap(true, &done));
  EXPECT_EQ(done.back().status.code(), Code::kCancelled);
  canceller.join();
}

}  // namespace
}  // namespace hcache
