// Host memory that the device copies from and to fastest, aligned for direct I/O.
#pragma once

#include <ggml-backend.h>

#include <cstddef>
#include <string>

#include "base/status.h"
#include "model/device.h"

namespace hcache::engine {

// Threading: plain memory.
class HostBuffer {
 public:
  HostBuffer() = default;
  // kResourceExhausted names `what` it was for.
  static Result<HostBuffer> make(const model::Device& device, size_t n_bytes,
                                 const std::string& what);
  HostBuffer(HostBuffer&& other) noexcept { *this = std::move(other); }
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer() { ggml_backend_buffer_free(buffer_); }

  [[nodiscard]] std::byte* data() const { return data_; }
  [[nodiscard]] bool empty() const { return buffer_ == nullptr; }

 private:
  ggml_backend_buffer_t buffer_ = nullptr;
  std::byte* data_ = nullptr;
};

}  // namespace hcache::engine
