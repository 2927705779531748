#include "remote.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace hcache::store {
namespace {

// Of about 1.5 KiB each.
constexpr std::size_t kMaxChunks = 16384;
constexpr std::uint64_t kMaxKeptBytes = 256ULL << 20;

}  // namespace

// ---- The directory ------------------------------------------------------------------------------

void Remote::look_up(const ChainFingerprints& fingerprints, const SaltId& salt,
                     const ChunkId& parent, std::span<const std::int32_t> tokens, std::size_t at,
                     std::size_t have_tail) {
  const std::int64_t deadline_ns =
      env_.monotonic_ns() + static_cast<std::int64_t>(options_.timeout_s * 1e9);
  // Whole chunks, all at once: their ids need no answer.
  std::vector<ChunkId> ids;
  ChunkId last = parent;
  for (std::size_t next = at; next + kChunkTokens <= tokens.size(); next += kChunkTokens) {
    last = chunk_id(fingerprints.at(next), salt, last, tokens.subspan(next, kChunkTokens));
    ids.push_back(last);
  }
  std::vector<ChunkId> used;
  const auto fits = [&](const std::optional<ChunkRecord>& record, const ChunkId& before,
                        std::size_t place) {
    return record.has_value() && record->info.parent == before &&
           record->info.fingerprint == fingerprints.at(place) && record->info.salt == salt;
  };
  last = parent;
  if (!ids.empty()) {
    auto found = ask(ids, deadline_ns);
    if (!found) return;
    // Chunks between that are missing may be on the disks, as where snapshots alone were evicted.
    const std::size_t begin = at;
    for (std::size_t i = 0; i < found->size() && i < ids.size(); ++i) {
      const std::size_t next = begin + i * kChunkTokens;
      if (!fits((*found)[i], i == 0 ? parent : ids[i - 1], next)) continue;
      last = ids[i];
      at = next + kChunkTokens;
      used.push_back(last);
      add(std::move(*(*found)[i]));
    }
  }
  // Behind them a partial one, of any length.
  if (!used.empty()) have_tail = 0;
  tokens = tokens.subspan(at);
  ids.clear();
  const std::size_t longest = std::min<std::size_t>(tokens.size(), kChunkTokens - 1);
  for (std::size_t n = longest; n > have_tail; --n) {
    ids.push_back(chunk_id(fingerprints.at(at), salt, last, tokens.first(n)));
  }
  if (!ids.empty()) {
    auto found = ask(std::move(ids), deadline_ns);
    if (!found) return;
    for (std::optional<ChunkRecord>& record : *found) {
      if (!fits(record, last, at)) continue;
      used.push_back(record->info.id);
      add(std::move(*record));
      break;
    }
  }
  tier_->touch(used);
  MutexLock lock(mutex_);
  found_ += used.size();
}

std::optional<std::vector<std::optional<ChunkRecord>>> Remote::ask(std::vector<ChunkId> ids,
                                                                   std::int64_t deadline_ns) {
  using Answer = Result<std::vector<std::optional<ChunkRecord>>>;
  struct Wait {
    Mutex mutex;
    CondVar come;
    std::optional<Answer> answer HCACHE_GUARDED_BY(mutex);
  };
  const auto wait = std::make_shared<Wait>();
  tier_->find(std::move(ids), deadline_ns, [wait](Answer answer) {
    MutexLock lock(wait->mutex);
    wait->answer = std::move(answer);
    wait->come.notify_all();
  });
  MutexLock lock(wait->mutex);
  while (!wait->answer) wait->come.wait(wait->mutex);  // by its deadline it calls back
  if (wait->answer->ok()) return std::move(**wait->answer);
  log::debug("the remote store was not searched: {}", wait->answer->status().to_string());
  return std::nullopt;
}

void Remote::add(ChunkRecord record) {
  MutexLock lock(mutex_);
  const ChunkId id = record.info.id;
  drop(id);
  while (chunks_.size() >= kMaxChunks) {
    const ChunkId oldest = order_.front();
    order_.pop_front();
    drop(oldest);
  }
  const ChunkInfo& info = record.info;
  children_[sibling_key(info.fingerprint, info.salt, info.parent)].push_back(id);
  chunks_.emplace(id, std::move(record));
  order_.push_back(id);
  if (order_.size() > 2 * kMaxChunks) {
    std::erase_if(
        order_, [&](const ChunkId& old) HCACHE_REQUIRES(mutex_) { return !chunks_.contains(old); });
  }
}

void Remote::drop(const ChunkId& id) {
  const auto at = chunks_.find(id);
  if (at == chunks_.end()) return;
  const ChunkInfo& info = at->second.info;
  const auto siblings = children_.find(sibling_key(info.fingerprint, info.salt, info.parent));
  std::erase(siblings->second, id);
  if (siblings->second.empty()) children_.erase(siblings);
  chunks_.erase(at);
}

std::optional<ChunkRecord> Remote::find(const ChunkId& id) const {
  MutexLock lock(mutex_);
  const auto at = chunks_.find(id);
  return at == chunks_.end() ? std::nullopt : std::optional(at->second);
}

std::vector<ChunkRecord> Remote::children(const ChunkId& sibling_key,
                                          std::int32_t first_token) const {
  std::vector<ChunkRecord> out;
  MutexLock lock(mutex_);
  const auto at = children_.find(sibling_key);
  if (at == children_.end()) return out;
  for (const ChunkId& id : at->second) {
    const ChunkRecord& record = chunks_.at(id);
    if (record.info.tokens[0] == first_token) out.push_back(record);
  }
  return out;
}

void Remote::page_failed(const ChunkId& id, const PageInfo& page, const Status& why) {
  MutexLock lock(mutex_);
  if (why.code() == Code::kUnavailable) {
    chunks_.clear();
    children_.clear();
    order_.clear();
    return;
  }
  if (why.code() == Code::kNotFound) return drop(id);  // evicted or expired, as a whole
  const auto at = chunks_.find(id);
  if (at == chunks_.end()) return;
  ChunkRecord& record = at->second;
  const PageInfo* found = record.info.find_page(page.layer, page.encoding);
  if (found == nullptr) return;
  const auto index = found - record.info.pages.data();
  record.info.pages.erase(record.info.pages.begin() + index);
  record.places.erase(record.places.begin() + index);
}

void Remote::erase(std::span<const ChunkId> ids) {
  {
    MutexLock lock(mutex_);
    for (const ChunkId& id : ids) drop(id);
    // What was read before would come back with the next put.
    kept_.clear();
    kept_at_.clear();
    kept_bytes_ = 0;
  }
  tier_->erase(ids);
}

void Remote::supersede(std::span<const ChunkId> tails) {
  {
    MutexLock lock(mutex_);
    for (const ChunkId& id : tails) {
      drop(id);
      drop_kept(id);
    }
  }
  tier_->erase(tails);
}

// ---- Pages --------------------------------------------------------------------------------------

TierWrite* Remote::kept(const ChunkRecord& record) {
  if (kept_.size() >= kMaxChunks && !kept_at_.contains(record.info.id)) return nullptr;
  const auto [at, is_new] = kept_at_.try_emplace(record.info.id, kept_.size());
  if (is_new) {
    kept_.emplace_back();
    kept_.back().info = record.info;
  }
  return &kept_[at->second];
}

void Remote::drop_kept(const ChunkId& id) {
  const auto at = kept_at_.find(id);
  if (at == kept_at_.end()) return;
  const std::size_t index = at->second;
  for (const TierPage& page : kept_[index].pages) kept_bytes_ -= page.info.bytes;
  kept_at_.erase(at);
  if (index + 1 < kept_.size()) {
    kept_[index] = std::move(kept_.back());
    kept_at_[kept_[index].info.id] = index;
  }
  kept_.pop_back();
}

void Remote::keep(const ChunkRecord& record) {
  MutexLock lock(mutex_);
  (void)kept(record);  // without its pages it is enough too
}

void Remote::keep(const ChunkRecord& record, const TierPage& page) {
  MutexLock lock(mutex_);
  if (kept_bytes_ + page.info.bytes > kMaxKeptBytes) return;
  TierWrite* chunk = kept(record);
  if (chunk == nullptr) return;
  const bool has =
      std::any_of(chunk->pages.begin(), chunk->pages.end(), [&](const TierPage& other) {
        return other.info.layer == page.info.layer && other.info.encoding == page.info.encoding;
      });
  if (has) return;
  chunk->pages.push_back(page);
  kept_bytes_ += page.info.bytes;
}

std::vector<TierWrite> Remote::take_kept() {
  MutexLock lock(mutex_);
  kept_at_.clear();
  kept_bytes_ = 0;
  std::vector<TierWrite> out = std::exchange(kept_, {});
  std::stable_sort(out.begin(), out.end(), [](const TierWrite& a, const TierWrite& b) {
    return a.info.first_position < b.info.first_position;
  });
  return out;
}

void Remote::count_promoted(std::uint64_t pages) {
  MutexLock lock(mutex_);
  promoted_ += pages;
}

RemoteStat Remote::stat() const {
  RemoteStat stat = tier_->stat();
  MutexLock lock(mutex_);
  stat.chunks_found = found_;
  stat.pages_promoted = promoted_;
  return stat;
}

}  // namespace hcache::store
