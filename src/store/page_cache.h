// Pages in host memory, in front of the disks: least recently used, bounded in bytes.
//
// A page is found by its chunk, layer, encoding and the checksum that the catalog has for it, so
// what is found is what a read from disk would have to prove itself to be. Pages enter when they
// are written and when a read has been verified.
//
// Threading: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <span>
#include <unordered_map>

#include "base/env.h"
#include "base/ids.h"
#include "base/sync.h"
#include "store/store.h"

namespace hcache::store {

struct PageKey {
  ChunkId chunk;
  std::uint16_t layer = 0;
  Encoding encoding = Encoding::kKv;
  std::uint64_t checksum = 0;
  bool operator==(const PageKey&) const = default;
};

class PageCache {
 public:
  // 0: holds nothing.
  explicit PageCache(std::uint64_t capacity_bytes) : capacity_(capacity_bytes) {}

  [[nodiscard]] bool enabled() const { return capacity_ > 0; }
  // The page's bytes, marked as used; null when it is not here. They stay valid while held.
  [[nodiscard]] std::shared_ptr<const AlignedBuffer> find(const PageKey& key)
      HCACHE_EXCLUDES(mutex_);
  // Copies a page in. Pages larger than the whole cache stay out.
  void insert(const PageKey& key, std::span<const std::byte> bytes) HCACHE_EXCLUDES(mutex_);
  void clear() HCACHE_EXCLUDES(mutex_);
  // Fills the fields of StoreStat that are the cache's.
  void describe(StoreStat* stat) const HCACHE_EXCLUDES(mutex_);

 private:
  struct Hash {
    std::size_t operator()(const PageKey& key) const {
      return std::hash<ChunkId>()(key.chunk) ^ (key.checksum * 31 + key.layer);
    }
  };
  struct Entry {
    PageKey key;
    std::shared_ptr<const AlignedBuffer> bytes;
  };

  const std::uint64_t capacity_;
  mutable Mutex mutex_;
  std::list<Entry> entries_ HCACHE_GUARDED_BY(mutex_);  // most recently used first
  std::unordered_map<PageKey, std::list<Entry>::iterator, Hash> index_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t used_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::uint64_t hits_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::uint64_t misses_ HCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace hcache::store
