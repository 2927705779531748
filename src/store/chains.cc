#include "chains.h"

#include <algorithm>

#include "base/log.h"
#include "base/tokens.h"

namespace hcache::store {
namespace {

// Pages of `there` that `here`, the same chunk, lacks.
void add_missing_pages(const ChunkRecord& there, ChunkRecord* here) {
  ChunkInfo& info = here->info;
  for (std::size_t i = 0; i < there.info.pages.size(); ++i) {
    const PageInfo& page = there.info.pages[i];
    if (info.find_state(page.layer, page.encoding) != nullptr) continue;
    if (is_kv(page.encoding)) {
      // All kv pages of a chunk have the same types.
      const bool other = info.k_type != ElementType::kNone &&
                         (info.k_type != there.info.k_type || info.v_type != there.info.v_type);
      if (other) continue;
      info.k_type = there.info.k_type;
      info.v_type = there.info.v_type;
    }
    const auto at = std::lower_bound(info.pages.begin(), info.pages.end(), page, page_before);
    here->places.insert(here->places.begin() + (at - info.pages.begin()), there.places[i]);
    info.pages.insert(at, page);
  }
}

// The one with the most leading tokens in common, then with the most pages; none: null.
ChunkRecord* best_of(std::vector<ChunkRecord>* siblings, const ChunkRecord& like,
                     std::span<const std::int32_t> tokens, std::uint32_t* rows) {
  ChunkRecord* best = nullptr;
  *rows = 0;
  for (ChunkRecord& sibling : *siblings) {
    if (!same_family(sibling.info, like.info)) continue;
    const auto n = static_cast<std::uint32_t>(common_prefix(sibling.info.tokens, tokens));
    if (n > *rows ||
        (n == *rows && best != nullptr && sibling.info.pages.size() > best->info.pages.size())) {
      best = &sibling;
      *rows = n;
    }
  }
  return *rows > 0 ? best : nullptr;
}

}  // namespace

Result<std::optional<ChunkRecord>> Chains::find(const ChunkId& id, Where where) {
  auto found = catalog_.find(id);
  if (remote_ == nullptr || where == Where::kDisks) return found;
  if (!found.ok() && found.code() != Code::kDataLoss) return found;
  std::optional<ChunkRecord> there = remote_->find(id);
  if (!there.has_value()) return found;
  if (!found.ok() || !found->has_value()) return there;
  add_missing_pages(*there, &**found);
  return found;
}

Result<std::vector<ChunkRecord>> Chains::siblings(const ChunkId& key, std::int32_t first_token,
                                                  Where where) {
  HCACHE_ASSIGN_OR_RETURN(auto out, catalog_.children(key, first_token));
  if (remote_ == nullptr || where == Where::kDisks) return out;
  for (ChunkRecord& there : remote_->children(key, first_token)) {
    const auto here = std::find_if(
        out.begin(), out.end(), [&](const ChunkRecord& s) { return s.info.id == there.info.id; });
    if (here == out.end()) {
      out.push_back(std::move(there));
    } else {
      add_missing_pages(there, &*here);
    }
  }
  return out;
}

Result<Chain> Chains::walk(const ChainFingerprints& fingerprints, const SaltId& salt,
                           std::span<const std::int32_t> tokens, Where where) {
  Chain chain;
  ChunkRecord like;  // what the next chunk has in common with its siblings
  like.info.salt = salt;
  ChunkId& parent = like.info.parent;
  while (!tokens.empty()) {
    const Fingerprint& fingerprint = fingerprints.at(chain.chunks.size() * kChunkTokens);
    like.info.fingerprint = fingerprint;
    if (tokens.size() >= kChunkTokens) {
      const auto wanted = tokens.first(kChunkTokens);
      auto found = find(chunk_id(fingerprint, salt, parent, wanted), where);
      if (!found.ok() && found.code() != Code::kDataLoss) return found.status();
      if (!found.ok()) log::warn("{}", found.status().to_string());
      if (found.ok() && found->has_value() && same_family((*found)->info, like.info) &&
          common_prefix((*found)->info.tokens, wanted) == kChunkTokens) {
        parent = (*found)->info.id;
        chain.chunks.push_back(std::move(**found));
        chain.rows.push_back(kChunkTokens);
        tokens = tokens.subspan(kChunkTokens);
        continue;
      }
    }
    auto family = siblings(sibling_key(fingerprint, salt, parent), tokens[0], where);
    if (!family.ok()) {
      if (family.code() != Code::kDataLoss) return family.status();
      log::warn("{}", family.status().to_string());
      break;
    }
    std::uint32_t rows = 0;
    if (ChunkRecord* best = best_of(&*family, like, tokens, &rows); best != nullptr) {
      chain.chunks.push_back(std::move(*best));
      chain.rows.push_back(rows);
    }
    break;
  }
  return chain;
}

void Chains::look_up_remote(const ChainFingerprints& fingerprints, const SaltId& salt,
                            std::span<const std::int32_t> tokens) {
  if (remote_ == nullptr) return;
  const auto chain = walk(fingerprints, salt, tokens, Where::kDisks);
  if (!chain.ok()) return;
  // Up to the first chunk that has fewer pages than another the disks have it all.
  std::size_t most = 0;
  for (const ChunkRecord& record : chain->chunks) most = std::max(most, record.info.pages.size());
  ChunkId parent;
  std::size_t at = 0;
  std::size_t have_tail = 0;
  for (std::size_t i = 0; i < chain->chunks.size(); ++i) {
    const ChunkInfo& info = chain->chunks[i].info;
    if (info.pages.empty() || info.pages.size() < most) break;
    if (chain->rows[i] < kChunkTokens) {
      have_tail = chain->rows[i];
      break;
    }
    parent = info.id;
    at += kChunkTokens;
  }
  if (at + have_tail < tokens.size()) {
    remote_->look_up(fingerprints, salt, parent, tokens, at, have_tail);
  }
}

}  // namespace hcache::store
