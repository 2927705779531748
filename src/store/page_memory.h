// The bytes of pages in host memory: one region that is set up once, cut into pieces and put
// together again. So the limit is one on memory itself, whatever sizes come and go, and the region
// can lie anywhere (base/host_memory.h) or be what a device copies from fastest.
//
// Threading: any thread.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "base/status.h"

namespace hcache::store {

// Bytes, and what keeps them where they are.
struct HeldBytes {
  std::shared_ptr<const void> owner;
  std::span<const std::byte> bytes;

  explicit operator bool() const { return owner != nullptr; }
};

class PageMemory {
 public:
  PageMemory() = default;  // holds nothing
  // A region of at least `bytes` at `place`, with HostMemory::map()'s errors.
  [[nodiscard]] static Result<PageMemory> map(std::size_t bytes, const std::string& place);
  // Memory of the caller's, which outlives all copies.
  [[nodiscard]] static PageMemory over(std::span<std::byte> memory);

  // A copy of `bytes`, whose piece of the region is free again when its last holder drops it, which
  // may be after the end of this object. Empty: no free piece is as large.
  [[nodiscard]] HeldBytes copy(std::span<const std::byte> bytes);

 private:
  class Heap;

  std::shared_ptr<Heap> heap_;
};

}  // namespace hcache::store
