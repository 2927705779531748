// Which chunks the disks give up first when a quota asks for room: an eviction policy's order over
// all chunks of the catalog (policy/chain_order.h), from the ends of their chains up.
//
// In memory, about 300 bytes a chunk; times of use come from the catalog when the store is opened,
// counts of uses begin anew then.
// Threading: any thread; choose(), add(), removed() and set_costs() one at a time (the store's
// writer). The lock is held for moments, never during I/O.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/env.h"
#include "base/sync.h"
#include "catalog.h"
#include "policy/chain_order.h"
#include "policy/miss_cost.h"
#include "policy/wanted.h"

namespace hcache::store {

struct VictimQuery {
  std::uint64_t bytes = 0;  // of pages that are to go, at least
  // Whether a chunk may go: it is not pinned, not needed by what is being written, and of the owner
  // whose quota it is.
  std::function<bool(const ChunkRow&)> may_go;
};

struct Victims {
  // Never one before all that follow it. Of a damaged row, which is of no use to anybody, only the
  // id.
  std::vector<ChunkRecord> chunks;
  std::uint64_t bytes = 0;  // of their pages
};

class DiskOrder {
 public:
  // `enabled`: false where nothing is ever evicted; then it holds nothing and costs nothing.
  DiskOrder(Env& env, Catalog& catalog, const policy::TierPolicy& policy, bool enabled)
      : env_(env), catalog_(catalog), enabled_(enabled), order_(policy) {}

  // A row that the catalog has when the store is opened.
  void load(const ChunkRow& row) HCACHE_EXCLUDES(mutex_);
  // A chunk was committed: a new one, or with further pages.
  void add(const ChunkRecord& record) HCACHE_EXCLUDES(mutex_);
  void use(std::span<const ChunkId> chunks) HCACHE_EXCLUDES(mutex_);
  // What a chunk costs that is gone, for policies that weigh it. Until it is told all cost the same
  // per byte.
  [[nodiscard]] Status set_costs(const policy::TierCosts& costs) HCACHE_EXCLUDES(mutex_);

  // Appends victims until their bytes are enough or nobody else may go. They are on their way out
  // until removed(). Rows are read in the transaction that is going to erase them.
  [[nodiscard]] Status choose(const VictimQuery& query, Catalog::Transaction* transaction,
                              Victims* victims) HCACHE_EXCLUDES(mutex_);
  // After a removal, or its failure: what did not leave after all is in the order again.
  void removed(std::span<const ChunkRecord> victims, bool committed) HCACHE_EXCLUDES(mutex_);

  // A request in the queue wants these chunks, until it is unwanted (policy/wanted.h).
  void want(std::uint64_t ticket, std::span<const ChunkId> chunks) HCACHE_EXCLUDES(mutex_);
  void dispatch(std::uint64_t ticket) HCACHE_EXCLUDES(mutex_);
  void unwant(std::uint64_t ticket) HCACHE_EXCLUDES(mutex_);

 private:
  using Id = policy::ChainOrder::Id;  // the first bytes of a chunk's id
  struct Entry {
    ChunkId id;
    double last_use_s = 0;
  };

  [[nodiscard]] double now_s() const { return static_cast<double>(env_.monotonic_ns()) * 1e-9; }
  void insert(const ChunkId& id, const ChunkInfo& info, std::optional<policy::Past> past)
      HCACHE_REQUIRES(mutex_);

  Env& env_;
  Catalog& catalog_;
  const bool enabled_;
  mutable Mutex mutex_;
  policy::ChainOrder order_ HCACHE_GUARDED_BY(mutex_);
  policy::Wanted wanted_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_map<Id, Entry> chunks_ HCACHE_GUARDED_BY(mutex_);
  std::unordered_map<Id, policy::ChainOrder::Taken> leaving_ HCACHE_GUARDED_BY(mutex_);
  std::optional<policy::TierCosts> costs_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::store
