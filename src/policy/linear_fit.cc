#include "policy/linear_fit.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>

namespace hcache::policy {

namespace {

// Slope and intercept from centred sums; the sizes must not all be equal.
LinearFit least_squares(std::span<const SizedTime> samples, double mean_size, double mean_s) {
  double sxx = 0;
  double sxy = 0;
  for (const SizedTime& s : samples) {
    sxx += (s.size - mean_size) * (s.size - mean_size);
    sxy += (s.size - mean_size) * (s.seconds - mean_s);
  }
  LinearFit fit{.slope = sxy / sxx, .intercept = mean_s - sxy / sxx * mean_size};
  if (fit.intercept >= 0) return fit;
  sxx = sxy = 0;
  for (const SizedTime& s : samples) {
    sxx += s.size * s.size;
    sxy += s.size * s.seconds;
  }
  return {.slope = sxy / sxx};
}

}  // namespace

double LinearFit::most_within(double seconds) const {
  if (seconds < intercept) return 0;
  if (slope <= 0) return std::numeric_limits<double>::infinity();
  return (seconds - intercept) / slope;
}

Result<LinearFit> fit_linear(std::span<const SizedTime> samples) {
  double mean_size = 0;
  double mean_s = 0;
  bool differ = false;
  for (const SizedTime& s : samples) {
    if (!(s.size >= 0 && s.seconds >= 0 && std::isfinite(s.size) && std::isfinite(s.seconds))) {
      return invalid_argument(
          fmt::format("linear fit: a sample of {} s at size {}; both must be finite and at least 0",
                      s.seconds, s.size));
    }
    differ = differ || s.size != samples.front().size;
    mean_size += s.size / static_cast<double>(samples.size());
    mean_s += s.seconds / static_cast<double>(samples.size());
  }
  if (!differ) {
    return invalid_argument(fmt::format(
        "linear fit: {} samples of fewer than two sizes; measure a second size", samples.size()));
  }
  LinearFit fit = least_squares(samples, mean_size, mean_s);
  if (fit.slope < 0) {
    return invalid_argument(fmt::format(
        "linear fit: times fall by {} s for one more of size; measure larger sizes", -fit.slope));
  }
  double residual = 0;
  double total = 0;
  for (const SizedTime& s : samples) {
    const double off = s.seconds - (fit.intercept + fit.slope * s.size);
    residual += off * off;
    total += (s.seconds - mean_s) * (s.seconds - mean_s);
  }
  fit.r2 = total > 0 ? 1 - residual / total : 1;
  return fit;
}

}  // namespace hcache::policy
