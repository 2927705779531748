#include "policy/read_order.h"

#include <cstddef>

namespace hcache::policy {

ReadOrder::ReadOrder(std::vector<Lane> lanes) {
  for (const Lane& lane : lanes) {
    lanes_.push_back({.left = lane, .total = static_cast<double>(lane.bytes), .share = 0});
  }
}

int32_t ReadOrder::next() const {
  int32_t found = -1;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].left.pieces == 0) continue;
    if (found < 0 || lanes_[i].share < lanes_[static_cast<size_t>(found)].share) {
      found = static_cast<int32_t>(i);
    }
  }
  return found;
}

void ReadOrder::advance(int32_t lane, int64_t bytes) {
  Progress& progress = lanes_[static_cast<size_t>(lane)];
  --progress.left.pieces;
  progress.left.bytes -= bytes;
  if (progress.total > 0) {
    progress.share = 1 - static_cast<double>(progress.left.bytes) / progress.total;
  }
}

}  // namespace hcache::policy
