#include "eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace hcache::eval {
namespace {

constexpr double kTail = 0.025;

double mean_of(const Group& total) { return total.n > 0 ? total.sum / total.n : 0; }

}  // namespace

double quantile(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const double at = std::clamp(q, 0.0, 1.0) * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(at);
  const size_t above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
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
  estimate.low = std::min(quantile(means, kTail), estimate.value);
  estimate.high = std::max(quantile(means, 1 - kTail), estimate.value);
  return estimate;
}

Estimate exponential(const Estimate& mean) {
  return {std::exp(mean.value), std::exp(mean.low), std::exp(mean.high)};
}

}  // namespace hcache::eval
