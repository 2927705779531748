// What is read ahead for requests that still wait: the policies of --fetch-policy.
//
// Pure functions. Threading: no state.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/status.h"

namespace hcache::policy {

enum class FetchPolicy : uint8_t {
  kOnDemand,        // nothing: a restore reads where its state lies
  kSchedulerAware,  // into the first tier, in the order of the queue, for as many requests as it
                    // holds (attentionstore.txt §3.3.1)
};
[[nodiscard]] std::string_view fetch_policy_name(FetchPolicy policy);  // "on-demand", ...
// kInvalidArgument names the policies there are.
[[nodiscard]] Result<FetchPolicy> parse_fetch_policy(std::string_view name);

// The look-ahead window L_pw = C_mem / S_kv of §3.3.1, in bytes instead of sessions of equal size:
// is a request in it? `bytes`: its state and that of all before it in the queue; capacity 0: no
// limit.
[[nodiscard]] bool in_fetch_window(double bytes, double capacity_bytes);

}  // namespace hcache::policy
