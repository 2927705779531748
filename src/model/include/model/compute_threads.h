// A CPU device's compute threads, for work beside graphs.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <functional>

#include "model/device.h"

namespace hcache::model {

// The threads that compute spin between two graphs that follow each other, so that work of another
// thread takes a core from them. This gives the work to them.
//
// Threading: as Device::compute().
class ComputeThreads {
 public:
  // Of a device that is_cpu() and outlives this.
  explicit ComputeThreads(const Device& device);
  ~ComputeThreads();
  ComputeThreads(const ComputeThreads&) = delete;
  ComputeThreads& operator=(const ComputeThreads&) = delete;

  // Calls each(0) to each(n - 1), each thread the next one that no other has begun, and returns
  // when all have returned.
  void run(size_t n, const std::function<void(size_t)>& each);

 private:
  struct Work;

  const Device& device_;
  ggml_context* ctx_ = nullptr;
  ggml_cgraph* graph_ = nullptr;
  Work* work_ = nullptr;  // while it runs
  std::byte unused_{};
};

}  // namespace hcache::model
