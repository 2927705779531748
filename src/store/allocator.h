// Free space of one disk's segment files, in blocks of kBlock bytes.
//
// Pages are packed, so neighbours may share a block: a block is free when no page touches it. All
// segments span the full segment size from the start (files are sparse), so the space after the
// last page is a free range like any other. One byte of memory per block.
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <vector>

#include "base/status.h"
#include "format.h"

namespace hcache::store {

struct Extent {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;  // bytes, a multiple of kBlock
  std::uint64_t bytes = 0;   // a multiple of kBlock
};

class Allocator {
 public:
  explicit Allocator(std::uint64_t segment_bytes);

  // Bytes that one extent can have at most.
  [[nodiscard]] std::uint64_t max_extent_bytes() const {
    return (segment_blocks_ - kHeaderBlocks) * kBlock;
  }

  // The smallest free range that holds `bytes` (rounded up to blocks), in a new segment if there is
  // none (*new_segment is then true). The blocks are reserved until commit() or cancel().
  // bytes must be 1 … max_extent_bytes().
  [[nodiscard]] Extent reserve(std::uint64_t bytes, bool* new_segment);
  void cancel(const Extent& extent);

  // Counts a page's use of its blocks. False if the range lies outside of any possible segment.
  [[nodiscard]] bool add_page(std::uint32_t segment, std::uint64_t offset, std::uint64_t bytes);
  // Ends it, and appends the ranges that have become free to `freed`.
  void remove_page(std::uint32_t segment, std::uint64_t offset, std::uint64_t bytes,
                   std::vector<Extent>* freed);

  // Makes a segment known (an existing file without live pages).
  void add_segment(std::uint32_t segment);
  void remove_segment(std::uint32_t segment);

  [[nodiscard]] std::vector<std::uint32_t> segments() const;
  [[nodiscard]] bool has_segment(std::uint32_t segment) const {
    return segments_.contains(segment);
  }
  // Blocks in use or reserved, in bytes; headers not counted.
  [[nodiscard]] std::uint64_t used_bytes() const { return used_blocks_ * kBlock; }
  [[nodiscard]] std::uint64_t used_bytes(std::uint32_t segment) const;
  // Offset after the last block in use (the header counts as used).
  [[nodiscard]] std::uint64_t end_of_use(std::uint32_t segment) const;
  // Free ranges of a segment before end_of_use().
  [[nodiscard]] std::vector<Extent> holes(std::uint32_t segment) const;

 private:
  static constexpr std::uint64_t kHeaderBlocks = kSegmentHeaderBytes / kBlock;
  struct Segment {
    std::vector<std::uint8_t> users;               // per block; at most 64 pages touch one
    std::map<std::uint64_t, std::uint64_t> holes;  // start -> blocks
    std::uint64_t used = 0;                        // blocks
  };

  Segment& segment(std::uint32_t number);
  void take(std::uint32_t number, Segment& segment, std::uint64_t start, std::uint64_t blocks);
  void give(std::uint32_t number, Segment& segment, std::uint64_t start, std::uint64_t blocks);

  std::uint64_t segment_blocks_;
  std::uint64_t used_blocks_ = 0;
  std::map<std::uint32_t, Segment> segments_;
  // (blocks, segment, start) of every hole: the best fit is a lower bound.
  std::set<std::tuple<std::uint64_t, std::uint32_t, std::uint64_t>> by_size_;
};

}  // namespace hcache::store
