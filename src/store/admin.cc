// Looking at a store, checking it, cleaning it up.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

#include "base/log.h"
#include "store_impl.h"

namespace hcache::store {
namespace {

constexpr std::uint64_t kVerifyRing = 16ULL << 20;  // bytes, unless pages are larger
constexpr std::size_t kVerifyChunks = 32;           // read ahead together
constexpr std::uint64_t kRewriteBytes = 32 << 20;   // moved in one batch by gc
constexpr std::uint64_t kMaxGcPasses = 64;

}  // namespace

std::uint64_t StoreImpl::owned_bytes(const SaltId& owner) {
  MutexLock lock(write_mutex_);
  const auto it = owned_bytes_.find(owner);
  return it == owned_bytes_.end() ? 0 : it->second;
}

Result<StoreStat> StoreImpl::stat() {
  HCACHE_RETURN_IF_ERROR(check_open());
  // The log is part of the disk use and can be any size up to its limit: empty it first.
  if (!options_.read_only) {
    catalog_->checkpoint().ignore("the figure is larger, not wrong");
  }
  StoreStat out;
  out.format_version = kFormatVersion;
  out.quota_bytes = options_.quota_bytes;
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
  return out;
}

Status StoreImpl::list(const std::function<bool(const ChunkSummary&)>& visit) {
  HCACHE_RETURN_IF_ERROR(check_open());
  return catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok()) return true;
    ChunkSummary summary;
    summary.page_bytes = page_bytes(*row.record);
    summary.info = std::move(row.record->info);
    summary.last_used_ns = row.last_used_ns;
    {
      MutexLock lock(mutex_);
      const auto touched = touched_.find(row.id);
      if (touched != touched_.end()) summary.last_used_ns = touched->second;
    }
    return visit(summary);
  });
}

Result<VerifyReport> StoreImpl::verify(const Progress& progress) {
  HCACHE_RETURN_IF_ERROR(check_open());
  VerifyReport report;
  // Findings of SQLite itself; a file that it can't even check is one.
  const auto findings = catalog_->sqlite_check();
  if (!findings.ok()) {
    if (findings.code() != Code::kDataLoss) return findings.status();
    report.damaged_catalog.push_back(findings.status());
  } else {
    for (const std::string& line : *findings) report.damaged_catalog.push_back(data_loss(line));
  }
  std::vector<ChunkId> ids;
  std::uint64_t all_pages = 0;
  const Status scanned = catalog_->scan([&](ChunkRow&& row) {
    if (row.record.ok()) {
      ids.push_back(row.id);
      all_pages += row.record->places.size();
    } else {
      report.damaged_catalog.push_back(row.record.status());
    }
    return true;
  });
  if (!scanned.ok()) {
    if (scanned.code() != Code::kDataLoss) return scanned;
    report.damaged_catalog.push_back(scanned);
  }
  for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
    const auto numbers = segments_->list(disk);
    if (!numbers.ok()) {
      report.damaged_catalog.push_back(numbers.status());
      continue;
    }
    for (const std::uint32_t number : *numbers) {
      const auto file = segments_->open(disk, number);
      Status status = file.status();
      if (file.ok()) {  // an open handle was checked long ago: look again
        AlignedBuffer header(kSegmentHeaderBytes);
        const auto got = (*file)->read_at(0, header.span());
        status = got.status();
        if (got.ok()) {
          status =
              check_segment_header(header.span().first(*got), catalog_->store_id(), disk, number);
        }
      }
      if (!status.ok()) {
        report.damaged_catalog.push_back(status.with_context(segments_->path(disk, number)));
      }
    }
  }
  const auto names = catalog_->session_names();
  if (names.ok()) {
    for (const std::string& name : *names) {
      const auto session = catalog_->find_session(name);
      if (session.code() == Code::kDataLoss) report.damaged_catalog.push_back(session.status());
    }
  }

  std::vector<PageRequest> requests;
  std::unique_ptr<PageReader> reader;
  std::uint64_t ring_bytes = 0;
  std::uint64_t done = 0;
  for (std::size_t at = 0; at < ids.size(); at += kVerifyChunks) {
    requests.clear();
    std::uint64_t needed = kVerifyRing;
    for (std::size_t i = at; i < std::min(ids.size(), at + kVerifyChunks); ++i) {
      auto chunk = find(ids[i]);
      if (chunk.code() == Code::kNotFound) continue;  // evicted meanwhile
      if (!chunk.ok()) {
        if (chunk.code() != Code::kDataLoss) return chunk.status();
        report.damaged_catalog.push_back(chunk.status());
        continue;
      }
      ++report.chunks;
      for (const PageInfo& page : chunk->info().pages) {
        requests.push_back({*chunk, page.layer, page.encoding});
        needed = std::max(needed, 4 * (round_up(page.bytes, kBlock) + 2 * kBlock));
      }
    }
    // In the order of the disk, which is (encoding, layer, chunk) within what was written together.
    std::stable_sort(requests.begin(), requests.end(),
                     [](const PageRequest& a, const PageRequest& b) {
                       return std::pair(a.encoding, a.layer) < std::pair(b.encoding, b.layer);
                     });
    if (needed > ring_bytes) {
      ring_bytes = needed;
      ReaderOptions options;
      options.ring_bytes = ring_bytes;
      HCACHE_ASSIGN_OR_RETURN(reader, new_reader(options));
    }
    HCACHE_RETURN_IF_ERROR(reader->submit(requests));
    for (const PageRequest& request : requests) {
      HCACHE_ASSIGN_OR_RETURN(const PageView view, reader->next());
      ++report.pages;
      if (view.status.ok()) {
        report.page_bytes += view.bytes.size();
      } else if (view.status.code() != Code::kUnavailable || !options_.read_only) {
        report.damaged_pages.push_back(
            {request.chunk.info().id, request.layer, request.encoding, view.status});
      }
      reader->release(view.index);
      ++done;
      if (progress && done % 256 == 0 && !progress(done, std::max(done, all_pages))) {
        return cancelled("verification was stopped");
      }
    }
  }
  if (progress) progress(done, done);
  return report;
}

// ---- Garbage ----------------------------------------------------------------------------------

Status StoreImpl::drop_unreachable() {
  // Each pass removes what the pass before left without a parent.
  for (std::uint64_t pass = 0; pass < kMaxGcPasses; ++pass) {
    std::vector<std::int64_t> damaged;
    std::vector<ChunkRecord> all;
    std::unordered_set<ChunkId> ids;
    HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
      if (!row.record.ok()) {
        damaged.push_back(row.seq);
        return true;
      }
      ids.insert(row.id);
      all.push_back(std::move(*row.record));
      return true;
    }));
    std::vector<ChunkRecord> victims;
    for (ChunkRecord& record : all) {
      const bool orphan = !record.info.parent.is_zero() && !ids.contains(record.info.parent);
      bool needless = false;
      if (!orphan) {
        HCACHE_ASSIGN_OR_RETURN(needless, redundant(record));
      }
      if (orphan || needless) victims.push_back(std::move(record));
    }
    if (!damaged.empty()) {
      HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
      for (const std::int64_t seq : damaged) HCACHE_RETURN_IF_ERROR(transaction.erase_row(seq));
      HCACHE_RETURN_IF_ERROR(transaction.commit());
    }
    HCACHE_ASSIGN_OR_RETURN(const std::uint64_t erased, erase_chunks(std::move(victims)));
    if (erased == 0 && damaged.empty()) break;
  }
  return {};
}

// Reads the chunks' pages and writes them anew, together. Damaged pages are left where they are.
Result<std::uint64_t> StoreImpl::rewrite(std::vector<ChunkRecord> records) {
  std::vector<std::shared_ptr<const AlignedBuffer>> data;
  std::vector<Draft> drafts;
  std::vector<DeferredPage> old;
  for (ChunkRecord& record : records) {
    Draft draft;
    draft.exists = true;
    for (std::size_t i = 0; i < record.places.size(); ++i) {
      const PagePlace& place = record.places[i];
      const std::uint32_t bytes = record.info.pages[i].bytes;
      draft.sources.emplace_back();
      auto page = read_page(place, bytes);
      if (!page) continue;
      draft.sources.back() = {page->data(), page->size()};
      data.push_back(std::move(page));
      old.push_back({record.info.id, place, bytes});
    }
    draft.record = std::move(record);
    drafts.push_back(std::move(draft));
  }
  std::vector<Run> runs = lay_out(&drafts);
  HCACHE_RETURN_IF_ERROR(write_runs(&runs));
  auto commit = [&]() -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
    for (const Draft& draft : drafts) HCACHE_RETURN_IF_ERROR(transaction.update(draft.record));
    return transaction.commit();
  };
  const Status status = commit();
  if (!status.ok()) {
    abandon_runs(&runs, status);
    return status;
  }
  settle_runs(&runs);
  {
    MutexLock lock(mutex_);
    ++epoch_;
  }
  // A match may have pinned the old places meanwhile: those wait.
  deferred_.insert(deferred_.end(), old.begin(), old.end());
  settle_deferred();
  return static_cast<std::uint64_t>(old.size());
}

// Chunks with pages in segments of which less than half is used move elsewhere, unless pinned.
Result<std::uint64_t> StoreImpl::move_sparse_pages() {
  std::set<std::pair<std::uint32_t, std::uint32_t>> sparse;
  for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
    const Allocator& space = free_space_[disk];
    std::vector<std::uint32_t> candidates;
    for (const std::uint32_t number : space.segments()) {
      const std::uint64_t span = space.end_of_use(number) - kSegmentHeaderBytes;
      if (space.used_bytes(number) * 2 < span) candidates.push_back(number);
    }
    for (const std::uint32_t number : candidates) sparse.insert({disk, number});
  }
  if (sparse.empty()) return std::uint64_t{0};
  std::vector<ChunkRecord> moving;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok() || pinned(row.id)) return true;
    const bool there =
        std::any_of(row.record->places.begin(), row.record->places.end(), [&](const PagePlace& p) {
          return sparse.contains({p.disk, p.segment});
        });
    if (there) moving.push_back(std::move(*row.record));
    return true;
  }));
  // Chains together and in order, so that they read well afterwards.
  std::stable_sort(moving.begin(), moving.end(), [](const ChunkRecord& a, const ChunkRecord& b) {
    return std::tuple(a.info.fingerprint, a.info.salt, a.info.first_position) <
           std::tuple(b.info.fingerprint, b.info.salt, b.info.first_position);
  });
  std::uint64_t moved = 0;
  std::vector<ChunkRecord> batch;
  std::uint64_t bytes = 0;
  for (std::size_t i = 0; i < moving.size(); ++i) {
    bytes += page_bytes(moving[i]);
    batch.push_back(std::move(moving[i]));
    if (bytes < kRewriteBytes && i + 1 < moving.size()) continue;
    HCACHE_ASSIGN_OR_RETURN(const std::uint64_t n, rewrite(std::move(batch)));
    moved += n;
    batch.clear();
    bytes = 0;
  }
  return moved;
}

Status StoreImpl::drop_unused_owners() {
  std::unordered_set<SaltId> used;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
    if (row.record.ok()) used.insert(row.record->info.salt);
    return true;
  }));
  HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
  std::vector<SaltId> unused;
  for (const auto& [salt, owner] : owners_) {
    if (used.contains(salt)) continue;
    HCACHE_RETURN_IF_ERROR(transaction.erase_owner(salt));
    unused.push_back(salt);
  }
  HCACHE_RETURN_IF_ERROR(transaction.commit());
  for (const SaltId& salt : unused) {
    owners_.erase(salt);
    new_owners_.erase(salt);
  }
  return {};
}

Result<GcReport> StoreImpl::gc() {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  auto allocated = [&]() HCACHE_REQUIRES(write_mutex_) {
    std::uint64_t sum = catalog_->allocated_bytes(env_);
    for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
      for (const std::uint32_t number : free_space_[disk].segments()) {
        const auto info = env_.file_info(segments_->path(disk, number));
        if (info.ok()) sum += info->allocated_bytes;
      }
    }
    return sum;
  };
  GcReport report;
  report.bytes_before = allocated();
  settle_deferred();
  HCACHE_RETURN_IF_ERROR(drop_unreachable());
  HCACHE_RETURN_IF_ERROR(drop_unused_owners());
  const auto moved = move_sparse_pages();
  if (moved.ok()) {
    report.pages_moved = *moved;
  } else if (moved.code() != Code::kResourceExhausted) {  // no room to move: leave it
    return moved.status();
  }
  HCACHE_RETURN_IF_ERROR(reclaim(true, &report.segments_removed));
  HCACHE_RETURN_IF_ERROR(catalog_->vacuum());
  HCACHE_RETURN_IF_ERROR(catalog_->checkpoint());
  report.bytes_after = allocated();
  return report;
}

Result<std::uint64_t> StoreImpl::remove(const RemoveFilter& filter) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  settle_deferred();
  cache_.clear();  // what is removed is nowhere
  std::unordered_map<ChunkId, std::int64_t> touched;
  {
    MutexLock state(mutex_);
    touched = touched_;
  }
  std::unordered_map<ChunkId, ChunkRecord> all;
  std::unordered_map<ChunkId, std::vector<ChunkId>> followers;
  std::vector<ChunkId> todo;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok()) return true;
    const ChunkInfo& info = row.record->info;
    const auto used = touched.find(row.id);
    const std::int64_t last_used = used == touched.end() ? row.last_used_ns : used->second;
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
    if (!pinned(id)) continue;
    for (auto at = all.find(id); at != all.end(); at = all.find(at->second.info.parent)) {
      chosen.erase(at->first);
    }
  }
  std::vector<ChunkRecord> victims;
  for (const ChunkId& id : chosen) victims.push_back(std::move(all.at(id)));
  return erase_chunks(std::move(victims));
}

// ---- Self-check -------------------------------------------------------------------------------

Status StoreImpl::check_integrity() {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_open());
  struct Used {
    std::uint64_t offset;
    std::uint64_t end;
    ChunkId chunk;
  };
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<Used>> used;
  std::vector<ChunkRecord> all;
  std::unordered_map<ChunkId, std::size_t> tokens;  // of each chunk
  Status bad;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok()) {
      bad = internal_error(row.record.status().message());
      return false;
    }
    tokens.emplace(row.id, row.record->info.tokens.size());
    for (std::size_t i = 0; i < row.record->places.size(); ++i) {
      const PagePlace& place = row.record->places[i];
      used[{place.disk, place.segment}].push_back(
          {place.offset, place.offset + row.record->info.pages[i].bytes, row.id});
    }
    all.push_back(std::move(*row.record));
    return true;
  }));
  HCACHE_RETURN_IF_ERROR(bad);
  for (const ChunkRecord& record : all) {
    const ChunkInfo& info = record.info;
    if (!info.parent.is_zero()) {
      const auto parent = tokens.find(info.parent);
      if (parent == tokens.end() || parent->second != kChunkTokens) {
        return internal_error(fmt::format("chunk {} has no full parent", to_hex(info.id)));
      }
    }
    HCACHE_ASSIGN_OR_RETURN(
        const auto family,
        catalog_->children(sibling_key(info.fingerprint, info.salt, info.parent), info.tokens[0]));
    if (std::none_of(family.begin(), family.end(),
                     [&](const ChunkRecord& r) { return r.info.id == info.id; })) {
      return internal_error(fmt::format("chunk {} is not found by its parent", to_hex(info.id)));
    }
  }
  for (auto& [where, pages] : used) {
    const auto& [disk, segment] = where;
    std::sort(pages.begin(), pages.end(),
              [](const Used& a, const Used& b) { return a.offset < b.offset; });
    for (std::size_t i = 1; i < pages.size(); ++i) {
      if (pages[i].offset < pages[i - 1].end) {
        return internal_error(fmt::format("pages of chunks {} and {} overlap in {}",
                                          to_hex(pages[i - 1].chunk), to_hex(pages[i].chunk),
                                          segments_->path(disk, segment)));
      }
    }
    HCACHE_ASSIGN_OR_RETURN(const FileInfo info, env_.file_info(segments_->path(disk, segment)));
    if (!info.exists || info.size < pages.back().end) {
      return internal_error(
          fmt::format("{} ends before its pages", segments_->path(disk, segment)));
    }
  }
  if (options_.read_only) return {};
  std::unordered_map<SaltId, std::uint64_t> owned;
  for (const ChunkRecord& record : all) owned[owner_of(record.info.salt)] += page_bytes(record);
  for (const auto& [owner, bytes] : owned_bytes_) {
    if (bytes != owned[owner]) {
      return internal_error(fmt::format("owner {} has {} bytes of pages, counted are {}",
                                        to_hex(owner), owned[owner], bytes));
    }
  }
  // The free space must be what a rebuild from the catalog would find, but for what waits.
  std::vector<Allocator> expected(segments_->disks(), Allocator(options_.segment_bytes));
  bool inside = true;
  for (const ChunkRecord& record : all) {
    for (std::size_t i = 0; i < record.places.size(); ++i) {
      const PagePlace& place = record.places[i];
      inside =
          inside && place.disk < expected.size() &&
          expected[place.disk].add_page(place.segment, place.offset, record.info.pages[i].bytes);
    }
  }
  for (const DeferredPage& page : deferred_) {
    inside = inside &&
             expected[page.place.disk].add_page(page.place.segment, page.place.offset, page.bytes);
  }
  for (const DiskExtent& lost : limbo_) {
    inside = inside && expected[lost.disk].add_page(lost.extent.segment, lost.extent.offset,
                                                    lost.extent.bytes);
  }
  if (!inside) return internal_error("a page lies outside of its segment");
  for (std::uint32_t disk = 0; disk < expected.size(); ++disk) {
    if (expected[disk].used_bytes() != free_space_[disk].used_bytes()) {
      return internal_error(fmt::format("disk {} has {} bytes in use, its pages need {}", disk,
                                        free_space_[disk].used_bytes(),
                                        expected[disk].used_bytes()));
    }
  }
  return {};
}

}  // namespace hcache::store
