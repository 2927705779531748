#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "base/stall.h"

namespace hcache {
namespace {

using Clock = std::chrono::steady_clock;

TEST(StallTimer, TellsWhatNobodyHereUsed) {
  const StallTimer::Sample begin = {.process_ns = 1'000'000, .waits = 3};
  const auto after = [&](int64_t process_ns, int64_t waits) {
    return StallTimer::stalled_s(begin, {1'000'000 + process_ns, 3 + waits}, 5e-3);
  };
  EXPECT_DOUBLE_EQ(after(0, 0), 5e-3);
  EXPECT_DOUBLE_EQ(after(2'000'000, 0), 3e-3);
  EXPECT_DOUBLE_EQ(after(5'000'000, 0), 0);
  EXPECT_DOUBLE_EQ(after(9'000'000, 0), 0);  // two threads ran
  EXPECT_DOUBLE_EQ(after(0, 1), 0);          // it waited, which is its own doing
}

TEST(StallTimer, WaitingIsNoStall) {
  const StallTimer timer;
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(timer.stalled_s(0.02), 0);
}

TEST(StallTimer, WorkIsNoStall) {
  // However often the machine runs something else: what was computed is not told.
  const StallTimer timer;
  const auto begin = Clock::now();
  timespec start{};
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &start);
  do {
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  } while ((now.tv_sec - start.tv_sec) * 1'000'000'000 + now.tv_nsec - start.tv_nsec < 20'000'000);
  const double elapsed_s = std::chrono::duration<double>(Clock::now() - begin).count();
  EXPECT_LE(timer.stalled_s(elapsed_s), elapsed_s - 0.019);
}

}  // namespace
}  // namespace hcache
