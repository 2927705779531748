#include "policy/queue.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include "base/names.h"

namespace hcache::policy {
namespace {

constexpr NameTable<QueuePolicy, 2> kPolicies = {{
    {QueuePolicy::kFcfs, "fcfs"},
    {QueuePolicy::kCar, "car"},
}};

}  // namespace

std::string_view queue_policy_name(QueuePolicy policy) {
  return kPolicies.at(static_cast<size_t>(policy)).second;
}

Result<QueuePolicy> parse_queue_policy(std::string_view name) {
  return parse_name(kPolicies, "queue policy", name);
}

std::vector<int32_t> window_order(std::span<const WindowEntry> window, const QueueLimits& limits) {
  std::vector<int32_t> order(window.size());
  std::iota(order.begin(), order.end(), 0);
  if (limits.policy == QueuePolicy::kFcfs) return order;
  const auto rank = [&](int32_t index) {
    const WindowEntry& entry = window[static_cast<size_t>(index)];
    const bool starves = entry.overtaken >= limits.window;
    return std::tuple(!entry.preempted, !starves, starves ? 0 : -int64_t{entry.priority},
                      starves ? QueueGroup::kResident : entry.group);
  };
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return rank(a) < rank(b); });
  return order;
}

}  // namespace hcache::policy
