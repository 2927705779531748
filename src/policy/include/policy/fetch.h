// What is read ahead for requests that still wait: the policies of --fetch-policy.
//
// Threading: plain values.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "base/status.h"

namespace hcache::policy {

enum class FetchPolicy : uint8_t {
  kOnDemand,        // nothing: a restore reads where its state lies
  kSchedulerAware,  // into the first tier, in the order of the queue, for as many requests as it
                    // holds (AttentionStore §3.3.1)
  kCarTimer,        // into the arena, of the request that is next, just in time for the end of a
                    // running one (CaR §III-B.2)
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

  // A request waits with this ticket (smaller is earlier; unique) for so many bytes.
  void add(uint64_t ticket, double bytes);
  void remove(uint64_t ticket);
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
  std::map<uint64_t, Entry> entries_;  // by ticket
};

// When to load for the request that is next although no slot among the running is free: as soon
// as one of them is expected to end within the time that loading takes (CaR §III-B.2). What it
// expects, it learns: how long replies are for whom, how long a token takes, how fast loading is.
class LoadTimer {
 public:
  // A reply for this key ended on its own after so many tokens.
  void replied(const std::string& key, int64_t tokens);
  // A step took so long in which replies grew by a token each.
  void stepped(double seconds);
  // Loading so many tokens took so long.
  void loaded(int64_t tokens, double seconds);

  // How long a reply goes on that has `generated` tokens of at most `most`: as long as the key's
  // replies are on average, everybody's where the key has none; with nothing known until `most`.
  // A reply that is longer already may end with any token.
  [[nodiscard]] double remaining_s(const std::string& key, int64_t generated, int64_t most) const;
  // How long loading so many tokens takes; 0 while nothing was loaded.
  [[nodiscard]] double load_s(int64_t tokens) const;

 private:
  // A mean in which what came last counts most.
  struct Mean {
    double value = 0;
    bool known = false;
    void add(double sample);
  };

  std::unordered_map<std::string, Mean> reply_tokens_;  // by key
  Mean everybodys_reply_tokens_;
  Mean token_s_;
  Mean load_token_s_;
};

}  // namespace hcache::policy
