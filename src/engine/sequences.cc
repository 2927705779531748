#include "sequences.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "windows.h"

namespace hcache::engine {

Sequences::Sequences(std::vector<int> groups, int64_t n_tokens,
                     const std::vector<GroupOptions>& options)
    : group_of_layer_(std::move(groups)), n_tokens_(n_tokens) {
  for (const GroupOptions& o : options) {
    groups_.push_back(
        {.options = o, .extents = ExtentAllocator(o.n_cells), .first_pos = {}, .valid_from = {}});
  }
}

Sequences::Sequences(std::vector<int> groups, int64_t n_cells)
    : Sequences(groups, n_cells,
                std::vector<GroupOptions>(
                    1 + static_cast<size_t>(*std::max_element(groups.begin(), groups.end())),
                    {.n_cells = n_cells})) {}

SeqId Sequences::add() {
  const SeqId seq = next_++;
  lengths_[seq] = 0;
  for (Group& group : groups_) group.extents.add(seq);
  return seq;
}

void Sequences::remove(SeqId seq) {
  lengths_.erase(seq);
  compacted_.erase(seq);
  adapters_.erase(seq);
  for (Group& group : groups_) {
    group.extents.remove(seq);
    group.first_pos.erase(seq);
    group.valid_from.erase(seq);
  }
}

void Sequences::swap(SeqId a, SeqId b) {
  const auto exchange = [a, b](auto& of) {
    auto node_a = of.extract(a);
    auto node_b = of.extract(b);
    if (node_a) {
      node_a.key() = b;
      of.insert(std::move(node_a));
    }
    if (node_b) {
      node_b.key() = a;
      of.insert(std::move(node_b));
    }
  };
  exchange(lengths_);
  exchange(compacted_);
  exchange(adapters_);
  for (Group& group : groups_) {
    group.extents.swap(a, b);
    exchange(group.first_pos);
    exchange(group.valid_from);
  }
  ++epoch_;
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

std::span<const float> Sequences::adapters(SeqId seq) const {
  const auto it = adapters_.find(seq);
  return it == adapters_.end() ? std::span<const float>() : it->second;
}

void Sequences::set_compacted(SeqId seq, int64_t n_tokens) {
  compacted_.erase(seq);
  if (n_tokens > 0) compacted_[seq] = n_tokens;
}

Status Sequences::check_compacted(SeqId seq, int64_t pos) const {
  if (pos >= compacted(seq)) return {};
  return failed_precondition(
      fmt::format("the first {} tokens of sequence {} lack rows in some layers and stay as they "
                  "are; position {} is one of them",
                  compacted(seq), seq, pos));
}

int64_t Sequences::valid_from(SeqId seq, int group) const {
  const Group& g = groups_[group];
  const auto it = g.valid_from.find(seq);
  return it == g.valid_from.end() ? g.first(seq) : std::max(it->second, g.first(seq));
}

int64_t Sequences::shortest(SeqId seq) const {
  int64_t least = compacted(seq);
  for (int i = 0; i < n_groups(); ++i) {
    if (window(i) == 0) continue;
    // Of the next row's window all but its own must be there.
    if (const int64_t from = valid_from(seq, i); from > 0) {
      least = std::max(least, from + window(i) - 1);
    }
  }
  return least;
}

Status Sequences::check_shortest(SeqId seq, int64_t n_tokens) const {
  if (n_tokens == 0 || n_tokens >= shortest(seq)) return {};
  return failed_precondition(
      fmt::format("{} tokens of sequence {} can't be kept: layers with a window hold what the last "
                  "ones see, for {} tokens at least",
                  n_tokens, seq, shortest(seq)));
}

Status Sequences::check_window(SeqId seq, int64_t pos) const {
  for (int i = 0; i < n_groups(); ++i) {
    if (window(i) == 0) continue;
    const int64_t from = valid_from(seq, i);
    if (std::max<int64_t>(0, pos + 1 - window(i)) >= from) continue;
    return failed_precondition(fmt::format(
        "position {} of sequence {} sees {} rows, and layers with such a window hold those from {} "
        "on",
        pos, seq, window(i), from));
  }
  return {};
}

void Sequences::skip_unseen(SeqId seq, int64_t n_tokens) {
  for (int i = 0; i < n_groups(); ++i) {
    if (window(i) == 0 || groups_[i].extents.extent(seq).length > 0) continue;
    set_begin(seq, i, held_from(window(i), n_tokens), needed_from(window(i), n_tokens));
  }
}

void Sequences::drop_unseen(SeqId seq) {
  for (int i = 0; i < n_groups(); ++i) {
    if (window(i) > 0) drop_before(seq, i, held_from(window(i), length(seq)));
  }
}

void Sequences::begin_like(SeqId seq, SeqId other) {
  for (int i = 0; i < n_groups(); ++i) {
    set_begin(seq, i, groups_[i].first(other), valid_from(other, i));
  }
}

void Sequences::set_begin(SeqId seq, int group, int64_t first_pos, int64_t valid_from) {
  Group& g = groups_[group];
  g.first_pos.erase(seq);
  g.valid_from.erase(seq);
  if (first_pos > 0) g.first_pos[seq] = first_pos;
  if (valid_from > first_pos) g.valid_from[seq] = valid_from;
  ++epoch_;
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
    if (n_tokens == 0) group.valid_from.erase(seq);
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

void Sequences::erase_positions(SeqId seq, int group, int64_t from, int64_t to) {
  std::map<SeqId, int64_t>& all = groups_[group].first_pos;
  const auto first = all.find(seq);
  if (first == all.end() || first->second <= from) return;
  first->second = first->second >= to ? first->second - (to - from) : from;
}

HeldRows Sequences::held(SeqId seq, int group) const {
  const ExtentAllocator::Extent extent = groups_[group].extents.extent(seq);
  return {
      .first_pos = groups_[group].first(seq), .n_rows = extent.length, .first_cell = extent.first};
}

int64_t Sequences::free_cells() const {
  int64_t least = n_tokens_;
  for (const Group& group : groups_) {
    const int64_t free = group.extents.free_cells();
    if (group.options.window == 0 || free < group.options.most_cells) least = std::min(least, free);
  }
  return least;
}

}  // namespace hcache::engine
