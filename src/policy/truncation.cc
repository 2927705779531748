#include "policy/truncation.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace hcache::policy {

namespace {

// The first message stays if it takes at most this part of the context.
constexpr int64_t kFirstMessageShare = 4;
// A cut is put off to the next message, as long as this part of what was to stay still does.
constexpr int64_t kPutOffShare = 2;
constexpr int64_t kLeastContext = 4 * kCutTokens;

int64_t first_rows(std::span<const int32_t> chain, const TruncationLimits& limits,
                   const NextMessage& next_message) {
  const int64_t second = next_message ? next_message(chain, 1) : -1;
  const bool is_short = second > 0 && second <= limits.context / kFirstMessageShare;
  return std::max(limits.keep_first, is_short ? second : 0);
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
  const auto movable = static_cast<double>(at - after.resumed);
  const int64_t target =
      after.resumed + std::max(std::llround(std::ceil(limits.share * movable)), kCutTokens + 0LL);
  const int64_t message = next_message ? next_message(chain, target) : -1;
  const bool in_reach = message >= 0 && message <= target + (at - target) / kPutOffShare;
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
