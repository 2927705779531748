#include "tier_copies.h"

#include <cstring>
#include <optional>

namespace hcache::store {

void TierCopies::put(const PutDraft& draft, Source source) {
  const bool remote =
      remote_ != nullptr && remote_->writes() == RemoteWrite::kThrough && source != Source::kRemote;
  if (!cache_.enabled() && !remote) return;
  for (const Draft& chunk : draft.chunks) {
    const ChunkInfo& info = chunk.record.info;
    TierWrite write;
    for (std::size_t i = 0; i < chunk.sources.size(); ++i) {
      const std::span<const std::byte> bytes = chunk.sources[i];
      if (bytes.empty()) continue;  // was there already
      const PageInfo& page = info.pages[i];
      const std::uint64_t checksum = chunk.record.places[i].checksum;
      if (cache_.enabled()) {
        cache_.insert({info.id, page.layer, page.encoding, checksum}, info, bytes);
      }
      if (!remote) continue;
      auto copy = std::make_shared<AlignedBuffer>(bytes.size());
      std::memcpy(copy->data(), bytes.data(), bytes.size());
      write.pages.push_back({page, checksum, std::move(copy)});
    }
    if (!remote) continue;
    write.info = info;
    remote_->write(std::move(write));
  }
  if (!remote || draft.superseded.empty()) return;
  std::vector<ChunkId> tails;
  for (const ChunkRecord& tail : draft.superseded) tails.push_back(tail.info.id);
  remote_->supersede(tails);
}

void TierCopies::evicted(std::span<const ChunkRecord> victims) {
  if (remote_ == nullptr || remote_->writes() != RemoteWrite::kBack) return;
  for (const ChunkRecord& victim : victims) {
    const std::optional<ChunkRecord> there = remote_->find(victim.info.id);
    TierWrite write;
    for (std::size_t i = 0; i < victim.places.size(); ++i) {
      const PageInfo& page = victim.info.pages[i];
      if (there && there->info.find_state(page.layer, page.encoding) != nullptr) continue;
      auto bytes = segments_.read_page(victim, i);
      if (bytes) write.pages.push_back({page, victim.places[i].checksum, std::move(bytes)});
    }
    if (write.pages.empty()) continue;
    write.info = victim.info;
    remote_->write(std::move(write));
  }
}

}  // namespace hcache::store
