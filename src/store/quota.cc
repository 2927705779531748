#include "quota.h"

#include <fmt/format.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "recovery.h"

namespace hcache::store {

Status Quota::make_room(std::uint64_t bytes, const PutDraft& draft, PutReport* report) {
  if (limits_.store_bytes == 0 && limits_.owner_bytes == 0) return {};
  std::unordered_set<ChunkId> spared = draft.keep;
  std::uint64_t soon_free = 0;
  for (const ChunkRecord& tail : draft.superseded) {
    spared.insert(tail.info.id);
    if (!pins_.pinned(tail.info.id)) soon_free += page_bytes(tail);
  }
  HCACHE_RETURN_IF_ERROR(keep_owners(draft, spared, report));
  if (limits_.store_bytes == 0) return {};
  const auto excess = [&]() -> std::uint64_t {
    const std::uint64_t needed =
        catalog_.allocated_bytes(env_) + records_.used_bytes() + space_.used_bytes() + bytes;
    return static_cast<std::uint64_t>(
        policy::bytes_to_evict(limits_.policy, static_cast<double>(needed), 0,
                               static_cast<double>(limits_.store_bytes + soon_free)));
  };
  const auto exhausted = [&](std::uint64_t over) {
    return resource_exhausted(
        fmt::format("the store's quota of {} bytes is {} bytes too small for {} more",
                    limits_.store_bytes, over, bytes));
  };
  if (bytes > limits_.store_bytes) return exhausted(bytes - limits_.store_bytes);
  // The catalog's log counts as well, and it can be emptied.
  if (excess() > 0) HCACHE_RETURN_IF_ERROR(catalog_.checkpoint());
  const auto any = [](const ChunkInfo&) { return true; };
  HCACHE_ASSIGN_OR_RETURN(const std::uint64_t over, evict(spared, any, excess, report));
  return over == 0 ? Status() : exhausted(over);
}

Status Quota::keep_owners(const PutDraft& draft, const std::unordered_set<ChunkId>& spared,
                          PutReport* report) {
  if (limits_.owner_bytes == 0) return {};
  std::unordered_map<SaltId, std::uint64_t> added;
  for (const Draft& chunk : draft.chunks) {
    added[owners_.owner_of(chunk.record.info.salt)] += new_bytes(chunk);
  }
  std::unordered_map<SaltId, std::uint64_t> soon_free;
  for (const ChunkRecord& tail : draft.superseded) {
    if (!pins_.pinned(tail.info.id)) {
      soon_free[owners_.owner_of(tail.info.salt)] += page_bytes(tail);
    }
  }
  for (const auto& [id, bytes] : added) {
    const SaltId& owner = id;
    const std::uint64_t needed = bytes;
    const auto excess = [&]() -> std::uint64_t {
      const std::uint64_t total = owners_.bytes(owner) + needed;
      const std::uint64_t allowed = limits_.owner_bytes + soon_free[owner];
      return total > allowed ? total - allowed : 0;
    };
    const auto its = [&](const ChunkInfo& chunk) { return owners_.owner_of(chunk.salt) == owner; };
    HCACHE_ASSIGN_OR_RETURN(const std::uint64_t over, evict(spared, its, excess, report));
    if (over > 0) {
      return resource_exhausted(
          fmt::format("the quota of {} bytes for each key is {} bytes too small for {} more",
                      limits_.owner_bytes, over, needed));
    }
  }
  return {};
}

Result<std::uint64_t> Quota::evict(const std::unordered_set<ChunkId>& spared,
                                   const std::function<bool(const ChunkInfo&)>& may,
                                   const std::function<std::uint64_t()>& excess,
                                   PutReport* report) {
  std::uint64_t over = excess();
  for (; over > 0; over = excess()) {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
    HCACHE_RETURN_IF_ERROR(save_uses(&pins_, &transaction));
    VictimQuery query;
    query.bytes = over;
    query.may_go = [&](const ChunkRow& row) {
      return !spared.contains(row.id) && !pins_.pinned(row.id) && may(row.record->info);
    };
    std::vector<ChunkRecord> victims;
    Status status = choose(&transaction, std::move(query), &victims);
    if (victims.empty()) {
      order_.removed({}, false);
      return status.ok() ? Result<std::uint64_t>(over) : status;
    }
    if (status.ok()) status = commit_with_records(&transaction, &records_);
    if (status.ok()) copies_.evicted(victims);
    removal_.finish(victims, status.ok());
    HCACHE_RETURN_IF_ERROR(status);
    report->chunks_evicted += static_cast<std::uint32_t>(victims.size());
  }
  return over;
}

Status Quota::choose(Catalog::Transaction* transaction, VictimQuery query,
                     std::vector<ChunkRecord>* chosen) {
  // Round by round: what was pinned meanwhile stays, and others have to go instead.
  while (true) {
    Victims victims;
    HCACHE_RETURN_IF_ERROR(order_.choose(query, transaction, &victims));
    pins_.mark_dying(&victims.chunks);
    const bool none = victims.chunks.empty();
    Status status;
    for (ChunkRecord& victim : victims.chunks) {
      if (status.ok()) status = transaction->erase(victim.info.id);
      chosen->push_back(std::move(victim));
    }
    HCACHE_RETURN_IF_ERROR(status);
    if (none || victims.bytes >= query.bytes) return {};
    query.bytes -= victims.bytes;
  }
}

}  // namespace hcache::store
