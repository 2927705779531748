#include "chunk_worth.h"

#include <cstring>

namespace hcache::store {

policy::Worth worth_of(const ChunkInfo& info, const std::optional<policy::TierCosts>& costs) {
  if (!costs) return {};
  policy::SavedRows saved;
  saved.first = static_cast<std::int64_t>(info.first_position);
  saved.rows = static_cast<std::int64_t>(info.tokens.size());
  double bytes = 0;
  for (std::size_t i = 0; i < info.pages.size(); ++i) {
    bytes += info.pages[i].bytes;
    if (info.pages[i].encoding == Encoding::kChosen) continue;  // no rows
    // Of a layer that is saved both ways a restore reads one: K and V, which come last.
    const bool last = i + 1 == info.pages.size() ||
                      info.pages[i + 1].layer != info.pages[i].layer ||
                      info.pages[i + 1].encoding == Encoding::kChosen;
    if (!last) continue;
    saved.bytes += info.pages[i].bytes;
    ++(is_hidden(info.pages[i].encoding) ? saved.projected : saved.copied);
  }
  return {.bytes = bytes, .miss_s = costs->miss_s(saved)};
}

std::uint64_t short_id(const ChunkId& id) {
  std::uint64_t out = 0;
  std::memcpy(&out, id.bytes.data(), sizeof out);
  return out;
}

}  // namespace hcache::store
