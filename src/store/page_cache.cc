#include "page_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "chunk_worth.h"

namespace hcache::store {
namespace {

// A chunk's pages are used one after the other: it counts as one use.
constexpr double kOneUseS = 1;
// How many times its size a page may push out to find a piece of memory that is large enough.
constexpr std::uint64_t kMostForOne = 8;

}  // namespace

const PageCache::Chunk* PageCache::chunk_of(const ChunkId& id) const {
  const auto found = chunks_.find(short_id(id));
  return found != chunks_.end() && found->second.id == id ? &found->second : nullptr;
}

PageCache::Chunk* PageCache::chunk_of(const ChunkId& id) {
  const auto found = chunks_.find(short_id(id));
  return found != chunks_.end() && found->second.id == id ? &found->second : nullptr;
}

void PageCache::mark(const ChunkRecord& chunk, std::span<PageOrigin> origins) const {
  MutexLock lock(mutex_);
  const Chunk* here = chunk_of(chunk.info.id);
  if (here == nullptr) return;
  for (const Page& page : here->pages) {
    const PageInfo* known = chunk.info.find_page(page.layer, page.encoding);
    if (known == nullptr) continue;
    const auto index = static_cast<std::size_t>(known - chunk.info.pages.data());
    if (chunk.places[index].checksum == page.checksum) origins[index] = PageOrigin::kMemory;
  }
}

HeldBytes PageCache::find(const PageKey& key) {
  if (!enabled()) return {};
  MutexLock lock(mutex_);
  Chunk* chunk = chunk_of(key.chunk);
  if (chunk != nullptr) {
    for (const Page& page : chunk->pages) {
      if (page.layer != key.layer || page.encoding != key.encoding) continue;
      if (page.checksum != key.checksum) break;
      ++hits_;
      if (const double now = now_s(); now - chunk->last_use_s >= kOneUseS) {
        chunk->last_use_s = now;
        order_.use(short_id(key.chunk), now);
      }
      return page.held;
    }
  }
  ++misses_;
  return {};
}

void PageCache::insert(const PageKey& key, const ChunkInfo& info,
                       std::span<const std::byte> bytes) {
  if (bytes.size() > capacity_) return;
  MutexLock lock(mutex_);
  const Id id = short_id(key.chunk);
  const auto [place, is_new] = chunks_.try_emplace(id);
  Chunk& chunk = place->second;
  if (is_new) {
    chunk.id = key.chunk;
    chunk.last_use_s = now_s();
    const auto parent = info.parent.is_zero() ? std::nullopt : std::optional(short_id(info.parent));
    order_.insert(id, parent, chunk.last_use_s, worth_of(info, costs_));
    order_.set_demands(std::span(&id, 1), wanted_);
  } else if (chunk.id != key.chunk) {
    return;  // of two that can't be told apart the second stays out
  }
  const auto old = std::find_if(chunk.pages.begin(), chunk.pages.end(), [&](const Page& page) {
    return page.layer == key.layer && page.encoding == key.encoding;
  });
  if (old != chunk.pages.end()) {
    if (old->checksum == key.checksum) return;
    used_ -= old->held.bytes.size();
    chunk.pages.erase(old);
  }
  HeldBytes held = make_room(id, bytes);
  if (!held) return;
  used_ += bytes.size();
  chunk.pages.push_back({key.layer, key.encoding, key.checksum, std::move(held)});
}

HeldBytes PageCache::make_room(Id id, std::span<const std::byte> bytes) {
  const auto needed = static_cast<double>(bytes.size());
  const auto allowed = static_cast<double>(capacity_);
  double goal = allowed;  // what may be used, with the new page in
  if (policy::bytes_to_evict(policy_, static_cast<double>(used_), needed, allowed) > 0) {
    goal -= allowed * policy_.reserve;
  }
  std::uint64_t gone = 0;
  for (;;) {
    if (static_cast<double>(used_) + needed <= goal) {
      if (HeldBytes held = memory_.copy(bytes)) return held;
      // Evicted pages that are still being read keep their memory: then nothing else need be
      // evicted.
      if (gone > kMostForOne * bytes.size()) {
        if (chunks_.at(id).pages.empty()) drop(id);
        return {};
      }
    }
    const std::vector<Id> victims = order_.victims(now_s());
    if (victims.empty()) return clear_all(), HeldBytes();
    const std::uint64_t before = used_;
    for (const Id victim : victims) drop(victim);
    if (!chunks_.contains(id)) return {};
    gone += before - used_;
  }
}

void PageCache::set_costs(policy::TierCosts costs) {
  MutexLock lock(mutex_);
  costs_ = std::move(costs);
}

void PageCache::drop(Id id) {
  const auto found = chunks_.find(id);
  for (const Page& page : found->second.pages) used_ -= page.held.bytes.size();
  order_.erase(id, now_s());
  chunks_.erase(found);
}

void PageCache::erase(std::span<const ChunkId> chunks) {
  if (!enabled()) return;
  MutexLock lock(mutex_);
  for (const ChunkId& chunk : chunks) {
    if (chunk_of(chunk) != nullptr) drop(short_id(chunk));
  }
}

void PageCache::erase_snapshots(std::span<const ChunkId> chunks) {
  if (!enabled()) return;
  MutexLock lock(mutex_);
  for (const ChunkId& id : chunks) {
    Chunk* chunk = chunk_of(id);
    if (chunk == nullptr) continue;
    std::erase_if(chunk->pages, [&](const Page& page) HCACHE_REQUIRES(mutex_) {
      if (page.encoding != Encoding::kSnapshot) return false;
      used_ -= page.held.bytes.size();
      return true;
    });
    if (chunk->pages.empty()) drop(short_id(id));
  }
}

void PageCache::clear_all() {
  while (!chunks_.empty()) drop(chunks_.begin()->first);
}

void PageCache::want(std::uint64_t ticket, std::span<const ChunkId> chunks) {
  MutexLock lock(mutex_);
  std::vector<Id> ids;
  for (const ChunkId& chunk : chunks) ids.push_back(short_id(chunk));
  order_.set_demands(wanted_.add(ticket, std::move(ids)), wanted_);
}

void PageCache::dispatch(std::uint64_t ticket) {
  MutexLock lock(mutex_);
  order_.set_demands(wanted_.dispatch(ticket), wanted_);
}

void PageCache::unwant(std::uint64_t ticket) {
  MutexLock lock(mutex_);
  order_.set_demands(wanted_.remove(ticket), wanted_);
}

void PageCache::describe(StoreStat* stat) const {
  MutexLock lock(mutex_);
  stat->dram_capacity_bytes = capacity_;
  stat->dram_bytes = used_;
  stat->dram_hits = hits_;
  stat->dram_misses = misses_;
}

}  // namespace hcache::store
