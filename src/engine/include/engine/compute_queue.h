// Graphs and small copies on a device, one after the other: its first stream.
#pragma once

#include <ggml-backend.h>

#include <cstddef>
#include <functional>
#include <memory>

#include "engine/copy_queue.h"
#include "model/device.h"

namespace hcache::engine {

// What is given runs in order. Calls may return before their work is begun: graphs, their tensors
// and all host memory must stay as they are until the next synchronize(). Tests use a queue that
// does nothing before it has to.
//
// Threading: one thread (the engine's).
class ComputeQueue {
 public:
  virtual ~ComputeQueue() = default;
  virtual ggml_status run(ggml_cgraph* graph) = 0;
  // Host to device and back, from the tensor's first byte on.
  virtual void upload(ggml_tensor* dst, const void* src, size_t n_bytes) = 0;
  virtual void download(const ggml_tensor* src, void* dst, size_t n_bytes) = 0;
  // A tensor to one of the same type and shape on another queue's device, in the order of both.
  virtual void copy(ggml_tensor* src, ComputeQueue& to, ggml_tensor* dst) = 0;
  // Blocks until everything is done.
  virtual void synchronize() = 0;
  // False: everything is done when a call returns.
  [[nodiscard]] virtual bool is_async() const = 0;
  [[nodiscard]] virtual ggml_backend_t backend() const = 0;
};

// The two queues of one device.
struct DeviceQueues {
  std::unique_ptr<ComputeQueue> compute;
  std::unique_ptr<CopyQueue> copy;
};
using MakeQueues = std::function<DeviceQueues(model::Device&)>;

// The device's own, see Device::compute() and Device::copy().
DeviceQueues make_device_queues(model::Device& device);

}  // namespace hcache::engine
