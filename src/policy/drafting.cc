#include "policy/drafting.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace hcache::policy {

namespace {

// Guesses are weighed by how long ago they were: about so many count.
constexpr double kRemembered = 64;
// What a match says counts as so many guesses.
constexpr double kPrior = 4;
// A longer step must be better by so much: costs are estimates.
constexpr double kWorthIt = 1.05;
// Of a step's time, what a new one counts.
constexpr double kNewest = 0.2;

}  // namespace

Draft look_up(std::span<const int32_t> chain, const DraftLimits& limits) {
  const auto n = static_cast<int64_t>(chain.size());
  const int64_t least = std::max(1, limits.least_match);
  Draft best;
  if (limits.most < 1 || n <= least) return best;
  int64_t best_end = 0;
  const int32_t last = chain[static_cast<size_t>(n - 1)];
  for (int64_t end = n - 1; end >= least; --end) {  // of an earlier match
    if (chain[static_cast<size_t>(end - 1)] != last) continue;
    int32_t matched = 1;
    while (matched < kMostMatched && matched < end &&
           chain[static_cast<size_t>(end - 1 - matched)] ==
               chain[static_cast<size_t>(n - 1 - matched)]) {
      ++matched;
    }
    if (matched < least || matched <= best.matched) continue;
    best.matched = matched;
    best_end = end;
    if (matched == kMostMatched) break;
  }
  if (best.matched == 0) return best;
  // What repeats itself goes on: behind the end of the chain stands the draft.
  for (int32_t i = 0; i < limits.most; ++i) {
    const int64_t at = best_end + i;
    best.tokens.push_back(at < n ? chain[static_cast<size_t>(at)]
                                 : best.tokens[static_cast<size_t>(at - n)]);
  }
  return best;
}

void Acceptance::note(int32_t kept, bool all) {
  const double looked_at = kept + (all ? 0 : 1);
  const double forget = std::exp(-looked_at / kRemembered);
  kept_ = kept_ * forget + kept;
  looked_at_ = looked_at_ * forget + looked_at;
}

double Acceptance::probability(int32_t matched) const {
  const double prior = 1 - 1 / (1 + static_cast<double>(matched));
  return (kept_ + kPrior * prior) / (looked_at_ + kPrior);
}

void StepPace::note(int64_t rows, double seconds) {
  const auto [known, added] = seconds_.try_emplace(rows, seconds);
  if (!added) known->second += kNewest * (seconds - known->second);
}

double StepPace::at(int64_t rows) const {
  const auto above = seconds_.lower_bound(rows);
  if (above != seconds_.end() && above->first == rows) return above->second;
  const auto r = static_cast<double>(rows);
  if (above == seconds_.begin()) {
    const double row_s = above == seconds_.end()
                             ? 1
                             : above->second / (0.5 + 0.5 * static_cast<double>(above->first));
    return row_s * (0.5 + 0.5 * r);
  }
  const auto& [below_rows, below_s] = *std::prev(above);
  const auto below = static_cast<double>(below_rows);
  if (above != seconds_.end()) {
    const double part = (r - below) / (static_cast<double>(above->first) - below);
    return below_s + part * (above->second - below_s);
  }
  return below_s / (0.5 + 0.5 * below) * (0.5 + 0.5 * r);
}

DraftLength draft_length(const DraftCosts& costs, double probability, const DraftLimits& limits) {
  const auto beside = static_cast<double>(costs.others);
  const int32_t least = std::min(limits.least, limits.most);
  double best_rate = least > 0 ? 0 : kWorthIt * (beside + 1) / costs.step_s(costs.others + 1);
  DraftLength best;
  double tokens = 1;  // expected, of this sequence
  double chance = 1;  // that a draft comes true so far
  for (int32_t length = 1, next = std::max(1, least); length <= limits.most; ++length) {
    chance *= probability;
    tokens += chance;
    if (length != next && length != limits.most) continue;
    next = std::max(next + 1, next + next / 2);  // every length up to 3, then fewer
    const double step_s = costs.step_s(costs.others + 1 + length) + length * costs.token_s;
    const double rate = (beside + tokens) / step_s;
    if (rate <= best_rate) continue;
    best_rate = rate;
    best = {length, rate};
  }
  return best;
}

}  // namespace hcache::policy
