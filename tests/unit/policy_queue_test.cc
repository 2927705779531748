// Who is admitted next.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>

#include "policy/queue.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Random;

WindowEntry of(QueueGroup group) { return {.group = group}; }

TEST(QueuePolicies, HaveNames) {
  for (const char* name : {"fcfs", "car"}) {
    const auto policy = parse_queue_policy(name);
    ASSERT_TRUE(policy.ok());
    EXPECT_EQ(queue_policy_name(*policy), name);
  }
  EXPECT_THAT(parse_queue_policy("lifo").status().message(), HasSubstr("fcfs, car"));
}

TEST(QueuePolicies, CarTakesWhatNeedsNoMovingFirst) {
  const std::vector<WindowEntry> window = {of(QueueGroup::kLoading), of(QueueGroup::kNoHistory),
                                           of(QueueGroup::kResident), of(QueueGroup::kNoHistory)};
  EXPECT_THAT(window_order(window, {.policy = QueuePolicy::kFcfs}), ElementsAre(0, 1, 2, 3));
  EXPECT_THAT(window_order(window, {.policy = QueuePolicy::kCar}), ElementsAre(2, 1, 3, 0));
}

TEST(QueuePolicies, PreemptedAndOvertakenOnesAndPrioritiesComeBeforeGroups) {
  std::vector<WindowEntry> window(4, of(QueueGroup::kResident));
  window[1] = {.priority = 1, .group = QueueGroup::kLoading};
  window[2] = {.overtaken = 8, .group = QueueGroup::kLoading};
  window[3] = {.preempted = true, .priority = -1, .group = QueueGroup::kLoading};
  EXPECT_THAT(window_order(window, {.policy = QueuePolicy::kCar, .window = 8}),
              ElementsAre(3, 2, 1, 0));
}

// However the groups fall, nobody is overtaken more often than the window is long.
TEST(QueuePolicies, NobodyStarves) {
  Random random(5);
  const QueueLimits limits = {.policy = QueuePolicy::kCar, .window = 6};
  std::deque<WindowEntry> queue;
  for (int turn = 0; turn < 20'000; ++turn) {
    while (queue.size() < 40) {
      queue.push_back(of(random.coin(0.8) ? QueueGroup::kResident : QueueGroup::kLoading));
    }
    const std::vector<WindowEntry> window(queue.begin(), queue.begin() + limits.window);
    const auto first = static_cast<size_t>(window_order(window, limits).front());
    for (size_t i = 0; i < first; ++i) ++queue[i].overtaken;
    ASSERT_LE(queue[first].overtaken, limits.window);
    queue.erase(queue.begin() + static_cast<std::ptrdiff_t>(first));
  }
}

}  // namespace
}  // namespace hcache::policy
