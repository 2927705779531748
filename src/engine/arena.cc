#include "arena.h"

#include <fmt/format.h>

#include <algorithm>

namespace hcache::engine {

void ExtentAllocator::add(int32_t id) { extents_[id] = Extent{}; }

void ExtentAllocator::remove(int32_t id) { extents_.erase(id); }

int64_t ExtentAllocator::free_cells() const {
  int64_t used = 0;
  for (const auto& [id, extent] : extents_) used += extent.length;
  return n_cells_ - used;
}

std::vector<int32_t> ExtentAllocator::by_position() const {
  std::vector<int32_t> ids;
  for (const auto& [id, extent] : extents_) {
    if (extent.length > 0) ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end(),
            [&](int32_t a, int32_t b) { return extents_.at(a).first < extents_.at(b).first; });
  return ids;
}

std::vector<ExtentAllocator::Gap> ExtentAllocator::gaps(int32_t ignored_id) const {
  std::vector<Gap> result;
  int64_t end = 0;
  bool behind = false;
  for (const int32_t id : by_position()) {
    if (id == ignored_id) continue;
    const Extent& extent = extents_.at(id);
    if (extent.first > end) result.push_back({end, extent.first - end, behind});
    end = extent.first + extent.length;
    behind = true;
  }
  if (n_cells_ > end) result.push_back({end, n_cells_ - end, behind});
  return result;
}

Result<std::vector<ExtentAllocator::Move>> ExtentAllocator::resize(int32_t id, int64_t length) {
  Extent& extent = extents_.at(id);
  if (length <= extent.length) {
    extent.length = length;
    return std::vector<Move>{};
  }
  const int64_t needed = length - extent.length;
  if (needed > free_cells()) {
    return resource_exhausted(
        fmt::format("the KV arena has {} free cells of {}, {} more are needed; release sequences "
                    "or start with a larger arena",
                    free_cells(), n_cells_, needed));
  }

  // In place, when the cells behind the extent are free.
  if (extent.length > 0) {
    int64_t next = n_cells_;
    for (const auto& [other_id, other] : extents_) {
      if (other_id != id && other.length > 0 && other.first > extent.first) {
        next = std::min(next, other.first);
      }
    }
    if (extent.first + length <= next) {
      extent.length = length;
      return std::vector<Move>{};
    }
  }

  // Into the widest gap; behind another extent only after leaving that one half of the rest.
  // Cells that this extent leaves do not count as a gap: source and target must not overlap.
  const std::vector<Gap> candidates = gaps(extent.length > 0 ? -1 : id);
  const auto widest =
      std::max_element(candidates.begin(), candidates.end(),
                       [](const Gap& a, const Gap& b) { return a.length < b.length; });
  if (widest != candidates.end() && widest->length >= length) {
    const int64_t slack = widest->length - length;
    const int64_t first = widest->first + (widest->behind_extent ? slack / 2 : 0);
    std::vector<Move> moves;
    if (extent.length > 0) moves.push_back({extent.first, first, extent.length});
    extent = {first, length};
    return moves;
  }
  return compact(id, length);
}

void ExtentAllocator::drop_front(int32_t id, int64_t n) {
  Extent& extent = extents_.at(id);
  extent.first += n;
  extent.length -= n;
}

// Slides all extents, keeping their order, so that the free cells that remain are shared evenly
// as room to grow behind each. Left moves in ascending and right moves in descending order never
// overwrite rows that have yet to move.
std::vector<ExtentAllocator::Move> ExtentAllocator::compact(int32_t id, int64_t length) {
  std::vector<int32_t> order = by_position();
  if (extents_.at(id).length == 0) order.push_back(id);
  const int64_t rest = free_cells() - (length - extents_.at(id).length);
  const int64_t share = rest / static_cast<int64_t>(order.size());

  std::vector<Move> left;
  std::vector<Move> right;
  int64_t cursor = 0;
  for (const int32_t other : order) {
    Extent& extent = extents_.at(other);
    if (extent.length > 0 && cursor < extent.first)
      left.push_back({extent.first, cursor, extent.length});
    if (extent.length > 0 && cursor > extent.first)
      right.push_back({extent.first, cursor, extent.length});
    extent.first = cursor;
    if (other == id) extent.length = length;
    cursor += extent.length + share;
  }
  std::reverse(right.begin(), right.end());
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

bool ExtentAllocator::check_integrity() const {
  int64_t end = 0;
  for (const int32_t id : by_position()) {
    const Extent& extent = extents_.at(id);
    if (extent.first < end) return false;
    end = extent.first + extent.length;
  }
  return end <= n_cells_;
}

}  // namespace hcache::engine
