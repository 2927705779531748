#include "allocator.h"

#include <algorithm>

namespace hcache::store {
namespace {
// No file of ours is larger, whatever segment size it was written with.
constexpr std::uint64_t kMaxSegmentBlocks = (std::uint64_t{1} << 38) / kBlock;
}  // namespace

Allocator::Allocator(std::uint64_t segment_bytes)
    : segment_blocks_(std::max<std::uint64_t>(segment_bytes / kBlock, kHeaderBlocks + 1)) {}

Allocator::Segment& Allocator::segment(std::uint32_t number) {
  const auto [at, fresh] = segments_.try_emplace(number);
  if (fresh) {
    at->second.users.assign(segment_blocks_, 0);
    give(number, at->second, kHeaderBlocks, segment_blocks_ - kHeaderBlocks);
  }
  return at->second;
}

void Allocator::add_segment(std::uint32_t number) { segment(number); }

void Allocator::remove_segment(std::uint32_t number) {
  const auto at = segments_.find(number);
  if (at == segments_.end()) return;
  for (const auto& [start, blocks] : at->second.holes) by_size_.erase({blocks, number, start});
  used_blocks_ -= at->second.used;
  segments_.erase(at);
}

// Removes [start, start + blocks) from the hole that contains it.
void Allocator::take(std::uint32_t number, Segment& segment, std::uint64_t start,
                     std::uint64_t blocks) {
  auto hole = std::prev(segment.holes.upper_bound(start));
  const std::uint64_t hole_start = hole->first;
  const std::uint64_t hole_blocks = hole->second;
  by_size_.erase({hole_blocks, number, hole_start});
  segment.holes.erase(hole);
  auto put_back = [&](std::uint64_t s, std::uint64_t n) {
    if (n == 0) return;
    segment.holes.emplace(s, n);
    by_size_.emplace(n, number, s);
  };
  put_back(hole_start, start - hole_start);
  put_back(start + blocks, hole_start + hole_blocks - start - blocks);
}

// Adds a free range, joined with its free neighbours.
void Allocator::give(std::uint32_t number, Segment& segment, std::uint64_t start,
                     std::uint64_t blocks) {
  auto next = segment.holes.lower_bound(start);
  if (next != segment.holes.end() && next->first == start + blocks) {
    blocks += next->second;
    by_size_.erase({next->second, number, next->first});
    next = segment.holes.erase(next);
  }
  if (next != segment.holes.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == start) {
      by_size_.erase({before->second, number, before->first});
      start = before->first;
      blocks += before->second;
      segment.holes.erase(before);
    }
  }
  segment.holes.emplace(start, blocks);
  by_size_.emplace(blocks, number, start);
}

Extent Allocator::reserve(std::uint64_t bytes, bool* new_segment) {
  const std::uint64_t blocks = round_up(bytes, kBlock) / kBlock;
  auto fit = by_size_.lower_bound({blocks, 0, 0});
  *new_segment = fit == by_size_.end();
  if (*new_segment) {
    std::uint32_t number = 1;
    for (const auto& [taken, unused] : segments_) {
      if (taken != number) break;
      ++number;
    }
    segment(number);
    fit = by_size_.lower_bound({blocks, 0, 0});
  }
  if (fit == by_size_.end()) die("Allocator::reserve of more than max_extent_bytes()");
  const auto [unused, number, start] = *fit;
  Segment& s = segments_.at(number);
  take(number, s, start, blocks);
  for (std::uint64_t b = start; b < start + blocks; ++b) s.users[b] = 1;
  s.used += blocks;
  used_blocks_ += blocks;
  return {number, start * kBlock, blocks * kBlock};
}

void Allocator::cancel(const Extent& extent) {
  std::vector<Extent> freed;
  remove_page(extent.segment, extent.offset, extent.bytes, &freed);
}

bool Allocator::add_page(std::uint32_t number, std::uint64_t offset, std::uint64_t bytes) {
  const std::uint64_t first = offset / kBlock;
  const std::uint64_t last = (offset + bytes - 1) / kBlock;
  if (number == 0 || bytes == 0 || first < kHeaderBlocks || last >= kMaxSegmentBlocks) return false;
  Segment& s = segment(number);
  if (last >= s.users.size()) {  // written with a larger segment size
    const std::uint64_t old = s.users.size();
    s.users.resize(last + 1, 0);
    give(number, s, old, last + 1 - old);
  }
  for (std::uint64_t b = first; b <= last; ++b) {
    if (s.users[b] == 0) {
      take(number, s, b, 1);
      ++s.used;
      ++used_blocks_;
    }
    if (s.users[b] < 0xff) ++s.users[b];
  }
  return true;
}

void Allocator::remove_page(std::uint32_t number, std::uint64_t offset, std::uint64_t bytes,
                            std::vector<Extent>* freed) {
  Segment& s = segment(number);
  const std::uint64_t first = offset / kBlock;
  const std::uint64_t last = (offset + bytes - 1) / kBlock;
  std::uint64_t run_start = 0;
  std::uint64_t run = 0;
  auto end_run = [&] {
    if (run == 0) return;
    give(number, s, run_start, run);
    s.used -= run;
    used_blocks_ -= run;
    freed->push_back({number, run_start * kBlock, run * kBlock});
    run = 0;
  };
  for (std::uint64_t b = first; b <= last && b < s.users.size(); ++b) {
    if (s.users[b] > 0 && --s.users[b] == 0) {
      if (run == 0) run_start = b;
      ++run;
    } else {
      end_run();
    }
  }
  end_run();
}

std::vector<std::uint32_t> Allocator::segments() const {
  std::vector<std::uint32_t> out;
  for (const auto& [number, unused] : segments_) out.push_back(number);
  return out;
}

std::uint64_t Allocator::used_bytes(std::uint32_t number) const {
  const auto at = segments_.find(number);
  return at == segments_.end() ? 0 : at->second.used * kBlock;
}

std::uint64_t Allocator::end_of_use(std::uint32_t number) const {
  const auto at = segments_.find(number);
  if (at == segments_.end()) return kSegmentHeaderBytes;
  const Segment& s = at->second;
  if (!s.holes.empty()) {
    const auto& [start, blocks] = *s.holes.rbegin();
    if (start + blocks == s.users.size()) return start * kBlock;
  }
  return s.users.size() * kBlock;
}

std::vector<Extent> Allocator::holes(std::uint32_t number) const {
  std::vector<Extent> out;
  const auto at = segments_.find(number);
  if (at == segments_.end()) return out;
  const std::uint64_t end = end_of_use(number);
  for (const auto& [start, blocks] : at->second.holes) {
    if (start * kBlock < end) out.push_back({number, start * kBlock, blocks * kBlock});
  }
  return out;
}

}  // namespace hcache::store
