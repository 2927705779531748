// Which chunks the disks give up first when a quota asks for room.
//
// An order is a function over the catalog as one transaction sees it; Quota takes any. It decides
// who goes, never whether: pins, limits and the removal itself are Quota's.
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "catalog.h"

namespace hcache::store {

struct VictimQuery {
  std::uint64_t bytes = 0;  // of pages that are to go, at least
  // Whether a chunk may go: it is not pinned, not needed by what is being written, and of the owner
  // whose quota it is.
  std::function<bool(const ChunkRow&)> may_go;
};

struct Victims {
  std::vector<ChunkRecord> chunks;         // never one before all that follow it
  std::uint64_t bytes = 0;                 // of their pages
  std::vector<std::int64_t> damaged_rows;  // seen on the way: they are no use to anybody
};

// Appends victims until their bytes are enough or nothing else may go. Must not write.
using VictimOrder = std::function<Status(Catalog::Transaction&, const VictimQuery&, Victims*)>;

// The least recently used leaf first, and from there up its chain as long as that is no younger and
// nothing else follows it: so the oldest conversation goes, and not the ends of all.
[[nodiscard]] Status least_recently_used(Catalog::Transaction& transaction,
                                         const VictimQuery& query, Victims* victims);

}  // namespace hcache::store
