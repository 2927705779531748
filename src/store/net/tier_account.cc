#include "net/tier_account.h"

#include <fmt/format.h>

namespace hcache::store {

bool TierAccount::accept(std::uint64_t pages, std::uint64_t bytes, bool available) {
  MutexLock lock(mutex_);
  if (!available || stat_.backlog_bytes + bytes > queue_bytes_) {
    stat_.pages_skipped += pages;
    return false;
  }
  stat_.backlog_bytes += bytes;
  return true;
}

void TierAccount::written(std::uint64_t pages, std::uint64_t bytes) {
  MutexLock lock(mutex_);
  stat_.backlog_bytes -= bytes;
  stat_.pages_written += pages;
  stat_.bytes_written += bytes;
}

void TierAccount::dropped(std::uint64_t bytes) {
  MutexLock lock(mutex_);
  stat_.backlog_bytes -= bytes;
}

void TierAccount::begin() {
  MutexLock lock(mutex_);
  ++work_;
}

void TierAccount::end(const Status& status) {
  MutexLock lock(mutex_);
  if (!status.ok() && status.code() != Code::kCancelled) ++stat_.failures;
  if (--work_ == 0) idle_.notify_all();
}

void TierAccount::begin_read() {
  MutexLock lock(mutex_);
  if (reads_++ == 0) reading_since_ns_ = env_.monotonic_ns();
}

void TierAccount::end_read(const Status& status, std::uint64_t bytes) {
  MutexLock lock(mutex_);
  if (status.ok()) {
    ++stat_.pages_read;
    stat_.bytes_read += bytes;
  } else if (status.code() != Code::kCancelled && status.code() != Code::kNotFound) {
    ++stat_.failures;
  }
  if (--reads_ > 0) return;
  stat_.read_busy_s += static_cast<double>(env_.monotonic_ns() - reading_since_ns_) * 1e-9;
}

Status TierAccount::flush(std::int64_t deadline_ns) {
  MutexLock lock(mutex_);
  while (work_ > 0) {
    const std::int64_t left = deadline_ns - env_.monotonic_ns();
    if (left <= 0) {
      return unavailable(fmt::format("{} bytes are not yet in {}", stat_.backlog_bytes, name_));
    }
    idle_.wait_for_ns(mutex_, left);
  }
  return {};
}

RemoteStat TierAccount::stat(bool available) const {
  MutexLock lock(mutex_);
  RemoteStat stat = stat_;
  stat.name = name_;
  stat.backlog_requests = work_;
  stat.available = available;
  return stat;
}

}  // namespace hcache::store
