#include <gtest/gtest.h>

#include <ctime>
#include <thread>

#include "base/fault_env.h"
#include "base/pace.h"

namespace hcache {
namespace {

int64_t processor_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Of processor time, however often the machine runs something else.
void work(int64_t ns) {
  for (const int64_t begin = processor_ns(); processor_ns() - begin < ns;) Pace::point();
  Pace::point();  // where the clock jumped over the end
}

class PaceTest : public testing::Test {
 protected:
  // The clock moves by what was slept, and by a microsecond each time it is read.
  [[nodiscard]] int64_t slept_ns() { return env_.monotonic_ns() - begin_ns_ - 1000 * ++reads_; }

  FaultEnv env_{1};
  const int64_t begin_ns_ = env_.monotonic_ns();
  int64_t reads_ = 0;
  bool hurried_ = false;
};

TEST_F(PaceTest, RestsOnceAPieceOfWork) {
  // Of what this thread has worked by then, which is more than asked for where the clock jumps.
  const auto most_ns = [begin = processor_ns()] {
    return (processor_ns() - begin) / Pace::kWorkNs * Pace::kRestNs;
  };
  const Pace pace(env_, [&] { return hurried_; });
  work(Pace::kWorkNs / 2);
  EXPECT_LE(slept_ns(), most_ns()) << "before the first piece is done";
  work(20 * Pace::kWorkNs);
  EXPECT_GE(slept_ns(), Pace::kRestNs);
  EXPECT_LE(slept_ns(), most_ns());
  EXPECT_EQ(slept_ns() % Pace::kRestNs, 0);
}

TEST_F(PaceTest, GoesOnWhereSomebodyWaits) {
  const Pace pace(env_, [&] { return hurried_; });
  hurried_ = true;
  work(5 * Pace::kWorkNs);
  EXPECT_EQ(slept_ns(), 0);
  hurried_ = false;
  work(2 * Pace::kWorkNs);
  EXPECT_GE(slept_ns(), Pace::kRestNs);
}

TEST_F(PaceTest, IsAThreadsOwn) {
  const Pace pace(env_, [&] { return hurried_; });
  std::thread([] { work(5 * Pace::kWorkNs); }).join();
  EXPECT_EQ(slept_ns(), 0);
}

TEST_F(PaceTest, EndsWithTheObject) {
  {
    const Pace pace(env_, [&] { return hurried_; });
  }
  work(5 * Pace::kWorkNs);
  EXPECT_EQ(slept_ns(), 0);
}

}  // namespace
}  // namespace hcache
