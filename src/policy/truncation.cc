#include "policy/truncation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numeric>

namespace hcache::policy {

namespace {

// The first message stays if it takes at most this part of the context.
constexpr int64_t kFirstMessageShare = 4;
// A cut is put off to the next message by at most this part of the last rows, and of those that
// leave.
constexpr int64_t kPutOffShare = 2;
constexpr int64_t kLeastContext = 4 * kCutTokens;
constexpr double kMostImportant = 0.9;

int64_t first_rows(std::span<const int32_t> chain, const TruncationLimits& limits,
                   const NextMessage& next_message) {
  const int64_t second = next_message ? next_message(chain, 1) : -1;
  const bool is_short = second > 0 && second <= limits.context / kFirstMessageShare;
  return std::max(limits.keep_first, is_short ? second : 0);
}

// Of these blocks alone.
std::vector<int64_t> most_attended(const RowScores& scores, std::span<const int64_t> blocks,
                                   int64_t n) {
  std::vector<double> votes(blocks.size());
  std::vector<double> paid(blocks.size());
  for (int layer = 0; layer < scores.n_layer; ++layer) {
    for (int head = 0; head < scores.n_head_kv; ++head) {
      const std::span<const float> sums = scores.of(scores.sum, layer, head);
      for (size_t i = 0; i < blocks.size(); ++i) {
        const auto rows = sums.subspan(static_cast<size_t>(blocks[i]), kChosenBlock);
        paid[i] = std::accumulate(rows.begin(), rows.end(), 0.0);
      }
      const double all = std::accumulate(paid.begin(), paid.end(), 0.0);
      if (all <= 0) continue;
      for (size_t i = 0; i < blocks.size(); ++i) votes[i] += paid[i] / all;
    }
  }
  std::vector<size_t> ranked(blocks.size());
  std::iota(ranked.begin(), ranked.end(), size_t{0});
  const auto end = ranked.begin() + n;
  std::nth_element(ranked.begin(), end, ranked.end(), [&](size_t a, size_t b) {
    return votes[a] != votes[b] ? votes[a] > votes[b] : a > b;
  });
  std::vector<int64_t> chosen;
  std::transform(ranked.begin(), end, std::back_inserter(chosen),
                 [&](size_t i) { return blocks[i]; });
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

}  // namespace

Status validate(const TruncationLimits& limits) {
  if (limits.context == 0) return {};
  if (limits.context < kLeastContext) {
    return invalid_argument(
        fmt::format("a context of {} tokens is too short to be truncated: {} are needed",
                    limits.context, kLeastContext));
  }
  if (!(limits.share > 0 && limits.share < 1)) {
    return invalid_argument(
        fmt::format("{} of a context can't leave it: a part between 0 and 1 can", limits.share));
  }
  if (limits.keep_first < 0 || limits.keep_first > limits.context / 2) {
    return invalid_argument(
        fmt::format("the first {} tokens can't be kept of a context of {}: at "
                    "most half of it can",
                    limits.keep_first, limits.context));
  }
  if (!(limits.important >= 0 && limits.important <= kMostImportant)) {
    return invalid_argument(
        fmt::format("{} of what stays can't be chosen by attention: a part between 0 and {} can",
                    limits.important, kMostImportant));
  }
  return {};
}

int64_t next_cut(const HeldRows& held, const TruncationLimits& limits) {
  if (limits.context == 0) return kNeverCut;
  return (limits.context + held.dropped()) / kCutTokens * kCutTokens;
}

HeldRows cut(const HeldRows& held, std::span<const int32_t> chain, const TruncationLimits& limits,
             const NextMessage& next_message) {
  const auto at = static_cast<int64_t>(chain.size());
  HeldRows after = held;
  after.cut_at = at;
  if (held.cut_at == 0) after.kept = after.resumed = first_rows(chain, limits, next_message);
  const int64_t movable = held.rows(at) - after.kept;
  const int64_t leave = std::max<int64_t>(
      std::llround(std::ceil(limits.share * static_cast<double>(movable))), kCutTokens);
  const int64_t stay = std::max<int64_t>(movable - leave, 0);
  after.chosen = static_cast<int64_t>(limits.important * static_cast<double>(stay)) / kChosenBlock *
                 kChosenBlock;
  const int64_t target = at - (stay - after.chosen);
  const int64_t message = next_message ? next_message(chain, target) : -1;
  const int64_t reach = std::min(at - target, leave) / kPutOffShare;
  const bool in_reach = message >= 0 && message <= target + reach;
  after.resumed = std::min(in_reach ? message : target, at);
  return after;
}

std::vector<HeldRows> cuts_of(std::span<const int32_t> chain, const TruncationLimits& limits,
                              const NextMessage& next_message) {
  std::vector<HeldRows> cuts;
  HeldRows held;
  for (int64_t at = next_cut(held, limits); at < static_cast<int64_t>(chain.size());
       at = next_cut(held, limits)) {
    held = cut(held, chain.first(static_cast<size_t>(at)), limits, next_message);
    cuts.push_back(held);
  }
  return cuts;
}

std::vector<int64_t> most_attended(const RowScores& scores, const ChoosableBlocks& blocks,
                                   int64_t n) {
  const int64_t of_since = std::min(n, static_cast<int64_t>(blocks.since.size()));
  std::vector<int64_t> chosen = most_attended(scores, blocks.earlier, n - of_since);
  const std::vector<int64_t> since = most_attended(scores, blocks.since, of_since);
  chosen.insert(chosen.end(), since.begin(), since.end());
  return chosen;
}

HeldRows held_at(std::span<const HeldRows> cuts, int64_t length) {
  HeldRows held;
  for (const HeldRows& each : cuts) {
    if (each.cut_at < length) held = each;
  }
  return held;
}

int64_t usable_positions(const HeldRows& held, const TruncationLimits& held_limits, int64_t shared,
                         const TruncationLimits& wanted_limits) {
  if (held.cut_at == 0) return std::min(shared, next_cut({}, wanted_limits));
  return held_limits == wanted_limits && shared >= held.cut_at ? shared : 0;
}

}  // namespace hcache::policy
