#include "tensor_pool.h"

#include <fmt/format.h>
#include <ggml-alloc.h>

#include <cstddef>
#include <utility>

#include "base/env.h"

namespace hcache::engine {

TensorPool::~TensorPool() {
  ggml_free(ctx_);
  ggml_backend_buffer_free(buffer_);
}

void TensorPool::open(size_t n_tensors) {
  ggml_free(ctx_);
  ggml_backend_buffer_free(std::exchange(buffer_, nullptr));
  ctx_ = ggml_init(
      {.mem_size = ggml_tensor_overhead() * n_tensors, .mem_buffer = nullptr, .no_alloc = true});
}

Status TensorPool::allocate(ggml_backend_buffer_type_t type, const std::string& what) {
  size_t n_bytes = 0;
  for (ggml_tensor* t = ggml_get_first_tensor(ctx_); t != nullptr;
       t = ggml_get_next_tensor(ctx_, t)) {
    n_bytes += ggml_nbytes(t);
  }
  buffer_ = ggml_backend_alloc_ctx_tensors_from_buft(ctx_, type);
  if (buffer_ == nullptr) {
    return resource_exhausted(
        fmt::format("the device has no {} MiB for {}; make the arena (--ctx) "
                    "or the batch smaller",
                    n_bytes >> 20, what));
  }
  if (ggml_backend_buffer_is_host(buffer_)) {
    prefer_huge_pages({static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer_)),
                       ggml_backend_buffer_get_size(buffer_)});
  }
  // A NaN in a masked cell would poison ggml's tiled flash attention.
  ggml_backend_buffer_clear(buffer_, 0);
  return {};
}

size_t TensorPool::n_bytes() const {
  return buffer_ == nullptr ? 0 : ggml_backend_buffer_get_size(buffer_);
}

ggml_tensor* tensor_in_block(ggml_context* ctx, const ggml_tensor* block, int64_t offset,
                             ggml_type type, int64_t width, int64_t n) {
  ggml_tensor* t = ggml_new_tensor_2d(ctx, type, width, n);
  // A view of it: behind a quantised tensor of its own a backend may take room for padding, and
  // clear it at once, beside its queues (CUDA: rows whose width is no multiple of 512).
  t->view_src = const_cast<ggml_tensor*>(block->view_src != nullptr ? block->view_src : block);
  t->view_offs = block->view_offs + static_cast<size_t>(offset);
  if (ggml_backend_view_init(t) != GGML_STATUS_SUCCESS) {
    die("a tensor does not fit the block of device memory it is laid into");
  }
  return t;
}

}  // namespace hcache::engine
