// Copies of the disks' pages in the tiers beside them: host memory in front, the remote tier
// behind.
//
// Threading: one thread at a time (the store's writer).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "page_cache.h"
#include "put_draft.h"
#include "remote.h"
#include "segments.h"

namespace hcache::store {

// Pages from the remote tier are on their way to the disks, not back.
enum class Source { kCaller, kRemote };

class TierCopies {
 public:
  // `remote` may be null.
  TierCopies(PageCache& cache, Remote* remote, Segments& segments)
      : cache_(cache), remote_(remote), segments_(segments) {}

  // Copies what was put into host memory and, unless it came from there, to the remote tier.
  void put(const PutDraft& draft, Source source);
  // Hands evicted chunks to the remote tier, if that is its way to come by them. Their pages must
  // still be on the disks.
  void evicted(std::span<const ChunkRecord> victims);

 private:
  PageCache& cache_;
  Remote* const remote_;
  Segments& segments_;
};

}  // namespace hcache::store
