// A time as a straight line over a size, fitted to samples (HybridServe §4.3, Fig. 11).
//
// Pure functions. Units: seconds over whatever is counted (tokens, rows, pairs). Threading: plain
// values.
#pragma once

#include <span>

#include "base/status.h"

namespace hcache::policy {

struct SizedTime {
  double size = 0;
  double seconds = 0;
};

struct LinearFit {
  double slope = 0;      // seconds for one more
  double intercept = 0;  // seconds for beginning at all
  double r2 = 1;         // coefficient of determination; the paper asks for 0.99

  // Seconds; nothing takes no time.
  [[nodiscard]] double at(double size) const { return size > 0 ? intercept + slope * size : 0; }
  // The largest size that takes at most so long; 0 if none does, infinity if all do.
  [[nodiscard]] double most_within(double seconds) const;
  [[nodiscard]] LinearFit scaled(double factor) const {
    return {slope * factor, intercept * factor, r2};
  }
};

// Least squares. A negative intercept is no time: the line then goes through the origin.
// kInvalidArgument: fewer than two sizes, a size or time that is negative or not finite, or times
// that fall with size.
[[nodiscard]] Result<LinearFit> fit_linear(std::span<const SizedTime> samples);

}  // namespace hcache::policy
