#include "snapshots.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "policy/snapshots.h"

namespace hcache::store {
namespace {

// Whether snapshots may stand behind such a chunk: those of models that have nothing else are
// without pages where none does.
bool may_lead_to_snapshots(const ChunkInfo& info) {
  const auto of_libllama = [](const PageInfo& page) {
    return page.encoding == Encoding::kRows || page.encoding == Encoding::kSnapshot;
  };
  return info.pages.empty() || std::any_of(info.pages.begin(), info.pages.end(), of_libllama);
}

}  // namespace

std::uint64_t snapshot_bytes(const ChunkInfo& info) {
  std::uint64_t sum = 0;
  for (const PageInfo& page : info.pages) {
    if (page.encoding == Encoding::kSnapshot) sum += page.bytes;
  }
  return sum;
}

ShrunkChunk shrink(const ChunkRecord& record, const std::function<bool(const PageInfo&)>& goes) {
  ShrunkChunk out = {.left = record, .dropped = record};
  for (ChunkRecord* part : {&out.left, &out.dropped}) {
    part->info.pages.clear();
    part->places.clear();
  }
  for (std::size_t i = 0; i < record.places.size(); ++i) {
    ChunkRecord& part = goes(record.info.pages[i]) ? out.dropped : out.left;
    part.info.pages.push_back(record.info.pages[i]);
    part.places.push_back(record.places[i]);
  }
  return out;
}

ShrunkChunk without_snapshot(const ChunkRecord& record) {
  return shrink(record, [](const PageInfo& page) { return page.encoding == Encoding::kSnapshot; });
}

std::uint64_t Snapshots::bytes() const {
  MutexLock lock(mutex_);
  return bytes_;
}

const Snapshots::Chunk* Snapshots::find(const ChunkId& id) const {
  const auto found = chunks_.find(id);
  return found == chunks_.end() ? nullptr : &found->second;
}

ChunkId Snapshots::last_before(const Chunk& chunk) const {
  for (ChunkId id = chunk.parent; const Chunk* at = find(id); id = at->parent) {
    if (at->bytes > 0) return id;
  }
  return {};
}

bool Snapshots::goes_through(const Chunk& chunk, const ChunkId& other, std::uint64_t end) const {
  ChunkId id = chunk.parent;
  const Chunk* at = find(id);
  for (; at != nullptr && at->end > end; at = find(id)) id = at->parent;
  return id == other;
}

void Snapshots::link(const ChunkId& id) {
  Chunk& chunk = chunks_.at(id);
  chunk.before = last_before(chunk);
  for (const ChunkId& behind : with_snapshot_) {
    Chunk& other = chunks_.at(behind);
    const bool same = other.before == chunk.before && other.end > chunk.end;
    if (same && goes_through(other, id, chunk.end)) other.before = id;
  }
  with_snapshot_.insert(id);
}

void Snapshots::unlink(const ChunkId& id) {
  with_snapshot_.erase(id);
  const ChunkId before = chunks_.at(id).before;
  for (const ChunkId& behind : with_snapshot_) {
    Chunk& other = chunks_.at(behind);
    if (other.before == id) other.before = before;
  }
}

void Snapshots::load(const ChunkRow& row) {
  if (!enabled() || !row.record.ok()) return;
  const ChunkInfo& info = row.record->info;
  if (!may_lead_to_snapshots(info)) return;
  MutexLock lock(mutex_);
  Chunk& chunk = chunks_[row.id];
  chunk = {.parent = info.parent,
           .end = info.first_position + info.tokens.size(),
           .bytes = snapshot_bytes(info),
           .used_ns = row.last_used_ns,
           .before = {}};
  bytes_ += chunk.bytes;
  if (chunk.bytes > 0) with_snapshot_.insert(row.id);
}

void Snapshots::loaded() {
  MutexLock lock(mutex_);
  for (const ChunkId& id : with_snapshot_) {
    Chunk& chunk = chunks_.at(id);
    chunk.before = last_before(chunk);
  }
}

void Snapshots::set(const ChunkRecord& record) {
  const ChunkInfo& info = record.info;
  if (!enabled() || !may_lead_to_snapshots(info)) return;
  const std::uint64_t bytes = snapshot_bytes(info);
  MutexLock lock(mutex_);
  Chunk& chunk = chunks_[info.id];
  chunk.parent = info.parent;
  chunk.end = info.first_position + info.tokens.size();
  const std::uint64_t had = std::exchange(chunk.bytes, bytes);
  bytes_ += bytes - had;
  if (bytes > had) chunk.used_ns = env_.wall_ns();
  if (bytes > 0 && had == 0) link(info.id);
  if (bytes == 0 && had > 0) unlink(info.id);
}

void Snapshots::erase(const ChunkId& id) {
  if (!enabled()) return;
  MutexLock lock(mutex_);
  const Chunk* chunk = find(id);
  if (chunk == nullptr) return;
  bytes_ -= chunk->bytes;
  if (chunk->bytes > 0) unlink(id);
  chunks_.erase(id);
}

void Snapshots::use(std::span<const ChunkId> chunks) {
  if (!enabled()) return;
  const std::int64_t now = env_.wall_ns();
  MutexLock lock(mutex_);
  for (const ChunkId& id : chunks) {
    const auto found = chunks_.find(id);
    if (found != chunks_.end()) found->second.used_ns = now;
  }
}

std::vector<ChunkId> Snapshots::choose(std::uint64_t excess,
                                       const std::function<bool(const ChunkId&)>& may_go) const {
  std::vector<ChunkId> ids;
  std::vector<policy::SavedSnapshot> snapshots;
  {
    MutexLock lock(mutex_);
    ids.assign(with_snapshot_.begin(), with_snapshot_.end());
    std::unordered_map<ChunkId, std::size_t> index;
    for (std::size_t i = 0; i < ids.size(); ++i) index.emplace(ids[i], i);
    for (const ChunkId& id : ids) {
      const Chunk& chunk = chunks_.at(id);
      const auto before = index.find(chunk.before);
      snapshots.push_back(
          {.before = before == index.end() ? policy::SavedSnapshot::kNone : before->second,
           .tokens = static_cast<std::int64_t>(chunk.end),
           .bytes = chunk.bytes,
           .last_use_s = static_cast<double>(chunk.used_ns) * 1e-9});
    }
  }
  for (std::size_t i = 0; i < ids.size(); ++i) snapshots[i].may_go = may_go(ids[i]);
  const double now_s = static_cast<double>(env_.wall_ns()) * 1e-9;
  std::vector<ChunkId> out;
  for (const std::size_t i : policy::snapshots_to_drop(snapshots, excess, now_s)) {
    out.push_back(ids[i]);
  }
  return out;
}

Status Snapshots::check(std::span<const ChunkRecord> chunks) const {
  if (!enabled()) return {};
  MutexLock lock(mutex_);
  std::uint64_t bytes = 0;
  std::size_t count = 0;
  for (const ChunkRecord& record : chunks) {
    const std::uint64_t its = snapshot_bytes(record.info);
    if (its == 0) continue;
    bytes += its;
    ++count;
    const Chunk* chunk = find(record.info.id);
    if (chunk == nullptr || chunk->bytes != its || chunk->before != last_before(*chunk)) {
      return internal_error(
          fmt::format("the snapshot of chunk {} is not counted right", to_hex(record.info.id)));
    }
  }
  if (bytes != bytes_ || count != with_snapshot_.size()) {
    return internal_error(fmt::format("{} snapshots have {} bytes, counted are {} of {}", count,
                                      bytes, with_snapshot_.size(), bytes_));
  }
  return {};
}

}  // namespace hcache::store
