#include "model/host_mirrors.h"

#include <algorithm>

namespace hcache::model {

void HostMirrors::add(const void* host, ggml_tensor* tensor) {
  MutexLock lock(mutex_);
  ranges_.push_back({static_cast<const std::byte*>(host), tensor});
  n_ranges_ = ranges_.size();
}

void HostMirrors::remove(const void* host) {
  MutexLock lock(mutex_);
  std::erase_if(ranges_, [&](const Range& range) { return range.host == host; });
  n_ranges_ = ranges_.size();
}

std::optional<HostMirrors::Place> HostMirrors::find(const void* host, size_t n_bytes) const {
  if (n_ranges_ == 0) return std::nullopt;
  const auto* at = static_cast<const std::byte*>(host);
  MutexLock lock(mutex_);
  for (const Range& range : ranges_) {
    const size_t size = ggml_nbytes(range.tensor);
    if (at < range.host || at >= range.host + size) continue;
    const auto offset = static_cast<size_t>(at - range.host);
    if (n_bytes > size - offset) return std::nullopt;
    return Place{range.tensor, offset};
  }
  return std::nullopt;
}

}  // namespace hcache::model
