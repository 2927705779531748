#include "owners.h"

#include <vector>

namespace hcache::store {

const SaltId& Owners::owner_of(const SaltId& salt) const {
  const auto it = owners_.find(salt);
  return it == owners_.end() ? salt : it->second;
}

void Owners::adopt(const SaltId& salt, const SaltId& owner) {
  if (owner.is_zero() || owner == salt || owners_.contains(salt)) return;
  // What it had until now counted for itself (another server wrote it, or an older program did).
  const auto own = bytes_.extract(salt);
  if (!own.empty()) bytes_[owner] += own.mapped();
  owners_.emplace(salt, owner);
  unsaved_.insert(salt);
}

std::uint64_t Owners::bytes(const SaltId& owner) const {
  const auto it = bytes_.find(owner);
  return it == bytes_.end() ? 0 : it->second;
}

Status Owners::save(Catalog::Transaction* transaction) const {
  for (const SaltId& salt : unsaved_) {
    HCACHE_RETURN_IF_ERROR(transaction->put_owner(salt, owners_.at(salt)));
  }
  return {};
}

Status Owners::drop_unused(Catalog* catalog) {
  std::unordered_set<SaltId> used;
  HCACHE_RETURN_IF_ERROR(catalog->scan([&](ChunkRow&& row) {
    if (row.record.ok()) used.insert(row.record->info.salt);
    return true;
  }));
  HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog->begin());
  std::vector<SaltId> unused;
  for (const auto& [salt, owner] : owners_) {
    if (used.contains(salt)) continue;
    HCACHE_RETURN_IF_ERROR(transaction.erase_owner(salt));
    unused.push_back(salt);
  }
  HCACHE_RETURN_IF_ERROR(transaction.commit());
  for (const SaltId& salt : unused) {
    owners_.erase(salt);
    unsaved_.erase(salt);
  }
  return {};
}

}  // namespace hcache::store
