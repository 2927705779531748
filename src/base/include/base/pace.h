// Lets work in the background take a core for a moment at a time. A thread that wakes up and works
// on for milliseconds takes them from the step that was being computed there; many short turns are
// taken from many steps instead, and no step is late by much.
//
// Threading: a Pace belongs to the thread that made it; point() may be called by any.
#pragma once

#include <cstdint>
#include <functional>

#include "base/env.h"

namespace hcache {

class Pace {
 public:
  static constexpr std::int64_t kWorkNs = 200'000;  // of processor time, between two rests
  static constexpr std::int64_t kRestNs = 600'000;

  // From now on this thread rests at its points, once it has worked for kWorkNs since it last did.
  // `hurry` is asked before each rest; true: work on, somebody waits. One of a thread at a time.
  Pace(Env& env, std::function<bool()> hurry);
  Pace(const Pace&) = delete;
  Pace& operator=(const Pace&) = delete;
  ~Pace();

  // Belongs in loops that may take milliseconds, every ten or hundred microseconds of work, where
  // no lock is held that a thread of the engine may want. Of no effect, and all but free, on a
  // thread without a Pace.
  static void point() {
    if (current_ != nullptr) current_->rest_when_due();
  }

 private:
  void rest_when_due();

  static thread_local Pace* current_;
  Env& env_;
  const std::function<bool()> hurry_;
  std::int64_t begin_ns_;  // of this piece of work, on the thread's own clock
};

}  // namespace hcache
