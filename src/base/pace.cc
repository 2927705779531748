#include "base/pace.h"

#include <ctime>
#include <utility>

namespace hcache {
namespace {

// Of this thread: what it waited for counts for nothing.
std::int64_t processor_ns() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return std::int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

thread_local Pace* Pace::current_ = nullptr;

Pace::Pace(Env& env, std::function<bool()> hurry)
    : env_(env), hurry_(std::move(hurry)), begin_ns_(processor_ns()) {
  current_ = this;
}

Pace::~Pace() { current_ = nullptr; }

void Pace::rest_when_due() {
  if (processor_ns() - begin_ns_ < kWorkNs) return;
  if (!hurry_()) env_.sleep_ns(kRestNs);
  begin_ns_ = processor_ns();
}

}  // namespace hcache
