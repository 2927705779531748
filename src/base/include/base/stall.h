// Time in which the machine ran something else: another process had the core, or the host of a
// virtual machine another guest. /proc/stat counts the second, in ticks of 10 ms.
//
// Threading: an object belongs to one thread; it measures that thread in its process.
#pragma once

#include <cstdint>

namespace hcache {

class StallTimer {
 public:
  // Begins.
  StallTimer() : begin_(now()) {}
  // Of the seconds since it began, which the caller has measured: those in which no thread of this
  // process had a core and this one waited for nothing. Errs on the small side: 0 where this thread
  // waited in between, fewer by what other threads ran.
  [[nodiscard]] double stalled_s(double elapsed_s) const {
    return stalled_s(begin_, now(), elapsed_s);
  }

  struct Sample {
    int64_t process_ns = 0;  // processor time of all threads
    int64_t waits = 0;       // of this thread, so far: times that it gave its core up
  };
  // Between two samples. Pure.
  [[nodiscard]] static double stalled_s(const Sample& begin, const Sample& end, double elapsed_s);

 private:
  [[nodiscard]] static Sample now();

  Sample begin_;
};

}  // namespace hcache
