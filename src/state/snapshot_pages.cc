#include "state/snapshot_pages.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace hcache::state {
std::vector<std::byte> framed_snapshot(std::span<const std::byte> snapshot, size_t n_tokens) {
  const uint64_t length = snapshot.size();
  std::vector<std::byte> framed((kSnapshotFrame + length + n_tokens - 1) / n_tokens * n_tokens);
  std::memcpy(framed.data(), &length, kSnapshotFrame);
  std::copy(snapshot.begin(), snapshot.end(), framed.begin() + kSnapshotFrame);
  return framed;
}

std::vector<store::PageWrite> snapshot_pages(std::span<const std::byte> framed, size_t n_tokens,
                                             size_t part_bytes) {
  std::vector<store::PageWrite> pages;
  const size_t part = part_bytes / n_tokens * n_tokens;
  for (uint16_t i = 0; !framed.empty(); ++i) {
    const size_t bytes = std::min(part, framed.size());
    pages.push_back({i, store::Encoding::kSnapshot, framed.first(bytes)});
    framed = framed.subspan(bytes);
  }
  return pages;
}

size_t snapshot_parts(const store::ChunkInfo& chunk) {
  return static_cast<size_t>(std::count_if(
      chunk.pages.begin(), chunk.pages.end(),
      [](const store::PageInfo& page) { return page.encoding == store::Encoding::kSnapshot; }));
}

Result<size_t> snapshot_length(std::span<const std::byte> first_part, size_t n_bytes) {
  uint64_t length = 0;
  if (first_part.size() < sizeof(length)) return data_loss("a snapshot without its length");
  std::memcpy(&length, first_part.data(), sizeof(length));
  if (length > n_bytes - sizeof(length)) {
    return data_loss(fmt::format("a snapshot of {} bytes lacks {} of them", length,
                                 length - (n_bytes - sizeof(length))));
  }
  return static_cast<size_t>(length);
}

Result<std::vector<std::byte>> join_snapshot(std::vector<std::byte> parts) {
  HCACHE_ASSIGN_OR_RETURN(const size_t length, snapshot_length(parts, parts.size()));
  parts.erase(parts.begin(), parts.begin() + kSnapshotFrame);
  parts.resize(length);
  return parts;
}

}  // namespace hcache::state
