#include "base/stall.h"

#include <sys/resource.h>

#include <algorithm>
#include <ctime>

namespace hcache {

StallTimer::Sample StallTimer::now() {
  timespec process{};
  rusage thread{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &process);
  getrusage(RUSAGE_THREAD, &thread);
  return {.process_ns = int64_t{process.tv_sec} * 1'000'000'000 + process.tv_nsec,
          .waits = thread.ru_nvcsw};
}

double StallTimer::stalled_s(const Sample& begin, const Sample& end, double elapsed_s) {
  if (end.waits != begin.waits) return 0;
  return std::max(0.0, elapsed_s - static_cast<double>(end.process_ns - begin.process_ns) * 1e-9);
}

}  // namespace hcache
