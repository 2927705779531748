// What is read ahead for requests that still wait: the policies of --fetch-policy.
//
// Threading: plain values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
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

// The requests that wait for saved state, and which of them is read ahead next. The window is
// §3.3.1's L_pw = C_mem / S_kv, in bytes instead of sessions of equal size.
class FetchWindow {
 public:
  // capacity_bytes: of the first tier; 0: no limit.
  FetchWindow(FetchPolicy policy, double capacity_bytes)
      : policy_(policy), capacity_bytes_(capacity_bytes) {}

  // A request waits at this place (smaller is earlier; nobody else's) for so many bytes.
  void add(uint64_t place, double bytes);
  void remove(uint64_t place);
  // The first request whose state fits the tier together with that of all before it and that was
  // not named yet.
  [[nodiscard]] std::optional<uint64_t> next();

 private:
  struct Entry {
    double bytes = 0;
    bool named = false;
  };

  FetchPolicy policy_;
  double capacity_bytes_;
  std::map<uint64_t, Entry> entries_;  // by place
};

}  // namespace hcache::policy
