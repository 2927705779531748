// A set of tensors that live long, in one device buffer of their own.
#pragma once

#include <ggml-backend.h>
#include <ggml.h>

#include <string>

#include "base/status.h"

namespace hcache::engine {

// Threading: one thread.
class TensorPool {
 public:
  TensorPool() = default;
  TensorPool(const TensorPool&) = delete;
  TensorPool& operator=(const TensorPool&) = delete;
  ~TensorPool();

  // Room for n_tensors to be made in ctx(). Drops what was there.
  void open(size_t n_tensors);
  [[nodiscard]] ggml_context* ctx() const { return ctx_; }
  // Gives the tensors made in ctx() memory, all zero. kResourceExhausted names `what` it was for.
  Status allocate(ggml_backend_buffer_type_t type, const std::string& what);
  [[nodiscard]] size_t n_bytes() const;

 private:
  ggml_context* ctx_ = nullptr;
  ggml_backend_buffer_t buffer_ = nullptr;
};

// A tensor [width, n] of `type` on memory of `block`, from byte `offset` on.
ggml_tensor* tensor_in_block(ggml_context* ctx, const ggml_tensor* block, int64_t offset,
                             ggml_type type, int64_t width, int64_t n);

}  // namespace hcache::engine
