#include "host_buffer.h"

#include <fmt/format.h>

#include <cstdint>
#include <utility>

#include "base/env.h"

namespace hcache::engine {

Result<HostBuffer> HostBuffer::make(const model::Device& device, size_t n_bytes,
                                    const std::string& what) {
  HostBuffer made;
  made.buffer_ = device.alloc_host(n_bytes + kDirectAlignment);
  if (made.buffer_ == nullptr) {
    return resource_exhausted(
        fmt::format("no {} KiB of host memory for {}; batch fewer requests", n_bytes >> 10, what));
  }
  auto* base = static_cast<std::byte*>(ggml_backend_buffer_get_base(made.buffer_));
  const auto address = reinterpret_cast<uintptr_t>(base);
  made.data_ = base + (kDirectAlignment - address % kDirectAlignment) % kDirectAlignment;
  return made;
}

HostBuffer& HostBuffer::operator=(HostBuffer&& other) noexcept {
  std::swap(buffer_, other.buffer_);
  std::swap(data_, other.data_);
  return *this;
}

}  // namespace hcache::engine
