// Which chunks are in use, which are about to be removed, and when each was used last.
//
// How eviction and matching work side by side without waiting for each other: a writer marks chunks
// as dying (never pinned ones), commits their removal, then clears the marks and raises the epoch.
// A match looks up without locks and then pins: what is dying ends the match, and if the epoch
// changed meanwhile it looks again.
// Threading: any thread. The lock is held for moments, never during I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/ids.h"
#include "base/sync.h"
#include "format.h"

namespace hcache::store {

class Pins {
 public:
  [[nodiscard]] std::uint64_t epoch() const HCACHE_EXCLUDES(mutex_);
  // Pins the chunks of a chain up to the first dying one, and returns how many. nullopt, and none
  // is pinned: something changed since `epoch`. `used_ns`: marks them as used then.
  [[nodiscard]] std::optional<std::size_t> pin(std::span<const ChunkId> chain, std::uint64_t epoch,
                                               std::optional<std::int64_t> used_ns)
      HCACHE_EXCLUDES(mutex_);
  void unpin(const ChunkId& id) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] bool pinned(const ChunkId& id) const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t count() const HCACHE_EXCLUDES(mutex_);

  // Marks those that are not pinned, and that nothing pinned among them follows, as dying and
  // leaves the others out.
  void mark_dying(std::vector<ChunkRecord>* victims) HCACHE_EXCLUDES(mutex_);
  // After the removal or its failure: clears the marks and raises the epoch.
  void clear_dying(std::span<const ChunkRecord> victims) HCACHE_EXCLUDES(mutex_);
  // Pages of a chunk that stays have changed.
  void raise_epoch() HCACHE_EXCLUDES(mutex_);

  void mark_used(std::span<const ChunkId> ids, std::int64_t when_ns) HCACHE_EXCLUDES(mutex_);
  // Times of use that the catalog does not have yet.
  [[nodiscard]] std::unordered_map<ChunkId, std::int64_t> uses() const HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] std::optional<std::int64_t> last_use(const ChunkId& id) const
      HCACHE_EXCLUDES(mutex_);
  // The same, for writing them to the catalog: they are forgotten here.
  [[nodiscard]] std::unordered_map<ChunkId, std::int64_t> take_uses() HCACHE_EXCLUDES(mutex_);

 private:
  mutable Mutex mutex_;
  std::unordered_map<ChunkId, std::uint32_t> pins_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_set<ChunkId> dying_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_map<ChunkId, std::int64_t> uses_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t epoch_ HCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace hcache::store
