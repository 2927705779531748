// Checking: verify() reads every byte, check_integrity() proves the invariants.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "store_impl.h"

namespace hcache::store {
namespace {
constexpr std::uint64_t kVerifyRing = 16ULL << 20;  // bytes, unless pages are larger
constexpr std::size_t kVerifyChunks = 32;           // read ahead together
constexpr std::uint64_t kProgressPages = 256;
constexpr std::int64_t kCommitNs = 200'000'000;  // that a writer may take for a commit
}  // namespace

// ---- Verify -----------------------------------------------------------------------------------

Result<std::uint64_t> StoreImpl::verify_catalog(VerifyReport* report, std::vector<ChunkId>* ids) {
  // Findings of SQLite itself; a file that it can't even check is one.
  const auto findings = catalog_->sqlite_check();
  if (!findings.ok()) {
    if (findings.code() != Code::kDataLoss) return findings.status();
    report->damaged_catalog.push_back(findings.status());
  } else {
    for (const std::string& line : *findings) report->damaged_catalog.push_back(data_loss(line));
  }
  std::uint64_t pages = 0;
  const Status scanned = catalog_->scan([&](ChunkRow&& row) {
    if (row.record.ok()) {
      ids->push_back(row.id);
      pages += row.record->places.size();
    } else {
      report->damaged_catalog.push_back(row.record.status());
    }
    return true;
  });
  if (!scanned.ok()) {
    if (scanned.code() != Code::kDataLoss) return scanned;
    report->damaged_catalog.push_back(scanned);
  }
  return pages;
}

void StoreImpl::verify_segment_headers(VerifyReport* report) {
  for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
    const auto numbers = segments_->list(disk);
    if (!numbers.ok()) {
      report->damaged_catalog.push_back(numbers.status());
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
        report->damaged_catalog.push_back(status.with_context(segments_->path(disk, number)));
      }
    }
  }
}

void StoreImpl::verify_sessions(VerifyReport* report) {
  const auto rows = catalog_->session_records();
  if (!rows.ok()) return;  // SQLite's check has told
  for (const SessionRow& row : *rows) {
    if (!row.status.ok()) report->damaged_catalog.push_back(row.status);
  }
}

bool StoreImpl::record_intact(const RecordRef& ref) {
  std::vector<std::string> dirs;
  for (std::uint32_t disk = 0; disk < segments_->disks(); ++disk) {
    dirs.push_back(segments_->dir(disk));
  }
  std::string buffer;
  const auto record = read_record(env_, catalog_->store_id(), dirs, ref.place, &buffer);
  return record.ok() && record->head.key == ref.key;
}

void StoreImpl::verify_records(VerifyReport* report) {
  if (catalog_->format() < kFirstFormatWithRecords) return;  // it has none
  std::vector<ChunkId> chunks;
  std::vector<std::string> names;
  const Status scanned = catalog_->scan([&](ChunkRow&& row) {
    if (row.record.ok() && !record_intact(row.record_ref)) chunks.push_back(row.id);
    return true;
  });
  const auto sessions = catalog_->session_records();
  if (!scanned.ok() || !sessions.ok()) return;  // SQLite's check has told
  for (const SessionRow& row : *sessions) {
    if (!record_intact(row.record_ref)) names.push_back(row.name);
  }
  if (chunks.empty() && names.empty()) return;
  // A writer erases a record before it commits that its row goes: look again after that.
  if (options_.read_only) env_.sleep_ns(kCommitNs);
  MutexLock lock(write_mutex_);
  const auto damaged = [&](const std::string& of) {
    report->damaged_catalog.push_back(data_loss(
        fmt::format("the record of {} is damaged (`hcache store repair` writes it anew)", of)));
  };
  for (const ChunkId& id : chunks) {
    const auto place = catalog_->record_of(id);
    if (!place.ok() || !place->has_value()) continue;
    if (!record_intact({record_key(seal_.hide(id)), **place, 0})) damaged("chunk " + to_hex(id));
  }
  const auto now = catalog_->session_records();
  if (!now.ok()) return;
  for (const SessionRow& row : *now) {
    const bool suspect = std::find(names.begin(), names.end(), row.name) != names.end();
    if (suspect && !record_intact(row.record_ref)) damaged("session '" + row.name + "'");
  }
}

Result<std::uint64_t> StoreImpl::verify_requests(std::span<const ChunkId> ids, VerifyReport* report,
                                                 std::vector<PageRequest>* requests) {
  std::uint64_t needed = kVerifyRing;
  for (const ChunkId& id : ids) {
    auto chunk = find(id);
    if (chunk.code() == Code::kNotFound) continue;  // evicted meanwhile
    if (!chunk.ok()) {
      if (chunk.code() != Code::kDataLoss) return chunk.status();
      report->damaged_catalog.push_back(chunk.status());
      continue;
    }
    ++report->chunks;
    for (const PageInfo& page : chunk->info().pages) {
      requests->push_back({*chunk, page.layer, page.encoding});
      needed = std::max(needed, 4 * (round_up(page.bytes, kBlock) + 2 * kBlock));
    }
  }
  // In the order of the disk, which is (encoding, layer, chunk) within what was written together.
  std::stable_sort(requests->begin(), requests->end(),
                   [](const PageRequest& a, const PageRequest& b) {
                     return std::pair(a.encoding, a.layer) < std::pair(b.encoding, b.layer);
                   });
  return needed;
}

Result<VerifyReport> StoreImpl::verify(const Progress& progress) {
  HCACHE_RETURN_IF_ERROR(check_open());
  VerifyReport report;
  std::vector<ChunkId> ids;
  HCACHE_ASSIGN_OR_RETURN(const std::uint64_t all_pages, verify_catalog(&report, &ids));
  verify_segment_headers(&report);
  verify_sessions(&report);
  verify_records(&report);

  std::unique_ptr<PageReader> reader;
  std::uint64_t ring_bytes = 0;
  std::uint64_t done = 0;
  for (std::size_t at = 0; at < ids.size(); at += kVerifyChunks) {
    std::vector<PageRequest> requests;
    const auto some = std::span(ids).subspan(at, std::min(ids.size() - at, kVerifyChunks));
    HCACHE_ASSIGN_OR_RETURN(const std::uint64_t needed, verify_requests(some, &report, &requests));
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
      if (progress && done % kProgressPages == 0 && !progress(done, std::max(done, all_pages))) {
        return cancelled("verification was stopped");
      }
    }
  }
  if (progress) progress(done, done);
  return report;
}

// ---- Self-check -------------------------------------------------------------------------------

// Parents are there and full, and every chunk is found by its own.
Status StoreImpl::check_families(std::span<const ChunkRecord> chunks) {
  std::unordered_map<ChunkId, std::size_t> tokens;  // of each chunk
  for (const ChunkRecord& record : chunks) {
    tokens.emplace(record.info.id, record.info.tokens.size());
  }
  for (const ChunkRecord& record : chunks) {
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
  return {};
}

// Pages do not overlap and lie within their files.
Status StoreImpl::check_places(std::span<const ChunkRecord> chunks) {
  struct Used {
    std::uint64_t offset;
    std::uint64_t end;
    ChunkId chunk;
  };
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::vector<Used>> used;
  for (const ChunkRecord& record : chunks) {
    for (std::size_t i = 0; i < record.places.size(); ++i) {
      const PagePlace& place = record.places[i];
      used[{place.disk, place.segment}].push_back(
          {place.offset, place.offset + record.info.pages[i].bytes, record.info.id});
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
  return {};
}

Status StoreImpl::check_owners(std::span<const ChunkRecord> chunks) {
  std::unordered_map<SaltId, std::uint64_t> owned;
  for (const ChunkRecord& record : chunks) {
    owned[owners_.owner_of(record.info.salt)] += page_bytes(record);
  }
  for (const auto& [owner, bytes] : owners_.all_bytes()) {
    if (bytes != owned[owner]) {
      return internal_error(fmt::format("owner {} has {} bytes of pages, counted are {}",
                                        to_hex(owner), owned[owner], bytes));
    }
  }
  return {};
}

Status StoreImpl::check_records(std::span<const RecordRef> refs) {
  if (!records_->complete()) return {};
  HCACHE_ASSIGN_OR_RETURN(const auto sessions, catalog_->session_records());
  std::vector<RecordRef> all(refs.begin(), refs.end());
  for (const SessionRow& row : sessions) {
    if (row.record_ref.place) all.push_back(row.record_ref);
  }
  return records_->check(all);
}

Status StoreImpl::check_integrity() {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_open());
  std::vector<ChunkRecord> all;
  std::vector<RecordRef> refs;
  Status bad;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok()) {
      bad = internal_error(row.record.status().message());
      return false;
    }
    if (row.record_ref.place) refs.push_back(row.record_ref);
    all.push_back(std::move(*row.record));
    return true;
  }));
  HCACHE_RETURN_IF_ERROR(bad);
  HCACHE_RETURN_IF_ERROR(check_families(all));
  HCACHE_RETURN_IF_ERROR(check_places(all));
  if (options_.read_only) return {};
  HCACHE_RETURN_IF_ERROR(check_owners(all));
  HCACHE_RETURN_IF_ERROR(check_records(refs));
  HCACHE_RETURN_IF_ERROR(snapshots_->check(all));
  // The free space must be what a rebuild from the catalog would find, but for what waits.
  return space_->check(all);
}

}  // namespace hcache::store
