#include "eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace hcache::eval {
namespace {

constexpr double kTail = 0.025;

double mean_of(const Group& total) { return total.n > 0 ? total.sum / total.n : 0; }

}  // namespace

double quantile_of_sorted(std::span<const double> sorted, double q) {
  if (sorted.empty()) return 0;
  const double at = std::clamp(q, 0.0, 1.0) * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - static_cast<double>(below)) * (sorted[above] - sorted[below]);
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return quantile_of_sorted(values, q);
}

Estimate bootstrap_mean(std::span<const Group> groups, int resamples, uint64_t seed) {
  Group total;
  for (const Group& group : groups) {
    total.sum += group.sum;
    total.n += group.n;
  }
  Estimate estimate;
  estimate.value = estimate.low = estimate.high = mean_of(total);
  if (groups.size() < 2 || total.n <= 0) return estimate;
  std::mt19937_64 random(seed);
  std::vector<double> means;
  means.reserve(static_cast<size_t>(resamples));
  for (int i = 0; i < resamples; ++i) {
    Group drawn;
    for (size_t g = 0; g < groups.size(); ++g) {
      // Not by a distribution of the library's: those differ between libraries.
      const Group& group = groups[random() % groups.size()];
      drawn.sum += group.sum;
      drawn.n += group.n;
    }
    if (drawn.n > 0) means.push_back(mean_of(drawn));
  }
  std::sort(means.begin(), means.end());
  estimate.low = std::min(quantile_of_sorted(means, kTail), estimate.value);
  estimate.high = std::max(quantile_of_sorted(means, 1 - kTail), estimate.value);
  return estimate;
}

Estimate exponential(const Estimate& mean) {
  return {std::exp(mean.value), std::exp(mean.low), std::exp(mean.high)};
}

}  // namespace hcache::eval
