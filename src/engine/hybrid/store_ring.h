// Brings what graphs captured of new rows to the blocks in host memory, beside the graphs that
// follow.
#pragma once

#include <ggml.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/status.h"
#include "engine/copy_queue.h"
#include "host_buffer.h"
#include "model/device.h"
#include "tensor_pool.h"

namespace hcache::engine {

// Two captured graphs may be on their way: the third waits for the first. Threading: the engine's
// thread.
class StoreRing {
 public:
  // Bytes of a capture that go to a page.
  struct Target {
    size_t offset = 0;
    size_t n_bytes = 0;
    std::byte* page = nullptr;
  };

  // The queue must outlive it.
  explicit StoreRing(CopyQueue& queue) : queue_(queue) {}
  // Captures of at most n_bytes.
  Status allocate(const model::Device& device, size_t n_bytes);

  // Device memory (I8) for the next graph's capture.
  ggml_tensor* next();
  // The graph that captured into next()'s memory has been given to the compute queue: n_bytes of it
  // are to go to the targets.
  void captured(size_t n_bytes, std::vector<Target> targets);
  // Begins the copies to the host. They wait for their graphs, and later uploads may wait for them.
  void send();
  // Blocks until everything is where it belongs.
  void flush();
  // Nothing that is on its way is wanted.
  void drop();

 private:
  struct Entry {
    TensorPool pool;
    ggml_tensor* captured = nullptr;
    HostBuffer host;
    CopyQueue::Mark mark = 0;  // behind the graph
    CopyQueue::Ticket ticket = 0;
    size_t n_bytes = 0;  // to be copied, 0 once that has begun
    std::vector<Target> targets;
  };
  void send(Entry& entry);
  void finish(Entry& entry);

  CopyQueue& queue_;
  std::array<Entry, 2> entries_;
  size_t next_ = 0;
};

}  // namespace hcache::engine
