// How tests wait for what other threads, processes and devices do: by a number of looks that no
// machine is too slow for, and with a failure that names what did not come.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <utility>

namespace hcache::test {

// Bounds a loop: while (!there() && patience.lasts()) {}
//
// The first thousand looks follow each other at once, so a loop that has something to do at each
// look is not held up; then a millisecond lies between two.
class Patience {
 public:
  explicit Patience(std::string what) : what_(std::move(what)) {}
  // False, and the test has failed: it did not come.
  [[nodiscard]] bool lasts() {
    if (++looks_ > kLooks) {
      ADD_FAILURE() << "waited in vain for " << what_;
      return false;
    }
    if (looks_ > kQuickLooks) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return true;
  }

 private:
  static constexpr int kQuickLooks = 1000;
  static constexpr int kLooks = 120'000;
  std::string what_;
  int looks_ = 0;
};

// Whether `condition` comes true; for EXPECT_TRUE, which names it.
inline bool eventually(const std::function<bool()>& condition) {
  constexpr int kLooks = 60'000;
  for (int look = 0; look < kLooks; ++look) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return false;
}

// Ends the program behind a failure where something is left that nothing else can end.
[[noreturn]] inline void give_up() {
  std::fflush(nullptr);
  std::_Exit(1);
}

// What is promised, once it comes; give_up() where it does not, since it may still come.
template <typename T>
T come(std::future<T> future, const std::string& what) {
  Patience patience(what);
  while (future.wait_for(std::chrono::seconds(0)) != std::future_status::ready) {
    if (!patience.lasts()) give_up();
  }
  return future.get();
}

// Runs what must not wait for long on a thread of its own; give_up() where it does.
inline void expect_to_end(const std::string& what, const std::function<void()>& run) {
  std::atomic<bool> ended = false;
  std::thread thread([&] {
    run();
    ended = true;
  });
  Patience patience("the end of " + what);
  while (!ended) {
    if (!patience.lasts()) give_up();
  }
  thread.join();
}

}  // namespace hcache::test
