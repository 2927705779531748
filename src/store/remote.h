// The store's remote tier: what it was found to have, and what goes there and comes from there.
//
// A directory in memory says which chunks the tier has, as of when it was last asked about their
// chains. The catalog never speaks of the tier: what is gone there is not missed here.
// Threading: any thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/sync.h"
#include "format.h"
#include "tier.h"

namespace hcache::store {

class Remote {
 public:
  Remote(Env& env, const RemoteOptions& options, std::unique_ptr<Tier> tier)
      : env_(env), options_(options), tier_(std::move(tier)) {}

  // ---- The directory

  // A chain of which the store has the first `at` tokens, up to `parent`: asks the tier for what
  // follows, and waits for it. `have_tail`: tokens of a partial last chunk that the store has.
  void look_up(const ChainFingerprints& fingerprints, const SaltId& salt, const ChunkId& parent,
               std::span<const std::int32_t> tokens, std::size_t at, std::size_t have_tail)
      HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] std::optional<ChunkRecord> find(const ChunkId& id) const HCACHE_EXCLUDES(mutex_);
  // Chunks behind the same parent that begin with this token.
  [[nodiscard]] std::vector<ChunkRecord> children(const ChunkId& sibling_key,
                                                  std::int32_t first_token) const
      HCACHE_EXCLUDES(mutex_);
  // A page could not be had. Of a tier that did not answer nothing is offered until it is asked
  // again.
  void page_failed(const ChunkId& id, const PageInfo& page, const Status& why)
      HCACHE_EXCLUDES(mutex_);

  // ---- Pages

  void read(const PageKey& page, const SaltId& salt, std::uint32_t bytes, std::int64_t deadline_ns,
            Tier::ReadDone done) {
    tier_->read(page, salt, bytes, deadline_ns, std::move(done));
  }
  [[nodiscard]] RemoteWrite writes() const { return options_.write; }
  void write(TierWrite write) {
    // What is skipped is counted there.
    (void)tier_->write(std::move(write));
  }
  // Chunks that were deleted: they must not be found there any more.
  void erase(std::span<const ChunkId> ids) HCACHE_EXCLUDES(mutex_);

  // Tails that longer chunks have replaced: they need not be there any more.
  void supersede(std::span<const ChunkId> tails) HCACHE_EXCLUDES(mutex_);

  // Remembers a chunk for the disks, so that what follows it can be saved there.
  void keep(const ChunkRecord& record) HCACHE_EXCLUDES(mutex_);
  // … and a page of it that was read and verified. Beyond a limit pages are dropped.
  void keep(const ChunkRecord& record, const TierPage& page) HCACHE_EXCLUDES(mutex_);
  // What has been remembered since, chunk by chunk, parents first.
  [[nodiscard]] std::vector<TierWrite> take_kept() HCACHE_EXCLUDES(mutex_);

  [[nodiscard]] Status flush(std::int64_t deadline_ns) { return tier_->flush(deadline_ns); }
  void count_promoted(std::uint64_t pages) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] RemoteStat stat() const HCACHE_EXCLUDES(mutex_);

 private:
  // nullopt: no answer in time.
  [[nodiscard]] std::optional<std::vector<std::optional<ChunkRecord>>> ask(
      std::vector<ChunkId> ids, std::int64_t deadline_ns);
  void add(ChunkRecord record) HCACHE_EXCLUDES(mutex_);
  void drop(const ChunkId& id) HCACHE_REQUIRES(mutex_);
  void drop_kept(const ChunkId& id) HCACHE_REQUIRES(mutex_);
  // Null: there are enough.
  [[nodiscard]] TierWrite* kept(const ChunkRecord& record) HCACHE_REQUIRES(mutex_);

  Env& env_;
  const RemoteOptions options_;
  mutable Mutex mutex_;
  std::unordered_map<ChunkId, ChunkRecord> chunks_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_map<ChunkId, std::vector<ChunkId>> children_ HCACHE_GUARDED_BY(mutex_);
  std::deque<ChunkId> order_ HCACHE_GUARDED_BY(mutex_);  // as added; may name what is gone
  std::vector<TierWrite> kept_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_map<ChunkId, std::size_t> kept_at_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t kept_bytes_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::uint64_t found_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::uint64_t promoted_ HCACHE_GUARDED_BY(mutex_) = 0;
  const std::unique_ptr<Tier> tier_;  // the last: it may still call back into the rest
};

}  // namespace hcache::store
