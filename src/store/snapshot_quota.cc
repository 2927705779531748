// Keeps snapshots within their quota; and chunks that lose pages and stay, for whatever reason.
#include <algorithm>
#include <unordered_set>

#include "store_impl.h"

namespace hcache::store {
namespace {

bool is_new_snapshot(const Draft& draft, std::size_t page) {
  return draft.record.info.pages[page].encoding == Encoding::kSnapshot &&
         !draft.sources[page].empty();
}

bool brings_snapshot(const Draft& draft) {
  for (std::size_t i = 0; i < draft.sources.size(); ++i) {
    if (is_new_snapshot(draft, i)) return true;
  }
  return false;
}

// The draft without the snapshot that it was to write.
void leave_out(Draft* draft) {
  Draft left;
  left.exists = draft->exists;
  left.record.info = draft->record.info;
  left.record.info.pages.clear();
  for (std::size_t i = 0; i < draft->sources.size(); ++i) {
    if (is_new_snapshot(*draft, i)) continue;
    left.record.info.pages.push_back(draft->record.info.pages[i]);
    left.record.places.push_back(draft->record.places[i]);
    left.sources.push_back(draft->sources[i]);
  }
  *draft = std::move(left);
}

}  // namespace

Status StoreImpl::drop_pages(std::span<const ShrunkChunk> chunks) {
  if (chunks.empty()) return {};
  std::vector<Draft> drafts(chunks.size());
  for (std::size_t i = 0; i < chunks.size(); ++i) drafts[i].record = chunks[i].left;
  HCACHE_RETURN_IF_ERROR(commit_rewrite(drafts));
  pins_.raise_epoch();
  std::vector<DroppedPage> freed;
  for (const ShrunkChunk& chunk : chunks) {
    const ChunkInfo& dropped = chunk.dropped.info;
    owners_.subtract(dropped.salt, page_bytes(chunk.dropped));
    order_->add(chunk.left);
    snapshots_->set(chunk.left);
    for (std::size_t i = 0; i < dropped.pages.size(); ++i) {
      freed.push_back({dropped.id, chunk.dropped.places[i], dropped.pages[i].bytes});
    }
  }
  // A match may have pinned the chunks meanwhile: their pages wait.
  space_->free_when_unpinned(std::move(freed));
  space_->free_unpinned(pins_);
  return {};
}

Status StoreImpl::drop_snapshots(std::span<const ChunkId> ids) {
  std::vector<ShrunkChunk> chunks;
  std::vector<ChunkRecord> dropped;
  std::vector<ChunkId> tails;
  for (const ChunkId& id : ids) {
    auto record = catalog_->find(id);
    if (!record.ok() && record.code() != Code::kDataLoss) return record.status();
    if (!record.ok() || !record->has_value()) continue;  // a row that was damaged meanwhile
    chunks.push_back(without_snapshot(**record));
    dropped.push_back(chunks.back().dropped);
    if ((*record)->info.tokens.size() < kChunkTokens) tails.push_back(id);
  }
  copies_->evicted(dropped);
  HCACHE_RETURN_IF_ERROR(drop_pages(chunks));
  if (remote_ == nullptr) cache_.erase_snapshots(ids);
  // What a longer chunk has but for the snapshot need not stay.
  removal_->erase_when_unpinned(tails);
  return {};
}

Status StoreImpl::make_room_for_snapshots(PutDraft* draft, PutReport* report) {
  if (!snapshots_->enabled()) return {};
  std::unordered_set<ChunkId> coming;
  // What the draft has a copy of, places of pages and all, must not change under it.
  std::unordered_set<ChunkId> spared;
  std::uint64_t allowed = snapshots_->quota_bytes();
  for (const ChunkRecord& tail : draft->superseded) {
    spared.insert(tail.info.id);
    if (!pins_.pinned(tail.info.id)) allowed += snapshot_bytes(tail.info);
  }
  // What is to come is weighed with what is there, as if it were there already.
  for (const Draft& chunk : draft->chunks) {
    snapshots_->set(chunk.record);
    (brings_snapshot(chunk) ? coming : spared).insert(chunk.record.info.id);
  }
  std::vector<ChunkId> chosen;
  if (const std::uint64_t bytes = snapshots_->bytes(); bytes > allowed) {
    chosen = snapshots_->choose(bytes - allowed, [&](const ChunkId& id) {
      return coming.contains(id) || (!spared.contains(id) && !pins_.pinned(id));
    });
  }
  for (auto chunk = draft->chunks.rbegin(); chunk != draft->chunks.rend(); ++chunk) {
    if (!chunk->exists) {
      snapshots_->erase(chunk->record.info.id);
    } else if (coming.contains(chunk->record.info.id)) {
      Draft before = *chunk;
      leave_out(&before);
      snapshots_->set(before.record);
    }
  }
  const auto first_there = std::partition(chosen.begin(), chosen.end(),
                                          [&](const ChunkId& id) { return coming.contains(id); });
  const std::unordered_set<ChunkId> out(chosen.begin(), first_there);
  for (Draft& chunk : draft->chunks) {
    if (out.contains(chunk.record.info.id)) leave_out(&chunk);
  }
  const std::size_t needless = std::erase_if(
      draft->chunks, [](const Draft& chunk) { return chunk.exists && new_bytes(chunk) == 0; });
  report->chunks_extended -= static_cast<std::uint32_t>(needless);
  report->chunks_known += static_cast<std::uint32_t>(needless);
  HCACHE_RETURN_IF_ERROR(drop_snapshots(std::span(first_there, chosen.end())));
  report->snapshots_dropped += static_cast<std::uint32_t>(chosen.size());
  snapshots_dropped_ += chosen.size();
  return {};
}

}  // namespace hcache::store
