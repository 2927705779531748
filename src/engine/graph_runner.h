// Graphs of one device's compute queue: their memory, their allocator, and the copies that go with
// them in the queue's order.
//
// The queue may be asynchronous: a graph has been given to it and is read later. So whatever a
// graph is made of is held until the next synchronize(), however early its owner is done with it.
#pragma once

#include <ggml-alloc.h>
#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/compute_queue.h"
#include "hybrid/host_buffer.h"
#include "model/device.h"

namespace hcache::engine {

class GraphRunner;

// A graph being built: tensors without memory of their own until GraphRunner::allocate().
class Graph {
 public:
  Graph(GraphRunner& runner, size_t n_nodes);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void add(ggml_tensor* tensor) const { ggml_build_forward_expand(graph, tensor); }

  ggml_context* ctx = nullptr;
  ggml_cgraph* graph = nullptr;

 private:
  GraphRunner& runner_;
  struct Memory {
    std::unique_ptr<std::byte[]> bytes;
    size_t size = 0;
  } memory_;
  friend class GraphRunner;
};

// Threading: the engine's thread.
class GraphRunner {
 public:
  GraphRunner(model::Device& device, ComputeQueue& queue);
  ~GraphRunner();
  GraphRunner(const GraphRunner&) = delete;
  GraphRunner& operator=(const GraphRunner&) = delete;

  // Gives the graph's tensors device memory, which earlier graphs of this runner may have had.
  Status allocate(const Graph& g);
  // Counts allocate(): a graph may run again as long as it was the last to be allocated.
  [[nodiscard]] uint64_t n_allocated() const { return n_allocated_; }
  Status run(const Graph& g);
  Status compute(const Graph& g);  // both

  // Copies between the host and a device tensor, in the order of the graphs. The values of set()
  // may go at once; get() has delivered after synchronize().
  void set(ggml_tensor* tensor, const void* values, size_t n_bytes);
  template <typename T>
  void set(ggml_tensor* tensor, const std::vector<T>& values) {
    if (!values.empty()) set(tensor, values.data(), values.size() * sizeof(T));
  }
  void get(const ggml_tensor* tensor, void* values, size_t n_bytes);
  // To a tensor of the same type and shape on another runner's device.
  void copy(ggml_tensor* tensor, GraphRunner& to, ggml_tensor* target);
  // Blocks until all of it is done.
  void synchronize();

  [[nodiscard]] model::Device& device() const { return device_; }
  // See ComputeQueue.
  [[nodiscard]] bool is_async() const { return queue_.is_async(); }
  [[nodiscard]] size_t n_bytes() const { return ggml_gallocr_get_buffer_size(allocator_, 0); }

 private:
  friend class Graph;
  bool outgrows_buffer(const Graph& g);
  Graph::Memory take_memory(size_t n_bytes);
  void give_back(Graph::Memory memory);
  std::byte* stage(size_t n_bytes);

  model::Device& device_;
  ComputeQueue& queue_;
  ggml_gallocr_t allocator_;
  ggml_gallocr_t sizer_;  // has no buffer: measures what a graph needs
  uint64_t n_allocated_ = 0;
  std::vector<Graph::Memory> spare_;
  std::vector<Graph::Memory> held_;  // may still be read, until the next synchronize()
  size_t held_bytes_ = 0;
  HostBuffer staging_;  // what set() was given and the queue may still read
  size_t staging_bytes_;
  size_t staged_bytes_ = 0;  // of staging_, until the next synchronize()
  size_t wanted_bytes_ = 0;  // that would have been staged since the last one
  bool staging_made_ = false;
};

}  // namespace hcache::engine
