// Making batches durable: draft, room, data, one transaction. And dropping a page, the way back.
#include <algorithm>

#include "base/log.h"
#include "recovery.h"
#include "store_impl.h"

namespace hcache::store {

Result<PutReport> StoreImpl::put(std::span<const ChunkWrite> batch) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  removal_->finish_unpinned();
  promote();  // first: the batch may go on from there
  return put_batch(batch, Source::kCaller);
}

void StoreImpl::promote() {
  if (remote_ == nullptr) return;
  const std::vector<TierWrite> kept = remote_->take_kept();
  if (kept.empty()) return;
  std::vector<ChunkWrite> batch;
  std::uint64_t pages = 0;
  for (const TierWrite& chunk : kept) {
    ChunkWrite& write = batch.emplace_back();
    write.id = chunk.info.id;
    write.parent = chunk.info.parent;
    write.fingerprint = chunk.info.fingerprint;
    write.salt = chunk.info.salt;
    write.first_position = chunk.info.first_position;
    write.tokens = chunk.info.tokens;
    write.k_type = chunk.info.k_type;
    write.v_type = chunk.info.v_type;
    for (const TierPage& page : chunk.pages) {
      write.pages.push_back(
          {page.info.layer, page.info.encoding, {page.bytes->data(), page.bytes->size()}});
    }
    pages += write.pages.size();
  }
  const auto put = put_batch(batch, Source::kRemote);
  if (put.ok()) {
    remote_->count_promoted(pages);
  } else {
    log::warn("what was read from the remote store is not kept: {}", put.status().to_string());
  }
}

Result<PutReport> StoreImpl::put_batch(std::span<const ChunkWrite> batch, Source source) {
  for (const ChunkWrite& write : batch) owners_.adopt(write.salt, write.owner);
  PutDrafter drafter(*catalog_, std::min<std::uint64_t>(kMaxPageBytes, space_->max_extent_bytes()));
  HCACHE_ASSIGN_OR_RETURN(PutDraft draft, drafter.draft(batch));
  PutReport report = draft.report;
  pins_.mark_used(draft.used, env_.wall_ns());
  order_->use(draft.used);
  snapshots_->use(draft.used);
  HCACHE_RETURN_IF_ERROR(make_room_for_snapshots(&draft, &report));
  if (draft.chunks.empty()) return report;

  std::vector<Run> runs = writer_->lay_out(&draft.chunks);
  std::uint64_t bytes = 0;
  for (const Run& run : runs) {
    bytes += round_up(run.bytes, kBlock);
    report.page_bytes += run.bytes;
  }
  HCACHE_RETURN_IF_ERROR(quota_->make_room(bytes, draft, &report));
  HCACHE_RETURN_IF_ERROR(writer_->write(&runs));

  const std::size_t tails = draft.superseded.size();
  std::vector<ChunkId> pinned_tails;
  for (const ChunkRecord& tail : draft.superseded) pinned_tails.push_back(tail.info.id);
  pins_.mark_dying(&draft.superseded);
  for (const ChunkRecord& tail : draft.superseded) std::erase(pinned_tails, tail.info.id);
  const Status committed = commit_put(draft);
  if (!committed.ok()) {
    writer_->abandon(&runs, committed);
    removal_->finish(draft.superseded, false);
    return committed;
  }
  writer_->settle(&runs);
  owners_.saved();
  for (const Draft& chunk : draft.chunks) {
    owners_.add(chunk.record.info.salt, new_bytes(chunk));
    order_->add(chunk.record);
    snapshots_->set(chunk.record);
  }
  copies_->put(draft, source);
  removal_->finish(draft.superseded, true);
  removal_->erase_when_unpinned(pinned_tails);
  report.tails_superseded += static_cast<std::uint32_t>(tails);
  space_->release_uncertain();
  // The put has happened: what the records lack after a power cut the catalog has.
  records_->sync(false).ignore("the next put or close() tries again");
  return report;
}

Result<std::vector<RecordRef>> StoreImpl::write_records(std::span<const Draft> drafts) {
  std::vector<Records::Draft> records;
  for (const Draft& draft : drafts) {
    records.push_back(chunk_record_draft(draft.record, owners_, seal_));
  }
  return records_->write(std::move(records));
}

Status StoreImpl::commit_put(const PutDraft& draft) {
  HCACHE_ASSIGN_OR_RETURN(const auto written, write_records(draft.chunks));
  const auto commit = [&]() HCACHE_REQUIRES(write_mutex_) -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_->begin());
    const std::int64_t now = env_.wall_ns();
    for (std::size_t i = 0; i < draft.chunks.size(); ++i) {
      const Draft& chunk = draft.chunks[i];
      const RecordPlace& place = written[i].place;
      if (chunk.exists) {
        HCACHE_RETURN_IF_ERROR(transaction.update(chunk.record, place));
      } else {
        HCACHE_RETURN_IF_ERROR(transaction.erase(chunk.record.info.id));  // a damaged row
        HCACHE_RETURN_IF_ERROR(transaction.insert(chunk.record, now, place));
      }
    }
    for (const ChunkRecord& tail : draft.superseded) {
      HCACHE_RETURN_IF_ERROR(transaction.erase(tail.info.id));
    }
    HCACHE_RETURN_IF_ERROR(owners_.save(&transaction));
    HCACHE_RETURN_IF_ERROR(save_uses(&pins_, &transaction));
    return commit_with_records(&transaction, records_.get());
  };
  Status status = commit();
  if (!status.ok()) records_->erase(written, false);
  return status;
}

Status StoreImpl::quarantine(const ChunkId& id, std::uint16_t layer, Encoding encoding) {
  MutexLock lock(write_mutex_);
  HCACHE_RETURN_IF_ERROR(check_writable());
  removal_->finish_unpinned();
  HCACHE_ASSIGN_OR_RETURN(auto record, catalog_->find(id));
  if (!record.has_value()) return {};
  if (record->info.find_page(layer, encoding) == nullptr) return {};
  const bool whole = encoding == Encoding::kSnapshot;
  const ShrunkChunk chunk = shrink(*record, [&](const PageInfo& other) {
    return other.encoding == encoding && (whole || other.layer == layer);
  });
  HCACHE_RETURN_IF_ERROR(drop_pages({&chunk, 1}));
  removal_->finish_unpinned();
  return {};
}

}  // namespace hcache::store
