// Host memory whose bytes lie in a device's memory as well.
#pragma once

#include <ggml.h>

#include <atomic>
#include <cstddef>
#include <optional>
#include <vector>

#include "base/sync.h"

namespace hcache::model {

// Threading: any thread. A range is not removed while anybody copies from it.
class HostMirrors {
 public:
  // Where the bytes lie on the device: from `offset` on in an I8 tensor.
  struct Place {
    ggml_tensor* tensor = nullptr;
    size_t offset = 0;
  };

  // [host, host + ggml_nbytes(tensor)) has the tensor's bytes.
  void add(const void* host, ggml_tensor* tensor) HCACHE_EXCLUDES(mutex_);
  void remove(const void* host) HCACHE_EXCLUDES(mutex_);
  // Where n_bytes from `host` on lie; nothing unless all of them do.
  [[nodiscard]] std::optional<Place> find(const void* host, size_t n_bytes) const
      HCACHE_EXCLUDES(mutex_);

 private:
  struct Range {
    const std::byte* host = nullptr;
    ggml_tensor* tensor = nullptr;
  };
  std::atomic<size_t> n_ranges_ = 0;  // most devices have none: they don't lock
  mutable Mutex mutex_;
  std::vector<Range> ranges_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::model
