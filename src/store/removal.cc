#include "removal.h"

#include <algorithm>

#include "base/log.h"
#include "put_draft.h"
#include "recovery.h"

namespace hcache::store {

Status save_uses(Pins* pins, Catalog::Transaction* transaction) {
  for (const auto& [id, when] : pins->take_uses()) {
    HCACHE_RETURN_IF_ERROR(transaction->touch(id, when));
  }
  return {};
}

void Removal::finish(std::span<const ChunkRecord> victims, bool committed) {
  pins_.clear_dying(victims);
  order_.removed(victims, committed);
  if (!committed) return;
  if (remote_ == nullptr) cache_.erase(ids_of(victims));
  for (const ChunkRecord& victim : victims) {
    owners_.subtract(victim.info.salt, page_bytes(victim));
    snapshots_.erase(victim.info.id);
  }
  space_.free_pages(victims);
}

Result<std::uint64_t> Removal::erase(std::vector<ChunkRecord> victims, bool durably) {
  if (victims.empty()) return std::uint64_t{0};
  pins_.mark_dying(&victims);
  auto commit = [&]() -> Status {
    HCACHE_ASSIGN_OR_RETURN(auto transaction, catalog_.begin());
    for (const ChunkRecord& victim : victims) {
      HCACHE_RETURN_IF_ERROR(transaction.erase(victim.info.id));
    }
    HCACHE_RETURN_IF_ERROR(save_uses(&pins_, &transaction));
    return commit_with_records(&transaction, &records_, durably);
  };
  const Status status = commit();
  finish(victims, status.ok());
  HCACHE_RETURN_IF_ERROR(status);
  forget(ids_of(victims));
  return static_cast<std::uint64_t>(victims.size());
}

Result<bool> Removal::redundant(const ChunkRecord& record) {
  const ChunkInfo& info = record.info;
  if (info.tokens.size() == kChunkTokens) return false;
  HCACHE_ASSIGN_OR_RETURN(
      const auto others,
      catalog_.children(sibling_key(info.fingerprint, info.salt, info.parent), info.tokens[0]));
  return std::any_of(others.begin(), others.end(), [&](const ChunkRecord& other) {
    return same_family(other.info, info) && other.info.tokens.size() > info.tokens.size() &&
           starts_with(other.info.tokens, info.tokens) && covers(other.info, info.pages);
  });
}

void Removal::finish_unpinned() {
  space_.free_unpinned(pins_);
  std::vector<ChunkRecord> tails;
  std::unordered_set<ChunkId> waiting;
  for (const ChunkId& id : superseded_) {
    if (pins_.pinned(id)) {
      waiting.insert(id);
      continue;
    }
    auto found = catalog_.find(id);
    if (!found.ok() || !found->has_value()) continue;
    const auto needless = redundant(**found);
    if (needless.ok() && *needless) tails.push_back(std::move(**found));
  }
  superseded_ = std::move(waiting);
  std::vector<ChunkId> ids;
  for (const ChunkRecord& tail : tails) ids.push_back(tail.info.id);
  if (remote_ != nullptr && remote_->writes() != RemoteWrite::kOff && !ids.empty()) {
    remote_->supersede(ids);
  }
  const auto erased = erase(std::move(tails));
  if (!erased.ok()) log::warn("removing extended tails: {}", erased.status().to_string());
}

}  // namespace hcache::store
