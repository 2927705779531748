// What a put is going to change, worked out before anything is: which chunks are new, which pages
// they lack, which shorter tails they make needless.
//
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "catalog.h"

namespace hcache::store {

// A chunk that is about to be written.
struct Draft {
  ChunkRecord record;
  bool exists = false;  // an update, not an insertion
  // Per page of the record what is to be written; empty for pages that are there already.
  std::vector<std::span<const std::byte>> sources;
};

struct PutDraft {
  std::vector<Draft> chunks;
  std::vector<ChunkRecord> superseded;  // tails that go with the commit
  std::unordered_set<ChunkId> keep;     // must not be evicted to make room
  std::vector<ChunkId> used;
  PutReport report;
};

// Of the pages that are to be written.
[[nodiscard]] std::uint64_t new_bytes(const Draft& draft);
// Whether a chunk offers every (layer, encoding) of `wanted`.
[[nodiscard]] bool covers(const ChunkInfo& have, std::span<const PageInfo> wanted);
[[nodiscard]] bool starts_with(std::span<const std::int32_t> tokens,
                               std::span<const std::int32_t> prefix);

class PutDrafter {
 public:
  PutDrafter(Catalog& catalog, std::uint64_t max_page_bytes)
      : catalog_(catalog), max_page_bytes_(max_page_bytes) {}

  // invalid_argument: the batch is not what Store::put asks for.
  [[nodiscard]] Result<PutDraft> draft(std::span<const ChunkWrite> batch);

 private:
  [[nodiscard]] Status add(const ChunkWrite& write);
  // A chunk that the store does not have: decides whether it is written.
  [[nodiscard]] Status add_new(const ChunkWrite& write, Draft chunk,
                               std::span<const PageInfo> wanted);
  // Whether the batch makes this stored tail needless; several chunks may extend the same one.
  [[nodiscard]] bool supersedes(const ChunkId& id) const;
  // Whether the parent is there, full, stored or in the batch.
  [[nodiscard]] Result<bool> has_parent(const ChunkId& parent);
  // Longer siblings make a chunk needless (then true); it makes shorter ones needless.
  [[nodiscard]] Result<bool> settle_siblings(const ChunkInfo& info,
                                             std::span<const PageInfo> wanted,
                                             std::vector<ChunkRecord>* shorter);

  Catalog& catalog_;
  const std::uint64_t max_page_bytes_;
  PutDraft draft_;
  std::unordered_map<ChunkId, std::size_t> index_;  // of draft_.chunks, dropped ones included
  std::vector<bool> dropped_;                       // of draft_.chunks
};

}  // namespace hcache::store
