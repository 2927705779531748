// Keeps the disks within the store's quota and each owner's: evicts what the victim order names,
// never what is pinned.
//
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <functional>
#include <unordered_set>

#include "catalog.h"
#include "disk_order.h"
#include "owners.h"
#include "pins.h"
#include "put_draft.h"
#include "records.h"
#include "removal.h"
#include "space.h"
#include "tier_copies.h"

namespace hcache::store {

struct QuotaLimits {
  std::uint64_t store_bytes = 0;   // page blocks, records and catalog; 0: no limit
  std::uint64_t owner_bytes = 0;   // pages of one owner's chunks; 0: no limit
  policy::TierPolicy policy = {};  // its reserve is of store_bytes
};

class Quota {
 public:
  Quota(Env& env, QuotaLimits limits, DiskOrder& order, Catalog& catalog, Pins& pins, Space& space,
        Records& records, Owners& owners, Removal& removal, TierCopies& copies)
      : env_(env),
        limits_(limits),
        order_(order),
        catalog_(catalog),
        pins_(pins),
        space_(space),
        records_(records),
        owners_(owners),
        removal_(removal),
        copies_(copies) {}

  // Evicts until `bytes` more fit the store's quota, and what the draft adds its owners'. Counts
  // what went in the report. resource_exhausted: nothing else may go.
  [[nodiscard]] Status make_room(std::uint64_t bytes, const PutDraft& draft, PutReport* report);

 private:
  [[nodiscard]] Status keep_owners(const PutDraft& draft, const std::unordered_set<ChunkId>& spared,
                                   PutReport* report);
  // Evicts chunks for which `may` holds while there is an excess, and returns what is left of it.
  [[nodiscard]] Result<std::uint64_t> evict(const std::unordered_set<ChunkId>& spared,
                                            const std::function<bool(const ChunkInfo&)>& may,
                                            const std::function<std::uint64_t()>& excess,
                                            PutReport* report);
  // Marks victims for `bytes` as dying and erases them in the transaction, which sees them go.
  [[nodiscard]] Status choose(Catalog::Transaction* transaction, VictimQuery query,
                              std::vector<ChunkRecord>* chosen);

  Env& env_;
  const QuotaLimits limits_;
  DiskOrder& order_;
  Catalog& catalog_;
  Pins& pins_;
  Space& space_;
  Records& records_;
  Owners& owners_;
  Removal& removal_;
  TierCopies& copies_;
};

}  // namespace hcache::store
