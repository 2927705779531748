#include "sequences.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace hcache::engine {

Sequences::Sequences(std::vector<int> groups, int64_t n_cells)
    : group_of_layer_(std::move(groups)) {
  const int n_groups = 1 + *std::max_element(group_of_layer_.begin(), group_of_layer_.end());
  for (int i = 0; i < n_groups; ++i) groups_.push_back({ExtentAllocator(n_cells), {}});
}

SeqId Sequences::add() {
  const SeqId seq = next_++;
  lengths_[seq] = 0;
  for (Group& group : groups_) group.extents.add(seq);
  return seq;
}

void Sequences::remove(SeqId seq) {
  lengths_.erase(seq);
  compacted_.erase(seq);
  for (Group& group : groups_) {
    group.extents.remove(seq);
    group.first_pos.erase(seq);
  }
}

Status Sequences::check(SeqId seq) const {
  if (contains(seq)) return {};
  return invalid_argument(fmt::format("no sequence {}", seq));
}

int64_t Sequences::length(SeqId seq) const {
  const auto it = lengths_.find(seq);
  return it == lengths_.end() ? -1 : it->second;
}

int64_t Sequences::compacted(SeqId seq) const {
  const auto it = compacted_.find(seq);
  return it == compacted_.end() ? 0 : it->second;
}

Status Sequences::check_compacted(SeqId seq, int64_t pos) const {
  if (pos >= compacted(seq)) return {};
  return failed_precondition(
      fmt::format("the first {} tokens of sequence {} lack rows in some layers and stay as they "
                  "are; position {} is one of them",
                  compacted(seq), seq, pos));
}

Result<std::vector<Sequences::GroupMoves>> Sequences::resize(SeqId seq, int64_t n_tokens) {
  for (Group& group : groups_) {
    const int64_t wanted = std::max<int64_t>(0, n_tokens - group.first(seq));
    const int64_t more = wanted - group.extents.extent(seq).length;
    // The allocator says what is missing, and changes nothing.
    if (more > group.extents.free_cells()) return group.extents.resize(seq, wanted).status();
  }
  std::vector<GroupMoves> all;
  for (int i = 0; i < n_groups(); ++i) {
    Group& group = groups_[i];
    if (group.first(seq) > n_tokens) group.first_pos[seq] = n_tokens;
    HCACHE_ASSIGN_OR_RETURN(auto moves, group.extents.resize(seq, n_tokens - group.first(seq)));
    if (!moves.empty()) all.push_back({i, std::move(moves)});
  }
  if (!all.empty()) ++epoch_;
  return all;
}

void Sequences::drop_before(SeqId seq, int group, int64_t pos) {
  const HeldRows rows = held(seq, group);
  const int64_t n = std::clamp<int64_t>(pos - rows.first_pos, 0, rows.n_rows);
  if (n == 0) return;
  groups_[group].extents.drop_front(seq, n);
  groups_[group].first_pos[seq] = rows.first_pos + n;
  ++epoch_;
}

void Sequences::erase_positions(SeqId seq, int64_t from, int64_t to) {
  for (Group& group : groups_) {
    const auto first = group.first_pos.find(seq);
    if (first == group.first_pos.end() || first->second <= from) continue;
    first->second = first->second >= to ? first->second - (to - from) : from;
  }
}

HeldRows Sequences::held(SeqId seq, int group) const {
  const ExtentAllocator::Extent extent = groups_[group].extents.extent(seq);
  return {
      .first_pos = groups_[group].first(seq), .n_rows = extent.length, .first_cell = extent.first};
}

int64_t Sequences::free_cells() const {
  int64_t least = n_cells();
  for (const Group& group : groups_) least = std::min(least, group.extents.free_cells());
  return least;
}

}  // namespace hcache::engine
