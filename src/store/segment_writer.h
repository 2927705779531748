// Writes the pages of a batch into segment files: layer first, in large requests, synced.
//
// Threading: one thread at a time (the store's writer).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/env.h"
#include "put_draft.h"
#include "segments.h"
#include "space.h"

namespace hcache::store {

// One contiguous write.
struct Run {
  struct Page {
    Draft* draft = nullptr;
    std::size_t page = 0;  // of the draft's record
    std::uint64_t at = 0;  // its offset inside the run
  };
  DiskExtent extent;  // its disk from the start, the rest once it is reserved
  std::vector<Page> pages;
  std::uint64_t bytes = 0;
  bool reserved = false;
};

class SegmentWriter {
 public:
  SegmentWriter(Env& env, Segments& segments, Space& space)
      : env_(env), segments_(segments), space_(space) {}

  // Cuts what the drafts have to write into runs. The drafts must stay where they are.
  [[nodiscard]] std::vector<Run> lay_out(std::vector<Draft>* chunks) const;
  // Reserves space, fills in the pages' places, writes and syncs. On failure nothing stays
  // reserved.
  [[nodiscard]] Status write(std::vector<Run>* runs);
  // After the commit: reservations become the pages' own use of their blocks.
  void settle(std::vector<Run>* runs);
  // After a commit that failed.
  void abandon(std::vector<Run>* runs, const Status& why);

 private:
  [[nodiscard]] Status write_runs(std::vector<Run>* runs);
  [[nodiscard]] Result<std::shared_ptr<File>> file_for(std::uint32_t disk, std::uint32_t segment,
                                                       bool fresh);
  // Valid until the next call.
  [[nodiscard]] const std::byte* sealed(const Run::Page& page, std::span<const std::byte> source);
  void cancel(std::vector<Run>* runs);

  Env& env_;
  Segments& segments_;
  Space& space_;
  std::unique_ptr<IoQueue> queue_;
  AlignedBuffer buffer_;
  std::vector<std::byte> sealed_;  // a page
};

}  // namespace hcache::store
