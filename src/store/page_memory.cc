#include "page_memory.h"

#include <algorithm>
#include <boost/interprocess/indexes/iset_index.hpp>
#include <boost/interprocess/managed_external_buffer.hpp>
#include <boost/interprocess/mem_algo/rbtree_best_fit.hpp>
#include <boost/interprocess/sync/mutex_family.hpp>
#include <cstring>
#include <new>
#include <utility>

#include "base/host_memory.h"
#include "base/sync.h"

namespace hcache::store {
namespace {

namespace bip = boost::interprocess;

// Best fit: pages come in few sizes, so what one leaves is what another needs.
using Pieces = bip::basic_managed_external_buffer<
    char, bip::rbtree_best_fit<bip::null_mutex_family, bip::offset_ptr<void>>, bip::iset_index>;

constexpr std::size_t kCacheLine = 64;
// Below, the allocator's own tables don't fit.
constexpr std::size_t kSmallest = 4096;

}  // namespace

class PageMemory::Heap : public std::enable_shared_from_this<PageMemory::Heap> {
 public:
  explicit Heap(HostMemory memory) : Heap(memory.span()) { memory_ = std::move(memory); }
  explicit Heap(std::span<std::byte> memory)
      : pieces_(bip::create_only, memory.data(), memory.size()) {}

  [[nodiscard]] HeldBytes copy(std::span<const std::byte> bytes) HCACHE_EXCLUDES(mutex_) {
    void* at = nullptr;
    {
      MutexLock lock(mutex_);
      at = pieces_.allocate_aligned(bytes.size(), kCacheLine, std::nothrow);
    }
    if (at == nullptr) return {};
    std::memcpy(at, bytes.data(), bytes.size());
    std::shared_ptr<const void> owner(at, [heap = shared_from_this()](void* piece) {
      MutexLock lock(heap->mutex_);
      heap->pieces_.deallocate(piece);
    });
    return {std::move(owner), {static_cast<const std::byte*>(at), bytes.size()}};
  }

 private:
  HostMemory memory_;
  Mutex mutex_;
  Pieces pieces_ HCACHE_GUARDED_BY(mutex_);
};

Result<PageMemory> PageMemory::map(std::size_t bytes, const std::string& place) {
  PageMemory out;
  if (bytes == 0) return out;
  HCACHE_ASSIGN_OR_RETURN(HostMemory memory, HostMemory::map(std::max(bytes, kSmallest), place));
  out.heap_ = std::make_shared<Heap>(std::move(memory));
  return out;
}

PageMemory PageMemory::over(std::span<std::byte> memory) {
  PageMemory out;
  if (memory.size() >= kSmallest) out.heap_ = std::make_shared<Heap>(memory);
  return out;
}

HeldBytes PageMemory::copy(std::span<const std::byte> bytes) {
  return heap_ == nullptr ? HeldBytes() : heap_->copy(bytes);
}

}  // namespace hcache::store
