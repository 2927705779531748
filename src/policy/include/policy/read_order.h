// In which order the parts of a restore are read when several devices restore their layers at once:
// what each of them wants is read at the same pace, so that all have something to do from the first
// pages on and are through at the same time.
//
// Threading: plain values.
#pragma once

#include <cstdint>
#include <vector>

namespace hcache::policy {

class ReadOrder {
 public:
  // What one device's layers want, in pieces that are read in their order.
  struct Lane {
    int64_t pieces = 0;
    int64_t bytes = 0;  // of all of them
  };

  explicit ReadOrder(std::vector<Lane> lanes);

  // The lane whose next piece is to be read: of those that have one left, the first of which the
  // smallest share has been read. -1: none has.
  [[nodiscard]] int32_t next() const;
  // The next piece of the lane has been read.
  void advance(int32_t lane, int64_t bytes);

 private:
  struct Progress {
    Lane left;
    double total = 0;  // bytes
    double share = 0;  // that has been read
  };
  std::vector<Progress> lanes_;
};

}  // namespace hcache::policy
