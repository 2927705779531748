#include "page_cache.h"

#include <cstring>

namespace hcache::store {

std::shared_ptr<const AlignedBuffer> PageCache::find(const PageKey& key) {
  if (!enabled()) return nullptr;
  MutexLock lock(mutex_);
  const auto it = index_.find(key);
  if (it == index_.end()) {
    ++misses_;
    return nullptr;
  }
  ++hits_;
  entries_.splice(entries_.begin(), entries_, it->second);
  return it->second->bytes;
}

void PageCache::insert(const PageKey& key, std::span<const std::byte> bytes) {
  if (bytes.size() > capacity_) return;
  // Copied before the lock is taken: it is what takes time.
  auto copy = std::make_shared<AlignedBuffer>(bytes.size());
  std::memcpy(copy->data(), bytes.data(), bytes.size());
  MutexLock lock(mutex_);
  if (index_.contains(key)) return;
  entries_.push_front({key, std::move(copy)});
  index_[key] = entries_.begin();
  used_ += bytes.size();
  while (used_ > capacity_) {
    const Entry& oldest = entries_.back();
    used_ -= oldest.bytes->size();
    index_.erase(oldest.key);
    entries_.pop_back();
  }
}

void PageCache::clear() {
  MutexLock lock(mutex_);
  entries_.clear();
  index_.clear();
  used_ = 0;
}

void PageCache::describe(StoreStat* stat) const {
  MutexLock lock(mutex_);
  stat->dram_capacity_bytes = capacity_;
  stat->dram_bytes = used_;
  stat->dram_hits = hits_;
  stat->dram_misses = misses_;
}

}  // namespace hcache::store
