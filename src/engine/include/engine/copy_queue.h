// Asynchronous copies between the host and a device, in a queue of their own (a second stream).
#pragma once

#include <ggml-backend.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "model/device.h"

namespace hcache::engine {

// Copies complete in any order unless a wait or a fence orders them; nothing may be assumed of a
// copy before it is waited for. Tests use a queue that completes late and out of order.
//
// Threading: one thread (the engine's).
class CopyQueue {
 public:
  using Ticket = uint64_t;  // increasing; 0 is complete from the start
  using Mark = uint64_t;    // a position in the compute queue, increasing; 0: its beginning

  virtual ~CopyQueue() = default;
  // Host to device. The host memory may be reused once the ticket is done.
  virtual Ticket upload(ggml_tensor* dst, size_t offset, const void* src, size_t n_bytes) = 0;
  // Device to host; fence it with after_compute().
  virtual Ticket download(const ggml_tensor* src, size_t offset, void* dst, size_t n_bytes) = 0;
  // Where the compute queue stands: behind everything it has been given so far.
  virtual Mark mark_compute() = 0;
  // Later copies start behind what the compute queue had been given when `mark` was taken.
  virtual void after_compute(Mark mark) = 0;
  // The same, behind everything up to now.
  void after_compute() { after_compute(mark_compute()); }
  // Blocks until the compute queue has done what it had been given when `mark` was taken, and maybe
  // more.
  virtual void wait_compute(Mark mark) = 0;
  // Work given to the compute queue from now on starts behind the copies up to `ticket`.
  virtual void before_compute(Ticket ticket) = 0;
  // Blocks until all copies up to `ticket` are done.
  virtual void wait(Ticket ticket) = 0;
  [[nodiscard]] virtual bool done(Ticket ticket) = 0;
};

// The device's own queue: its second backend instance, ordered against the first by events where
// the backend has them, by synchronising where it has not.
std::unique_ptr<CopyQueue> make_device_copy_queue(model::Device& device);

}  // namespace hcache::engine
