#include "device_ring.h"

#include <fmt/format.h>
#include <ggml-alloc.h>

#include <algorithm>

namespace hcache::state {

Result<std::unique_ptr<DeviceRing>> DeviceRing::create(DirectStorage& storage,
                                                       const model::Device& device,
                                                       std::span<std::byte> ring) {
  std::unique_ptr<DeviceRing> made(new DeviceRing(storage, device, ring));
  HCACHE_RETURN_IF_ERROR(made->init());
  return made;
}

Status DeviceRing::init() {
  context_ =
      ggml_init({.mem_size = 2 * ggml_tensor_overhead(), .mem_buffer = nullptr, .no_alloc = true});
  if (context_ == nullptr) return resource_exhausted("no memory for a tensor's header");
  rows_ = ggml_new_tensor_1d(context_, GGML_TYPE_I8, static_cast<int64_t>(ring_.size()));
  buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(context_, device_.buffer_type());
  if (buffer_ == nullptr) {
    return resource_exhausted(fmt::format("no {} MiB on {} for a ring that disks are read into",
                                          ring_.size() >> 20, device_.name()));
  }
  HCACHE_RETURN_IF_ERROR(storage_.add_memory(base(), ring_.size()));
  device_.mirrors().add(ring_.data(), rows_);
  added_ = true;
  return {};
}

DeviceRing::~DeviceRing() {
  if (added_) {
    device_.mirrors().remove(ring_.data());
    storage_.remove_memory(base());
  }
  ggml_backend_buffer_free(buffer_);
  ggml_free(context_);
}

Result<std::size_t> DeviceRing::read(File& file, std::uint64_t offset, std::span<std::byte> part) {
  const auto at = static_cast<size_t>(part.data() - ring_.data());
  HCACHE_ASSIGN_OR_RETURN(const size_t got, storage_.read(file, offset, base(), at, part.size()));
  if (got > 0) ggml_backend_tensor_get(rows_, part.data(), at, got);
  return got;
}

Status DeviceRing::update(std::span<const std::byte> part) {
  const auto at = static_cast<size_t>(part.data() - ring_.data());
  if (!part.empty()) ggml_backend_tensor_set(rows_, part.data(), at, part.size());
  return {};
}

}  // namespace hcache::state
