#include "pins.h"

namespace hcache::store {

std::uint64_t Pins::epoch() const {
  MutexLock lock(mutex_);
  return epoch_;
}

std::optional<std::size_t> Pins::pin(std::span<const ChunkId> chain, std::uint64_t epoch,
                                     std::optional<std::int64_t> used_ns) {
  MutexLock lock(mutex_);
  if (epoch != epoch_) return std::nullopt;
  std::size_t n = 0;
  for (; n < chain.size() && !dying_.contains(chain[n]); ++n) {
    ++pins_[chain[n]];
    if (used_ns) uses_[chain[n]] = *used_ns;
  }
  return n;
}

void Pins::unpin(const ChunkId& id) {
  MutexLock lock(mutex_);
  const auto at = pins_.find(id);
  if (at != pins_.end() && --at->second == 0) pins_.erase(at);
}

bool Pins::pinned(const ChunkId& id) const {
  MutexLock lock(mutex_);
  return pins_.contains(id);
}

std::size_t Pins::count() const {
  MutexLock lock(mutex_);
  return pins_.size();
}

void Pins::mark_dying(std::vector<ChunkRecord>* victims) {
  MutexLock lock(mutex_);
  std::unordered_set<ChunkId> staying;
  const auto stays = [&](const ChunkRecord& victim) HCACHE_REQUIRES(mutex_) {
    if (!pins_.contains(victim.info.id) && !staying.contains(victim.info.id)) return false;
    staying.insert(victim.info.parent);
    return true;
  };
  // Followers may come before or behind those that they follow.
  while (std::erase_if(*victims, stays) > 0) {
  }
  for (const ChunkRecord& victim : *victims) dying_.insert(victim.info.id);
}

void Pins::clear_dying(std::span<const ChunkRecord> victims) {
  MutexLock lock(mutex_);
  for (const ChunkRecord& victim : victims) dying_.erase(victim.info.id);
  ++epoch_;
}

void Pins::raise_epoch() {
  MutexLock lock(mutex_);
  ++epoch_;
}

void Pins::mark_used(std::span<const ChunkId> ids, std::int64_t when_ns) {
  MutexLock lock(mutex_);
  for (const ChunkId& id : ids) uses_[id] = when_ns;
}

std::unordered_map<ChunkId, std::int64_t> Pins::uses() const {
  MutexLock lock(mutex_);
  return uses_;
}

std::optional<std::int64_t> Pins::last_use(const ChunkId& id) const {
  MutexLock lock(mutex_);
  const auto at = uses_.find(id);
  return at == uses_.end() ? std::nullopt : std::optional(at->second);
}

std::unordered_map<ChunkId, std::int64_t> Pins::take_uses() {
  MutexLock lock(mutex_);
  return std::exchange(uses_, {});
}

}  // namespace hcache::store
