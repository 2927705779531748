#include "put_draft.h"

#include <fmt/format.h>

#include <algorithm>

namespace hcache::store {
namespace {

Status check_write(const ChunkWrite& write, std::uint64_t max_page_bytes) {
  auto bad = [&](const std::string& why) {
    return invalid_argument(fmt::format("chunk {}: {}", to_hex(write.id), why));
  };
  const std::size_t n = write.tokens.size();
  if (n == 0 || n > kChunkTokens) return bad(fmt::format("{} tokens", n));
  if (chunk_id(write.fingerprint, write.salt, write.parent, write.tokens) != write.id) {
    return bad("the id is not the hash of its content");
  }
  for (const PageWrite& page : write.pages) {
    const std::size_t bytes = page.bytes.size();
    if (!valid_encoding(static_cast<std::uint8_t>(page.encoding))) return bad("unknown encoding");
    if (bytes == 0 || bytes > max_page_bytes || bytes % n != 0) {
      return bad(fmt::format("a page of {} bytes for {} tokens (at most {} bytes)", bytes, n,
                             max_page_bytes));
    }
    if (is_kv(page.encoding) &&
        (write.k_type == ElementType::kNone || write.v_type == ElementType::kNone)) {
      return bad("kv pages without types");
    }
  }
  return {};
}

// Adds the pages that the chunk lacks, each in its place. `wanted` gets all pages of the write.
Status add_pages(const ChunkWrite& write, Draft* chunk, std::vector<PageInfo>* wanted) {
  struct Entry {
    PageInfo info;
    PagePlace place;
    std::span<const std::byte> source;
  };
  ChunkInfo& info = chunk->record.info;
  std::vector<Entry> entries;
  for (std::size_t i = 0; i < info.pages.size(); ++i) {
    entries.push_back({info.pages[i], chunk->record.places[i], {}});
  }
  for (const PageWrite& page : write.pages) {
    const PageInfo page_info{page.layer, page.encoding,
                             static_cast<std::uint32_t>(page.bytes.size())};
    wanted->push_back(page_info);
    if (is_kv(page.encoding)) {
      const bool kv_before = info.k_type != ElementType::kNone;
      if (kv_before && (info.k_type != write.k_type || info.v_type != write.v_type)) {
        return invalid_argument(
            fmt::format("chunk {}: kv pages of other types are stored already", to_hex(write.id)));
      }
      info.k_type = write.k_type;
      info.v_type = write.v_type;
    }
    if (chunk->exists && info.find_state(page.layer, page.encoding) != nullptr) continue;
    entries.push_back({page_info, {}, page.bytes});
  }
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return page_before(a.info, b.info); });
  for (std::size_t i = 1; i < entries.size(); ++i) {
    if (!page_before(entries[i - 1].info, entries[i].info)) {
      return invalid_argument(fmt::format("chunk {}: layer {} {} is given twice", to_hex(write.id),
                                          entries[i].info.layer,
                                          encoding_name(entries[i].info.encoding)));
    }
  }
  info.pages.clear();
  chunk->record.places.clear();
  for (const Entry& entry : entries) {
    info.pages.push_back(entry.info);
    chunk->record.places.push_back(entry.place);
    chunk->sources.push_back(entry.source);
  }
  return {};
}

}  // namespace

std::uint64_t new_bytes(const Draft& draft) {
  std::uint64_t sum = 0;
  for (const std::span<const std::byte> source : draft.sources) sum += source.size();
  return sum;
}

bool covers(const ChunkInfo& have, std::span<const PageInfo> wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const PageInfo& page) {
    return have.find_state(page.layer, page.encoding) != nullptr;
  });
}

bool starts_with(std::span<const std::int32_t> tokens, std::span<const std::int32_t> prefix) {
  return prefix.size() <= tokens.size() && std::equal(prefix.begin(), prefix.end(), tokens.begin());
}

Result<PutDraft> PutDrafter::draft(std::span<const ChunkWrite> batch) {
  for (const ChunkWrite& write : batch) HCACHE_RETURN_IF_ERROR(add(write));
  std::vector<Draft> kept;
  for (std::size_t i = 0; i < draft_.chunks.size(); ++i) {
    if (!dropped_[i]) kept.push_back(std::move(draft_.chunks[i]));
  }
  draft_.chunks = std::move(kept);
  return std::move(draft_);
}

Status PutDrafter::add(const ChunkWrite& write) {
  HCACHE_RETURN_IF_ERROR(check_write(write, max_page_bytes_));
  Draft chunk;
  ChunkInfo& info = chunk.record.info;
  auto found = catalog_.find(write.id);
  // A damaged row counts as none; the insertion replaces it.
  if (!found.ok() && found.code() != Code::kDataLoss) return found.status();
  chunk.exists = found.ok() && found->has_value();
  if (index_.contains(write.id)) {
    return invalid_argument(fmt::format("chunk {} is twice in a batch", to_hex(write.id)));
  }
  if (chunk.exists) {
    chunk.record = std::move(**found);
    draft_.keep.insert(write.id);
    draft_.used.push_back(write.id);
  } else {
    info.id = write.id;
    info.parent = write.parent;
    info.fingerprint = write.fingerprint;
    info.salt = write.salt;
    info.first_position = write.first_position;
    info.tokens.assign(write.tokens.begin(), write.tokens.end());
  }
  std::vector<PageInfo> wanted;
  const std::size_t had = info.pages.size();
  HCACHE_RETURN_IF_ERROR(add_pages(write, &chunk, &wanted));
  if (!chunk.exists) return add_new(write, std::move(chunk), wanted);
  if (info.pages.size() == had) {
    ++draft_.report.chunks_known;
    return {};
  }
  ++draft_.report.chunks_extended;
  std::erase_if(draft_.superseded,
                [&](const ChunkRecord& tail) { return tail.info.id == write.id; });
  index_.emplace(write.id, draft_.chunks.size());
  draft_.chunks.push_back(std::move(chunk));
  dropped_.push_back(false);
  return {};
}

Status PutDrafter::add_new(const ChunkWrite& write, Draft chunk, std::span<const PageInfo> wanted) {
  HCACHE_ASSIGN_OR_RETURN(const bool reachable, has_parent(write.parent));
  if (!reachable) {
    ++draft_.report.chunks_without_parent;
    return {};
  }
  std::vector<ChunkRecord> shorter;
  HCACHE_ASSIGN_OR_RETURN(const bool known, settle_siblings(chunk.record.info, wanted, &shorter));
  if (known) {
    ++draft_.report.chunks_known;
    return {};
  }
  for (ChunkRecord& tail : shorter) {
    // A tail that this batch adds pages to stays until the next time.
    if (index_.contains(tail.info.id) || supersedes(tail.info.id)) continue;
    draft_.superseded.push_back(std::move(tail));
  }
  ++draft_.report.chunks_new;
  index_.emplace(write.id, draft_.chunks.size());
  draft_.chunks.push_back(std::move(chunk));
  dropped_.push_back(false);
  return {};
}

bool PutDrafter::supersedes(const ChunkId& id) const {
  return std::any_of(draft_.superseded.begin(), draft_.superseded.end(),
                     [&](const ChunkRecord& tail) { return tail.info.id == id; });
}

Result<bool> PutDrafter::has_parent(const ChunkId& parent) {
  if (parent.is_zero()) return true;
  if (const auto at = index_.find(parent); at != index_.end()) {
    return draft_.chunks[at->second].record.info.tokens.size() == kChunkTokens;
  }
  const auto stored = catalog_.find(parent);
  if (!stored.ok() && stored.code() != Code::kDataLoss) return stored.status();
  const bool full =
      stored.ok() && stored->has_value() && (*stored)->info.tokens.size() == kChunkTokens;
  if (full) draft_.keep.insert(parent);
  return full;
}

Result<bool> PutDrafter::settle_siblings(const ChunkInfo& info, std::span<const PageInfo> wanted,
                                         std::vector<ChunkRecord>* shorter) {
  bool known = false;
  HCACHE_ASSIGN_OR_RETURN(
      auto stored,
      catalog_.children(sibling_key(info.fingerprint, info.salt, info.parent), info.tokens[0]));
  for (ChunkRecord& sibling : stored) {
    if (!same_family(sibling.info, info) || sibling.info.id == info.id) continue;
    if (starts_with(sibling.info.tokens, info.tokens) && covers(sibling.info, wanted)) {
      known = true;
      draft_.keep.insert(sibling.info.id);
      draft_.used.push_back(sibling.info.id);
    } else if (starts_with(info.tokens, sibling.info.tokens) && covers(info, sibling.info.pages)) {
      shorter->push_back(std::move(sibling));
    }
  }
  for (std::size_t i = 0; i < draft_.chunks.size() && !known; ++i) {
    const ChunkInfo& other = draft_.chunks[i].record.info;
    if (dropped_[i] || draft_.chunks[i].exists || !same_family(other, info)) continue;
    if (starts_with(other.tokens, info.tokens) && covers(other, wanted)) {
      known = true;
    } else if (starts_with(info.tokens, other.tokens) && covers(info, other.pages)) {
      dropped_[i] = true;
      --draft_.report.chunks_new;
      ++draft_.report.tails_superseded;
    }
  }
  return known;
}

}  // namespace hcache::store
