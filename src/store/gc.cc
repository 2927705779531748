// Garbage collection: what nothing reaches, segments that are mostly empty, the catalog's own room.
#include <algorithm>
#include <set>
#include <unordered_set>

#include "recovery.h"
#include "store_impl.h"

namespace hcache::store {
namespace {
constexpr std::uint64_t kRewriteBytes = 32 << 20;  // moved in one batch
constexpr std::uint64_t kMaxPasses = 64;
}  // namespace

Status StoreImpl::drop_unreachable() {
  // Each pass removes what the pass before left without a parent.
  for (std::uint64_t pass = 0; pass < kMaxPasses; ++pass) {
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
        HCACHE_ASSIGN_OR_RETURN(needless, removal_->redundant(record));
      }
      if (orphan || needless) victims.push_back(std::move(record));
    }
    if (!damaged.empty()) {
      HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
      for (const std::int64_t seq : damaged) HCACHE_RETURN_IF_ERROR(transaction.erase_row(seq));
      HCACHE_RETURN_IF_ERROR(commit_with_records(&transaction, records_.get()));
    }
    HCACHE_ASSIGN_OR_RETURN(const std::uint64_t erased, removal_->erase(std::move(victims)));
    if (erased == 0 && damaged.empty()) break;
  }
  return {};
}

Status StoreImpl::commit_rewrite(std::span<const Draft> drafts) {
  HCACHE_ASSIGN_OR_RETURN(const auto written, write_records(drafts));
  const auto commit = [&]() HCACHE_REQUIRES(write_mutex_) -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
    for (std::size_t i = 0; i < drafts.size(); ++i) {
      HCACHE_RETURN_IF_ERROR(transaction.update(drafts[i].record, written[i].place));
    }
    return commit_with_records(&transaction, records_.get());
  };
  Status status = commit();
  if (!status.ok()) records_->erase(written, false);
  return status;
}

Result<std::uint64_t> StoreImpl::rewrite(std::vector<ChunkRecord> records) {
  std::vector<std::shared_ptr<const AlignedBuffer>> data;
  std::vector<Draft> drafts;
  std::vector<DroppedPage> old;
  for (ChunkRecord& record : records) {
    Draft draft;
    draft.exists = true;
    for (std::size_t i = 0; i < record.places.size(); ++i) {
      const PagePlace& place = record.places[i];
      const std::uint32_t bytes = record.info.pages[i].bytes;
      draft.sources.emplace_back();
      auto page = segments_->read_page(record, i);
      if (!page) continue;
      draft.sources.back() = {page->data(), page->size()};
      data.push_back(std::move(page));
      old.push_back({record.info.id, place, bytes});
    }
    draft.record = std::move(record);
    drafts.push_back(std::move(draft));
  }
  std::vector<Run> runs = writer_->lay_out(&drafts);
  HCACHE_RETURN_IF_ERROR(writer_->write(&runs));
  const Status status = commit_rewrite(drafts);
  if (!status.ok()) {
    writer_->abandon(&runs, status);
    return status;
  }
  writer_->settle(&runs);
  pins_.raise_epoch();
  const std::uint64_t moved = old.size();
  // A match may have pinned the old places meanwhile: those wait.
  space_->free_when_unpinned(std::move(old));
  removal_->finish_unpinned();
  return moved;
}

Result<std::uint64_t> StoreImpl::move_sparse_pages() {
  const auto segments = space_->sparse_segments();
  const std::set<std::pair<std::uint32_t, std::uint32_t>> sparse(segments.begin(), segments.end());
  if (sparse.empty()) return std::uint64_t{0};
  std::vector<ChunkRecord> moving;
  HCACHE_RETURN_IF_ERROR(catalog_->scan([&](ChunkRow&& row) {
    if (!row.record.ok() || pins_.pinned(row.id)) return true;
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

// The damaged catalog of a repair still has what was deleted since.
Status StoreImpl::remove_set_aside() {
  for (const char* suffix : {"", "-wal"}) {
    const Status status =
        env_.remove_path(join_path(options_.catalog_dir, kDamagedCatalogName) + suffix);
    if (!status.ok() && status.code() != Code::kNotFound) return status;
  }
  return {};
}

Result<GcReport> StoreImpl::gc() {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  auto allocated = [&]() HCACHE_REQUIRES(write_mutex_) {
    return catalog_->allocated_bytes(env_) + space_->allocated_bytes() + record_file_bytes();
  };
  GcReport report;
  report.bytes_before = allocated();
  removal_->finish_unpinned();
  HCACHE_RETURN_IF_ERROR(drop_unreachable());
  HCACHE_RETURN_IF_ERROR(owners_.drop_unused(catalog_.get()));
  const auto moved = move_sparse_pages();
  if (moved.ok()) {
    report.pages_moved = *moved;
  } else if (moved.code() != Code::kResourceExhausted) {  // no room to move: leave it
    return moved.status();
  }
  HCACHE_RETURN_IF_ERROR(space_->reclaim(true, &report.segments_removed));
  HCACHE_RETURN_IF_ERROR(records_->reclaim());
  HCACHE_RETURN_IF_ERROR(remove_set_aside());
  HCACHE_RETURN_IF_ERROR(catalog_->vacuum());
  HCACHE_RETURN_IF_ERROR(catalog_->checkpoint());
  report.bytes_after = allocated();
  return report;
}

}  // namespace hcache::store
