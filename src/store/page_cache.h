// Pages in host memory, in front of the disks, bounded in bytes: what stays is an eviction policy's
// choice.
//
// A page is found by its chunk, layer, encoding and the checksum that the catalog has for it, so
// what is found is what a read from disk would have to prove itself to be. Pages enter when they
// are written and when a read has been verified. They leave with all others of their chunk, and a
// chunk before the one it continues.
//
// Threading: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/sync.h"
#include "format.h"
#include "page_memory.h"
#include "policy/chain_order.h"
#include "policy/miss_cost.h"
#include "policy/wanted.h"
#include "store/store.h"

namespace hcache::store {

struct PageKey {
  ChunkId chunk;
  std::uint16_t layer = 0;
  Encoding encoding = Encoding::kKv;
  std::uint64_t checksum = 0;
};

class PageCache {
 public:
  // A capacity of 0 holds nothing. The pages lie in `memory`, which has as many bytes or a few
  // less: what it loses between pieces. env must outlive it.
  PageCache(Env& env, std::uint64_t capacity_bytes, const policy::TierPolicy& policy,
            PageMemory memory)
      : env_(env),
        capacity_(capacity_bytes),
        policy_(policy),
        memory_(std::move(memory)),
        order_(policy) {}

  [[nodiscard]] bool enabled() const { return capacity_ > 0; }
  // The page's bytes, marked as used; empty when it is not here.
  [[nodiscard]] HeldBytes find(const PageKey& key) HCACHE_EXCLUDES(mutex_);
  // Copies a page of this chunk in. A chunk that finds no room beside what is worth more stays out.
  void insert(const PageKey& key, const ChunkInfo& info, std::span<const std::byte> bytes)
      HCACHE_EXCLUDES(mutex_);
  // What a page that is not here costs, for policies that weigh it: of reading from memory over
  // reading from the disks. Until it is told all cost the same per byte.
  void set_costs(policy::TierCosts costs) HCACHE_EXCLUDES(mutex_);
  // Sets those of `origins`, one for each page of the chunk, that are here.
  void mark(const ChunkRecord& chunk, std::span<PageOrigin> origins) const HCACHE_EXCLUDES(mutex_);
  // Drops what it has of these chunks; whoever reads one of their pages keeps its copy.
  void erase(std::span<const ChunkId> chunks) HCACHE_EXCLUDES(mutex_);
  // The same of their snapshots alone.
  void erase_snapshots(std::span<const ChunkId> chunks) HCACHE_EXCLUDES(mutex_);
  // A request in the queue wants these chunks, until it is unwanted (policy/wanted.h).
  void want(std::uint64_t ticket, std::span<const ChunkId> chunks) HCACHE_EXCLUDES(mutex_);
  void dispatch(std::uint64_t ticket) HCACHE_EXCLUDES(mutex_);
  void unwant(std::uint64_t ticket) HCACHE_EXCLUDES(mutex_);
  // Fills the fields of StoreStat that are the cache's.
  void describe(StoreStat* stat) const HCACHE_EXCLUDES(mutex_);

 private:
  using Id = policy::ChainOrder::Id;  // the first bytes of a chunk's id
  struct Page {
    std::uint16_t layer = 0;
    Encoding encoding = Encoding::kKv;
    std::uint64_t checksum = 0;
    HeldBytes held;
  };
  struct Chunk {
    ChunkId id;
    double last_use_s = 0;
    std::vector<Page> pages;
  };

  [[nodiscard]] double now_s() const { return static_cast<double>(env_.monotonic_ns()) * 1e-9; }
  // Null: it is not here.
  [[nodiscard]] Chunk* chunk_of(const ChunkId& id) HCACHE_REQUIRES(mutex_);
  [[nodiscard]] const Chunk* chunk_of(const ChunkId& id) const HCACHE_REQUIRES(mutex_);
  // A copy of a page for chunk `id`, for which others leave; empty if it is `id` that has to.
  [[nodiscard]] HeldBytes make_room(Id id, std::span<const std::byte> bytes)
      HCACHE_REQUIRES(mutex_);
  void drop(Id id) HCACHE_REQUIRES(mutex_);
  void clear_all() HCACHE_REQUIRES(mutex_);

  Env& env_;
  const std::uint64_t capacity_;
  const policy::TierPolicy policy_;
  PageMemory memory_;
  mutable Mutex mutex_;
  std::unordered_map<Id, Chunk> chunks_ HCACHE_GUARDED_BY(mutex_);
  std::optional<policy::TierCosts> costs_ HCACHE_GUARDED_BY(mutex_);
  policy::ChainOrder order_ HCACHE_GUARDED_BY(mutex_);
  policy::Wanted wanted_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t used_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::uint64_t hits_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::uint64_t misses_ HCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace hcache::store
