// Disk space: which blocks of the segment files are in use, and giving back those that are not.
//
// Three kinds of use: pages of the catalog's chunks; extents reserved for a batch that is being
// written; and blocks that must not be reused yet (a page dropped from a chunk that is still
// pinned, an extent of a commit that failed in a way that a power cut may still undo).
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <vector>

#include "allocator.h"
#include "base/env.h"
#include "catalog.h"
#include "pins.h"
#include "segments.h"

namespace hcache::store {

struct DiskExtent {
  std::uint32_t disk = 0;
  Extent extent;
};

// Blocks of a page that its chunk has lost.
struct DroppedPage {
  ChunkId chunk;
  PagePlace place;
  std::uint32_t bytes = 0;
};

class Space {
 public:
  Space(Env& env, Segments& segments, std::uint64_t segment_bytes);

  // Makes the files on the disks known. What they hold is told by add_page.
  [[nodiscard]] Status list_segments();
  // False: it lies outside of any possible segment.
  [[nodiscard]] bool add_page(const PagePlace& place, std::uint32_t bytes);
  // Ends the chunks' use of their pages' blocks and gives the free ones back.
  void free_pages(std::span<const ChunkRecord> chunks);

  // Blocks for `bytes` on a disk, in a new segment file if need be (*new_segment is then true).
  [[nodiscard]] Extent reserve(std::uint32_t disk, std::uint64_t bytes, bool* new_segment);
  // The reservation ends: pages in it count by themselves now.
  void settle(const DiskExtent& reserved);
  // The reservation ends, and what no page uses is given back.
  void cancel(const DiskExtent& reserved);
  // A failed commit may yet turn out to have happened: the extent stays taken until a later commit
  // has succeeded and release_uncertain() is called.
  void keep_uncertain(const DiskExtent& reserved) { uncertain_.push_back(reserved); }
  void release_uncertain();

  // Frees dropped pages whose chunks are not pinned; the others wait for the next call.
  void free_when_unpinned(std::vector<DroppedPage> pages) {
    dropped_.insert(dropped_.end(), pages.begin(), pages.end());
  }
  void free_unpinned(const Pins& pins);

  // Gives what no page uses back to the file system and removes files without any. `always`: even
  // where the file system says that nothing is to be had.
  [[nodiscard]] Status reclaim(bool always, std::uint64_t* segments_removed);

  [[nodiscard]] std::uint64_t max_extent_bytes() const { return disks_[0].max_extent_bytes(); }
  // Blocks in use and the segments' headers.
  [[nodiscard]] std::uint64_t used_bytes() const;
  // Disk blocks of the segment files.
  [[nodiscard]] std::uint64_t allocated_bytes() const;
  // Segments of which less than half of what lies before the last page is in use.
  [[nodiscard]] std::vector<std::pair<std::uint32_t, std::uint32_t>> sparse_segments() const;
  // internal_error unless the blocks in use are what these chunks' pages and what waits need.
  [[nodiscard]] Status check(std::span<const ChunkRecord> chunks) const;

 private:
  // `freed` gets the blocks that are unused now.
  void free_page(const PagePlace& place, std::uint32_t bytes, std::vector<DiskExtent>* freed);
  void punch(std::vector<DiskExtent> freed);
  [[nodiscard]] Status reclaim_segment(std::uint32_t disk, std::uint32_t number, bool always,
                                       std::uint64_t* segments_removed);

  Env& env_;
  Segments& segments_;
  const std::uint64_t segment_bytes_;
  std::vector<Allocator> disks_;
  std::vector<DroppedPage> dropped_;
  std::vector<DiskExtent> uncertain_;
};

}  // namespace hcache::store
