// Looking at a store, and removing from it by what chunks are.
#include <unordered_map>
#include <unordered_set>

#include "store_impl.h"

namespace hcache::store {

std::uint64_t StoreImpl::owned_bytes(const SaltId& owner) {
  MutexLock lock(write_mutex_);
  return owners_.bytes(owner);
}

Result<StoreStat> StoreImpl::stat() {
  HCACHE_RETURN_IF_ERROR(check_open());
  // The log is part of the disk use and can be any size up to its limit: empty it first.
  if (!options_.read_only) {
    catalog_->checkpoint().ignore("the figure is larger, not wrong");
  }
  StoreStat out;
  out.format_version = catalog_->format();
  out.quota_bytes = options_.quota_bytes;
  out.snapshot_quota_bytes = options_.snapshot_quota_bytes;
  out.snapshots_dropped = snapshots_dropped_;
  cache_.describe(&out);
  if (remote_ != nullptr) out.remote = remote_->stat();
  out.checksum_failures = checksum_failures_;
  for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
    DiskStat& d = out.disks.emplace_back();
    d.dir = segments_->dir(disk);
    HCACHE_ASSIGN_OR_RETURN(const auto numbers, segments_->list(disk));
    d.segments = numbers.size();
    for (const std::uint32_t number : numbers) {
      const auto info = env_.file_info(segments_->path(disk, number));
      if (info.ok()) d.allocated_bytes += info->allocated_bytes;
    }
    const auto space = env_.space(d.dir);
    if (space.ok()) d.free_bytes = space->free_bytes;
    out.allocated_bytes += d.allocated_bytes;
  }
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok()) return true;
    ++out.chunks;
    out.tokens += row.record->info.tokens.size();
    out.pages += row.record->places.size();
    const std::uint64_t of_snapshot = snapshot_bytes(row.record->info);
    if (of_snapshot > 0) ++out.snapshots;
    out.snapshot_bytes += of_snapshot;
    for (std::size_t i = 0; i < row.record->places.size(); ++i) {
      const std::uint64_t bytes = row.record->info.pages[i].bytes;
      out.page_bytes += bytes;
      if (row.record->places[i].disk < out.disks.size()) {
        out.disks[row.record->places[i].disk].page_bytes += bytes;
      }
    }
    return true;
  }));
  HCACHE_ASSIGN_OR_RETURN(out.sessions, catalog_->count_sessions());
  out.catalog_bytes = catalog_->allocated_bytes(env_);
  out.record_bytes = record_file_bytes();
  return out;
}

Status StoreImpl::list(const std::function<bool(const ChunkSummary&)>& visit) {
  HCACHE_RETURN_IF_ERROR(check_open());
  return catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok()) return true;
    ChunkSummary summary;
    summary.page_bytes = page_bytes(*row.record);
    summary.info = std::move(row.record->info);
    summary.last_used_ns = pins_.last_use(row.id).value_or(row.last_used_ns);
    return visit(summary);
  });
}

Result<std::uint64_t> StoreImpl::remove(const RemoveFilter& filter) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  removal_->finish_unpinned();
  const std::unordered_map<ChunkId, std::int64_t> uses = pins_.uses();
  std::unordered_map<ChunkId, ChunkRecord> all;
  std::unordered_map<ChunkId, std::vector<ChunkId>> followers;
  std::vector<ChunkId> todo;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok()) return true;
    const ChunkInfo& info = row.record->info;
    const auto used = uses.find(row.id);
    const std::int64_t last_used = used == uses.end() ? row.last_used_ns : used->second;
    if ((!filter.chunk || *filter.chunk == info.id) &&
        (!filter.fingerprint || *filter.fingerprint == info.fingerprint) &&
        (!filter.salt || *filter.salt == info.salt) &&
        (!filter.unused_since_ns || last_used < *filter.unused_since_ns)) {
      todo.push_back(row.id);
    }
    followers[info.parent].push_back(row.id);
    all.emplace(row.id, std::move(*row.record));
    return true;
  }));
  std::unordered_set<ChunkId> chosen;
  while (!todo.empty()) {
    const ChunkId id = todo.back();
    todo.pop_back();
    if (!chosen.insert(id).second) continue;
    const auto next = followers.find(id);
    if (next != followers.end()) todo.insert(todo.end(), next->second.begin(), next->second.end());
  }
  // A pinned chunk stays, and so does what leads to it.
  for (const ChunkId& id : std::vector<ChunkId>(chosen.begin(), chosen.end())) {
    if (!pins_.pinned(id)) continue;
    for (auto at = all.find(id); at != all.end(); at = all.find(at->second.info.parent)) {
      chosen.erase(at->first);
    }
  }
  std::vector<ChunkRecord> victims;
  for (const ChunkId& id : chosen) victims.push_back(std::move(all.at(id)));
  // Durably: what a user has deleted must not come back from its records.
  return removal_->erase(std::move(victims), true);
}

}  // namespace hcache::store
