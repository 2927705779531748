// What differences between two ways to predict the same tokens amount to, and how sure that is.
//
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace hcache::eval {

// Observations that belong together: those of a window of text, whose tokens depend on each other,
// or of a question.
struct Group {
  double sum = 0;
  double n = 0;  // observations
  void add(double value) {
    sum += value;
    n += 1;
  }
};

struct Estimate {
  double value = 0;
  double low = 0;  // of the interval, which holds it
  double high = 0;
};

// The mean over all observations with its 95 % interval: the percentiles of the bootstrap that
// draws whole groups. For paired differences let `sum` be a group's differences. The same `seed`
// gives the same interval. Zeros where there are no observations; with one group the interval is
// the value, and says nothing.
[[nodiscard]] Estimate bootstrap_mean(std::span<const Group> groups, int resamples = 2000,
                                      uint64_t seed = 1);

// exp of all three: a perplexity from a mean of -log p, a ratio from a mean difference of logs.
[[nodiscard]] Estimate exponential(const Estimate& mean);

// The q-quantile, q in [0, 1], interpolated between neighbours; 0 of nothing.
[[nodiscard]] double quantile(std::vector<double> values, double q);
[[nodiscard]] double quantile_of_sorted(std::span<const double> sorted, double q);

}  // namespace hcache::eval
