#include "restore_lanes.h"

#include <algorithm>
#include <utility>

namespace hcache::state {

RestoreLanes::RestoreLanes(PlannedPages pages) : pages_(std::move(pages)) {
  for (const LaneLayers& range : pages_.lanes) {
    lanes_.push_back({.begin = range.begin, .end = range.end, .layer = range.begin, .staged = {}});
  }
}

RestoreLane& RestoreLanes::next() {
  const auto at_end = std::find_if(lanes_.begin(), lanes_.end(), [&](const RestoreLane& lane) {
    return lane.layer < lane.end && at_layer_end(lane);
  });
  return at_end != lanes_.end() ? *at_end : lanes_[pages_.turns[turn_].lane];
}

void RestoreLanes::pass_layer_end(RestoreLane& lane) {
  ++lane.layer;
  lane.segment = 0;
}

PlannedPage& RestoreLanes::page(const RestoreLane& lane) {
  return pages_.layers[static_cast<size_t>(lane.layer)][lane.segment].pages[lane.page];
}

void RestoreLanes::pass_page(RestoreLane& lane) {
  if (++passed_ == pages_.turns[turn_].n_pages) {
    passed_ = 0;
    ++turn_;
  }
  lane.row = 0;
  const auto& segments = pages_.layers[static_cast<size_t>(lane.layer)];
  if (++lane.page < segments[lane.segment].pages.size()) return;
  lane.page = 0;
  ++lane.segment;
}

int RestoreLanes::leading_layers() const {
  for (const RestoreLane& lane : lanes_) {
    if (lane.layer < lane.end) return lane.layer;
  }
  return lanes_.back().end;
}

int RestoreLanes::n_done() const {
  int n = 0;
  for (const RestoreLane& lane : lanes_) n += lane.layer - lane.begin;
  return n;
}

}  // namespace hcache::state
