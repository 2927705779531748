// Which chunks have a snapshot on the disks, how they follow each other in their chains, and when
// they were used: what policy/snapshots.h decides by.
//
// In memory, about 100 bytes for each chunk of models that keep snapshots, and only where they have
// a quota.
// Threading: any thread. The lock is held for moments, never during I/O.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/env.h"
#include "base/sync.h"
#include "catalog.h"
#include "format.h"

namespace hcache::store {

// Of a chunk's pages those of its snapshot; 0: it has none.
[[nodiscard]] std::uint64_t snapshot_bytes(const ChunkInfo& info);

// A chunk that loses some of its pages and stays: the same chunk with either part of them.
struct ShrunkChunk {
  ChunkRecord left;
  ChunkRecord dropped;
};
[[nodiscard]] ShrunkChunk shrink(const ChunkRecord& record,
                                 const std::function<bool(const PageInfo&)>& goes);
[[nodiscard]] ShrunkChunk without_snapshot(const ChunkRecord& record);

class Snapshots {
 public:
  // quota_bytes 0: nothing is ever dropped; then it holds nothing and costs nothing.
  Snapshots(Env& env, std::uint64_t quota_bytes) : env_(env), quota_bytes_(quota_bytes) {}

  [[nodiscard]] bool enabled() const { return quota_bytes_ > 0; }
  [[nodiscard]] std::uint64_t quota_bytes() const { return quota_bytes_; }
  // Of all snapshots.
  [[nodiscard]] std::uint64_t bytes() const HCACHE_EXCLUDES(mutex_);

  // A row that the catalog has when the store is opened, in any order; then loaded(), once.
  void load(const ChunkRow& row) HCACHE_EXCLUDES(mutex_);
  void loaded() HCACHE_EXCLUDES(mutex_);
  // A chunk is there now: a new one, or with other pages.
  void set(const ChunkRecord& record) HCACHE_EXCLUDES(mutex_);
  void erase(const ChunkId& id) HCACHE_EXCLUDES(mutex_);
  void use(std::span<const ChunkId> chunks) HCACHE_EXCLUDES(mutex_);

  // Chunks that are to lose their snapshots, for `excess` bytes less at least if so many may go.
  [[nodiscard]] std::vector<ChunkId> choose(std::uint64_t excess,
                                            const std::function<bool(const ChunkId&)>& may_go) const
      HCACHE_EXCLUDES(mutex_);
  // internal_error unless it is what these chunks, all that there are, would make anew.
  [[nodiscard]] Status check(std::span<const ChunkRecord> chunks) const HCACHE_EXCLUDES(mutex_);

 private:
  struct Chunk {
    ChunkId parent;
    std::uint64_t end = 0;     // tokens of the chain up to its end
    std::uint64_t bytes = 0;   // of its snapshot
    std::int64_t used_ns = 0;  // wall clock, of a snapshot
    ChunkId before;            // the last one before it that has a snapshot; zero: none
  };

  // Null: it is not here.
  [[nodiscard]] const Chunk* find(const ChunkId& id) const HCACHE_REQUIRES(mutex_);
  [[nodiscard]] ChunkId last_before(const Chunk& chunk) const HCACHE_REQUIRES(mutex_);
  // Whether the chain of `chunk` goes through another one.
  [[nodiscard]] bool goes_through(const Chunk& chunk, const ChunkId& other, std::uint64_t end) const
      HCACHE_REQUIRES(mutex_);
  void link(const ChunkId& id) HCACHE_REQUIRES(mutex_);
  void unlink(const ChunkId& id) HCACHE_REQUIRES(mutex_);

  Env& env_;
  const std::uint64_t quota_bytes_;
  mutable Mutex mutex_;
  std::unordered_map<ChunkId, Chunk> chunks_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_set<ChunkId> with_snapshot_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t bytes_ HCACHE_GUARDED_BY(mutex_) = 0;
};

}  // namespace hcache::store
