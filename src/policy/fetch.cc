#include "policy/fetch.h"

#include <utility>

#include "base/names.h"

namespace hcache::policy {
namespace {

constexpr NameTable<FetchPolicy, 2> kPolicies = {{
    {FetchPolicy::kOnDemand, "on-demand"},
    {FetchPolicy::kSchedulerAware, "scheduler-aware"},
}};

}  // namespace

std::string_view fetch_policy_name(FetchPolicy policy) {
  return kPolicies.at(static_cast<size_t>(policy)).second;
}

Result<FetchPolicy> parse_fetch_policy(std::string_view name) {
  return parse_name(kPolicies, "fetch policy", name);
}

void FetchWindow::add(uint64_t place, double bytes) {
  if (policy_ != FetchPolicy::kOnDemand) entries_[place] = {bytes, false};
}

void FetchWindow::remove(uint64_t place) { entries_.erase(place); }

std::optional<uint64_t> FetchWindow::next() {
  double bytes = 0;
  for (auto& [place, entry] : entries_) {
    bytes += entry.bytes;
    if (capacity_bytes_ > 0 && bytes > capacity_bytes_) break;
    if (!std::exchange(entry.named, true)) return place;
  }
  return std::nullopt;
}

}  // namespace hcache::policy
