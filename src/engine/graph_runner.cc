#include "graph_runner.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace hcache::engine {
namespace {

// So much is held for graphs that may still run before waiting for them.
constexpr size_t kMaxHeldBytes = 64 << 20;
constexpr size_t kStagingBytes = 8 << 20;
constexpr size_t kMaxStagingBytes = 128 << 20;
constexpr size_t kStagingAlignment = 64;

}  // namespace

Graph::Graph(GraphRunner& runner, size_t n_nodes)
    : runner_(runner),
      memory_(runner.take_memory(ggml_tensor_overhead() * n_nodes +
                                 ggml_graph_overhead_custom(n_nodes, false))) {
  ctx = ggml_init({.mem_size = memory_.size, .mem_buffer = memory_.bytes.get(), .no_alloc = true});
  graph = ggml_new_graph_custom(ctx, n_nodes, false);
}

Graph::~Graph() {
  ggml_free(ctx);
  runner_.give_back(std::move(memory_));
}

GraphRunner::GraphRunner(model::Device& device, ComputeQueue& queue)
    : device_(device),
      queue_(queue),
      allocator_(ggml_gallocr_new(device.buffer_type())),
      sizer_(ggml_gallocr_new(device.buffer_type())),
      staging_bytes_(kStagingBytes) {}

GraphRunner::~GraphRunner() {
  synchronize();
  ggml_gallocr_free(allocator_);
  ggml_gallocr_free(sizer_);
}

Graph::Memory GraphRunner::take_memory(size_t n_bytes) {
  Graph::Memory memory;
  if (!spare_.empty()) {
    memory = std::move(spare_.back());
    spare_.pop_back();
  }
  if (memory.size < n_bytes) {
    memory.bytes = std::make_unique_for_overwrite<std::byte[]>(n_bytes);
    memory.size = n_bytes;
  }
  return memory;
}

void GraphRunner::give_back(Graph::Memory memory) {
  if (!queue_.is_async()) {
    spare_.push_back(std::move(memory));
    return;
  }
  held_bytes_ += memory.size;
  held_.push_back(std::move(memory));
  if (held_bytes_ > kMaxHeldBytes) synchronize();
}

// Whether allocating replaces the buffer, in which graphs that were given before may still compute.
bool GraphRunner::outgrows_buffer(const Graph& g) {
  size_t n_bytes = 0;
  ggml_gallocr_reserve_n_size(sizer_, g.graph, nullptr, nullptr, &n_bytes);
  // A buffer in several pieces may grow in any of them.
  return n_bytes > std::min(ggml_gallocr_get_buffer_size(allocator_, 0),
                            ggml_backend_buft_get_max_size(device_.buffer_type()));
}

Status GraphRunner::allocate(const Graph& g) {
  ++n_allocated_;
  if (queue_.is_async() && outgrows_buffer(g)) synchronize();
  if (!ggml_gallocr_alloc_graph(allocator_, g.graph)) {
    return resource_exhausted("the device has no memory for a step's activations");
  }
  if (device_.is_cpu()) return {};
  for (int i = 0; i < ggml_graph_n_nodes(g.graph); ++i) {
    const ggml_tensor* node = ggml_graph_node(g.graph, i);
    if (!ggml_backend_supports_op(device_.compute(), node)) {
      return unimplemented(fmt::format("device {} can't compute {} ({})", device_.name(),
                                       ggml_op_desc(node), ggml_type_name(node->type)));
    }
  }
  return {};
}

Status GraphRunner::run(const Graph& g) {
  const ggml_status status = queue_.run(g.graph);
  if (status != GGML_STATUS_SUCCESS) {
    return internal_error(
        fmt::format("device {} failed: {}", device_.name(), ggml_status_to_string(status)));
  }
  return {};
}

Status GraphRunner::compute(const Graph& g) {
  HCACHE_RETURN_IF_ERROR(allocate(g));
  return run(g);
}

// Room in pinned memory, from which some backends (Vulkan) copy without waiting for the queue; null
// where there is none until the next synchronize().
std::byte* GraphRunner::stage(size_t n_bytes) {
  if (!staging_made_) {
    staging_made_ = true;
    Result<HostBuffer> made = HostBuffer::make(device_, staging_bytes_, "the inputs of steps");
    if (made.ok()) staging_ = std::move(made).value();
  }
  const size_t begin = (staged_bytes_ + kStagingAlignment - 1) & ~(kStagingAlignment - 1);
  wanted_bytes_ += n_bytes + kStagingAlignment;
  if (staging_.data() == nullptr || begin + n_bytes > staging_bytes_) return nullptr;
  staged_bytes_ = begin + n_bytes;
  return staging_.data() + begin;
}

void GraphRunner::set(ggml_tensor* tensor, const void* values, size_t n_bytes) {
  if (!queue_.is_async()) return queue_.upload(tensor, values, n_bytes);
  if (std::byte* staged = stage(n_bytes); staged != nullptr) {
    std::memcpy(staged, values, n_bytes);
    return queue_.upload(tensor, staged, n_bytes);
  }
  Graph::Memory copy = take_memory(n_bytes);
  std::memcpy(copy.bytes.get(), values, n_bytes);
  queue_.upload(tensor, copy.bytes.get(), n_bytes);
  give_back(std::move(copy));
}

void GraphRunner::get(const ggml_tensor* tensor, void* values, size_t n_bytes) {
  queue_.download(tensor, values, n_bytes);
}

void GraphRunner::copy(ggml_tensor* tensor, GraphRunner& to, ggml_tensor* target) {
  queue_.copy(tensor, to.queue_, target);
}

void GraphRunner::synchronize() {
  queue_.synchronize();
  for (Graph::Memory& memory : held_) spare_.push_back(std::move(memory));
  held_.clear();
  held_bytes_ = 0;
  staged_bytes_ = 0;
  // Too small for a step's inputs: the next one gets more.
  const size_t wanted = std::min(std::exchange(wanted_bytes_, 0), kMaxStagingBytes);
  if (staging_.data() != nullptr && wanted > staging_bytes_) {
    staging_bytes_ = wanted;
    staging_ = {};
    staging_made_ = false;
  }
}

}  // namespace hcache::engine
