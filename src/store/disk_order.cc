#include "disk_order.h"

#include <unordered_set>
#include <utility>
#include <vector>

#include "chunk_worth.h"

namespace hcache::store {
namespace {

// A request looks its chain up several times: uses so close together count as one.
constexpr double kOneUseS = 1;
// Before any time of this process: the place among what was saved earlier is a chunk's number.
constexpr double kEarlierS = -1e12;

}  // namespace

void DiskOrder::insert(const ChunkId& id, const ChunkInfo& info, std::optional<policy::Past> past) {
  const Id key = short_id(id);
  const double now = now_s();
  const auto [place, is_new] = chunks_.try_emplace(key);
  if (!is_new) {
    // Of two that can't be told apart the second stays, as if it were pinned.
    if (place->second.id == id) order_.set_worth(key, worth_of(info, costs_));
    return;
  }
  place->second = {id, past ? past->last_use_s : now};
  const auto parent = info.parent.is_zero() ? std::nullopt : std::optional(short_id(info.parent));
  order_.insert(key, parent, now, worth_of(info, costs_), past);
  order_.set_demands(std::span(&key, 1), wanted_);
}

void DiskOrder::load(const ChunkRow& row) {
  if (!enabled_) return;
  const policy::Past past = {
      .stored_s = kEarlierS + static_cast<double>(row.seq),
      .last_use_s = now_s() - static_cast<double>(env_.wall_ns() - row.last_used_ns) * 1e-9};
  MutexLock lock(mutex_);
  // A damaged row is of no use to anybody, but its turn comes like that of others.
  insert(row.id, row.record.ok() ? row.record->info : ChunkInfo(), past);
}

void DiskOrder::add(const ChunkRecord& record) {
  if (!enabled_) return;
  MutexLock lock(mutex_);
  insert(record.info.id, record.info, std::nullopt);
}

void DiskOrder::use(std::span<const ChunkId> chunks) {
  if (!enabled_) return;
  MutexLock lock(mutex_);
  const double now = now_s();
  for (const ChunkId& chunk : chunks) {
    const auto found = chunks_.find(short_id(chunk));
    if (found == chunks_.end() || found->second.id != chunk) continue;
    const bool again = now - found->second.last_use_s < kOneUseS;
    found->second.last_use_s = now;
    again ? order_.touch(found->first, now) : order_.use(found->first, now);
  }
}

Status DiskOrder::set_costs(const policy::TierCosts& costs) {
  if (!enabled_) return {};
  {
    MutexLock lock(mutex_);
    costs_ = costs;
  }
  return catalog_.scan([&](ChunkRow&& row) {
    if (!row.record.ok()) return true;
    MutexLock lock(mutex_);
    order_.set_worth(short_id(row.id), worth_of(row.record->info, costs));
    return true;
  });
}

Status DiskOrder::choose(const VictimQuery& query, Catalog::Transaction* transaction,
                         Victims* victims) {
  std::unordered_set<Id> refused;
  const auto not_refused = [&](Id id) { return !refused.contains(id); };
  while (victims->bytes < query.bytes) {
    std::vector<std::pair<Id, ChunkId>> leaving;
    {
      MutexLock lock(mutex_);
      for (const Id id : order_.victims(now_s(), not_refused)) {
        leaving.emplace_back(id, chunks_.at(id).id);
      }
    }
    if (leaving.empty()) return {};
    for (const auto& [key, id] : leaving) {
      HCACHE_ASSIGN_OR_RETURN(auto found, transaction->find(id));
      ChunkRow row;
      row.id = id;
      row.record = ChunkRecord();
      row.record->info.id = id;  // of a damaged row nothing else is known
      if (found.has_value() && found->record.ok()) row = std::move(*found);
      if (!query.may_go(row)) {
        refused.insert(key);
        break;  // nor may those before it
      }
      MutexLock lock(mutex_);
      if (auto taken = order_.take(key)) leaving_.emplace(key, *taken);
      victims->bytes += page_bytes(*row.record);
      victims->chunks.push_back(std::move(*row.record));
    }
  }
  return {};
}

void DiskOrder::removed(std::span<const ChunkRecord> victims, bool committed) {
  if (!enabled_) return;
  MutexLock lock(mutex_);
  const double now = now_s();
  for (const ChunkRecord& victim : victims) {
    const Id key = short_id(victim.info.id);
    const auto known = chunks_.find(key);
    if (!committed || known == chunks_.end() || known->second.id != victim.info.id) continue;
    chunks_.erase(known);
    const auto leaving = leaving_.extract(key);
    leaving.empty() ? order_.erase(key, now) : order_.left(key, leaving.mapped(), now);
  }
  for (const auto& [key, taken] : leaving_) {
    order_.put_back(key, taken);
    order_.set_demands(std::span(&key, 1), wanted_);
  }
  leaving_.clear();
}

void DiskOrder::want(std::uint64_t ticket, std::span<const ChunkId> chunks) {
  if (!enabled_) return;
  MutexLock lock(mutex_);
  std::vector<Id> ids;
  for (const ChunkId& chunk : chunks) ids.push_back(short_id(chunk));
  order_.set_demands(wanted_.add(ticket, std::move(ids)), wanted_);
}

void DiskOrder::dispatch(std::uint64_t ticket) {
  if (!enabled_) return;
  MutexLock lock(mutex_);
  order_.set_demands(wanted_.dispatch(ticket), wanted_);
}

void DiskOrder::unwant(std::uint64_t ticket) {
  if (!enabled_) return;
  MutexLock lock(mutex_);
  order_.set_demands(wanted_.remove(ticket), wanted_);
}

}  // namespace hcache::store
