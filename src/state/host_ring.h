// Host memory for the saver's stage one: blocks are taken at the head and given back at the tail.
//
// Threading: none of its own; the caller locks.
#pragma once

#include <fmt/format.h>
#include <ggml-backend.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>

#include "base/status.h"

namespace hcache::state {

// Stage one's memory: blocks are taken at the head and given back in the same order at the tail.
// Pinned where the device has such memory.
class HostRing {
 public:
  static Result<std::unique_ptr<HostRing>> create(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = ggml_backend_buft_alloc_buffer(type, size);
    if (buffer == nullptr) {
      return resource_exhausted(
          fmt::format("no {} MiB of host memory for the saver's ring", size >> 20));
    }
    return std::unique_ptr<HostRing>(new HostRing(buffer, size));
  }
  ~HostRing() { ggml_backend_buffer_free(buffer_); }
  HostRing(const HostRing&) = delete;
  HostRing& operator=(const HostRing&) = delete;

  std::byte* take(size_t n) {
    n = (n + kAlignment - 1) / kAlignment * kAlignment;
    size_t offset = head_;
    if (blocks_.empty()) {
      offset = 0;
      if (n > size_) return nullptr;
    } else if (head_ > tail()) {  // free: [head, size) and [0, tail)
      if (n > size_ - head_) {
        if (n >= tail()) return nullptr;
        offset = 0;
      }
    } else if (n >= tail() - head_) {  // free: [head, tail)
      return nullptr;
    }
    blocks_.push_back({offset, n});
    head_ = offset + n;
    used_ += n;
    peak_ = std::max(peak_, used_);
    return base_ + offset;
  }
  // Blocks may be finished in any order; memory is reused in the order it was taken.
  void give_back(const std::byte* block) {
    const size_t offset = static_cast<size_t>(block - base_);
    for (Block& b : blocks_) {
      if (b.offset == offset && !b.done) {
        b.done = true;
        break;
      }
    }
    while (!blocks_.empty() && blocks_.front().done) {
      used_ -= blocks_.front().size;
      blocks_.pop_front();
    }
  }
  [[nodiscard]] size_t peak() const { return peak_; }
  [[nodiscard]] size_t used() const { return used_; }

 private:
  static constexpr size_t kAlignment = 64;
  struct Block {
    size_t offset = 0;
    size_t size = 0;
    bool done = false;
  };
  HostRing(ggml_backend_buffer_t buffer, size_t size)
      : buffer_(buffer),
        base_(static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer))),
        size_(size) {}
  [[nodiscard]] size_t tail() const { return blocks_.front().offset; }

  ggml_backend_buffer_t buffer_;
  std::byte* base_;
  size_t size_;
  size_t head_ = 0;
  size_t used_ = 0;
  size_t peak_ = 0;
  std::deque<Block> blocks_;
};

}  // namespace hcache::state
