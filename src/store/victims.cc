#include "victims.h"

#include <optional>
#include <unordered_map>

namespace hcache::store {

Status least_recently_used(Catalog::Transaction& transaction, const VictimQuery& query,
                           Victims* victims) {
  std::unordered_map<ChunkId, std::int64_t> going;  // of the followers of each
  Status climbed;
  const Status visited = transaction.leaves_by_use([&](ChunkRow&& row) {
    if (!row.record.ok()) {
      victims->damaged_rows.push_back(row.seq);
      return true;
    }
    std::optional<ChunkRow> next = std::move(row);
    while (next && victims->bytes < query.bytes && query.may_go(*next)) {
      const std::int64_t used = next->last_used_ns;
      const ChunkId parent = next->record->info.parent;
      victims->bytes += page_bytes(*next->record);
      victims->chunks.push_back(std::move(*next->record));
      next.reset();
      if (parent.is_zero()) break;
      auto found_parent = transaction.followed_by(parent, ++going[parent]);
      if (!found_parent.ok()) {
        climbed = found_parent.status();
        return false;
      }
      next = std::move(*found_parent);
      if (next && (!next->record.ok() || next->last_used_ns > used)) next.reset();
    }
    return victims->bytes < query.bytes;
  });
  return visited.ok() ? climbed : visited;
}

}  // namespace hcache::store
