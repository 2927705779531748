// Where a restore stands in the pages that its plan reads, device by device.
//
// Threading: the engine's thread.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "planned_pages.h"

namespace hcache::state {

// Hidden rows that wait for their projection.
struct StagedRows {
  int64_t begin = 0;
  int64_t rows = 0;
  ggml_type type = GGML_TYPE_COUNT;
};

// Layers [begin, end) of a device, and the next row to be restored of them: layer, segment of the
// layer, page of the segment, row of the page.
struct RestoreLane {
  int begin = 0;
  int end = 0;
  int layer = 0;
  size_t segment = 0;
  size_t page = 0;
  int64_t row = 0;
  StagedRows staged;
};

class RestoreLanes {
 public:
  RestoreLanes() = default;
  explicit RestoreLanes(PlannedPages pages);

  [[nodiscard]] std::vector<RestoreLane>& all() { return lanes_; }
  [[nodiscard]] size_t size() const { return lanes_.size(); }
  // The one that is at the end of a layer, or else the one whose page the reader gives next. Some
  // lane must have layers left.
  [[nodiscard]] RestoreLane& next();
  [[nodiscard]] bool at_layer_end(const RestoreLane& lane) const {
    return lane.segment == pages_.layers[static_cast<size_t>(lane.layer)].size();
  }
  static void pass_layer_end(RestoreLane& lane);
  [[nodiscard]] PlannedPage& page(const RestoreLane& lane);
  // The lane's page, which the reader has given, is through.
  void pass_page(RestoreLane& lane);
  // Turns whose pages are all through, and whether there are any others.
  [[nodiscard]] size_t turns() const { return turn_; }
  [[nodiscard]] bool has_pages() const { return turn_ < pages_.turns.size(); }
  // Leading layers whose pages are all through; and of all layers, in any place.
  [[nodiscard]] int leading_layers() const;
  [[nodiscard]] int n_done() const;

 private:
  PlannedPages pages_;
  std::vector<RestoreLane> lanes_;  // pages_'s
  size_t turn_ = 0;                 // of pages_'s, which the next page is of
  size_t passed_ = 0;               // pages of it that are through
};

}  // namespace hcache::state
