// Chunks on their way out: marked, removed from the catalog in one transaction, their space freed.
//
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_set>
#include <vector>

#include "catalog.h"
#include "disk_order.h"
#include "owners.h"
#include "page_cache.h"
#include "pins.h"
#include "records.h"
#include "remote.h"
#include "snapshots.h"
#include "space.h"

namespace hcache::store {

class Removal {
 public:
  // `remote` may be null.
  Removal(Catalog& catalog, Pins& pins, Space& space, Records& records, Owners& owners,
          DiskOrder& order, Snapshots& snapshots, PageCache& cache, Remote* remote)
      : catalog_(catalog),
        pins_(pins),
        space_(space),
        records_(records),
        owners_(owners),
        order_(order),
        snapshots_(snapshots),
        cache_(cache),
        remote_(remote) {}

  // Removes chunks in one transaction of their own, except pinned ones. Returns how many.
  // `durably`: as Records::erase().
  [[nodiscard]] Result<std::uint64_t> erase(std::vector<ChunkRecord> victims, bool durably = false);
  // After the removal of chunks that Pins::mark_dying() marked, or its failure: clears the marks
  // and, if it was committed, frees their space, and that in host memory where no remote tier can
  // still offer them.
  void finish(std::span<const ChunkRecord> victims, bool committed);
  // Drops chunks that were removed, and not only evicted, from host memory.
  void forget(std::span<const ChunkId> chunks) { cache_.erase(chunks); }
  // Tails that are needless but pinned: they go when they are not.
  void erase_when_unpinned(std::span<const ChunkId> tails) {
    superseded_.insert(tails.begin(), tails.end());
  }
  // Does what waited for pins that are gone now: dropped pages and superseded tails.
  void finish_unpinned();
  // Whether a longer sibling has all of a tail's tokens and pages.
  [[nodiscard]] Result<bool> redundant(const ChunkRecord& record);

 private:
  Catalog& catalog_;
  Pins& pins_;
  Space& space_;
  Records& records_;
  Owners& owners_;
  DiskOrder& order_;
  Snapshots& snapshots_;
  PageCache& cache_;
  Remote* const remote_;
  std::unordered_set<ChunkId> superseded_;  // one may be extended again while it is pinned
};

// Writes times of use that the catalog does not have yet.
[[nodiscard]] Status save_uses(Pins* pins, Catalog::Transaction* transaction);

}  // namespace hcache::store
