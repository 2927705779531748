#include "policy/restore_record.h"

#include <algorithm>

namespace hcache::policy {

TierBytes& TierBytes::operator+=(const TierBytes& other) {
  dram += other.dram;
  disk += other.disk;
  remote += other.remote;
  return *this;
}

// What both took beyond the time that passed, they did at the same time.
double overlap(double io_busy_s, double compute_busy_s, double restore_s) {
  const double shorter = std::min(io_busy_s, compute_busy_s);
  if (shorter <= 0) return 0;
  return std::clamp((io_busy_s + compute_busy_s - restore_s) / shorter, 0.0, 1.0);
}

}  // namespace hcache::policy
