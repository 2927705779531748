#include "policy/fetch.h"

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

bool in_fetch_window(double bytes, double capacity_bytes) {
  return capacity_bytes <= 0 || bytes <= capacity_bytes;
}

}  // namespace hcache::policy
