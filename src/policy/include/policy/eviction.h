// Which object a full cache evicts: the policies of --evict-policy, and the index that finds
// their victim without looking at every object.
//
// A cache (host memory, the simulator's tiers) tells an EvictionOrder
// what enters, is used and leaves, and asks it for a victim. The order knows nothing of what an
// object is. A policy is one row of a table in eviction.cc; what it may look at is in Object.
//
// Prefixes: an object that others need (a chunk with children in the cache, a pinned or a running
// sequence) is held, and no victim until it is released. So chains shrink from their ends.
//
// Threading: plain values, no shared state; the caller locks. Times in seconds on a clock that does
// not go back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/status.h"
#include "policy/return_model.h"
#include "policy/wanted.h"

namespace hcache::policy {

// A row of the table in eviction.cc. Here are those that code names; parse_evict_policy() finds
// all.
enum class EvictPolicy : uint8_t {
  kLru,             // least recently used
  kFifo,            // first in, first out
  kLfu,             // least often used since it came in; equals: least recently
  kSchedulerAware,  // what no request in the queue wants, least recently used first; then what the
                    // last of them want (AttentionStore §3.3.2)
  kCarScore,        // smallest score, which requests raise when they enter the window and when they
                    // are dispatched, and lower when they end (CaR §III)
  kCostAware,  // smallest worth: chance to return soon times what doing without costs, per byte
};
[[nodiscard]] std::string_view evict_policy_name(EvictPolicy policy);  // "lru", "cost-aware", ...
struct EvictPolicyInfo {
  std::string_view name;
  std::string_view keeps;  // what stays, for --help
};
[[nodiscard]] std::vector<EvictPolicyInfo> evict_policies();
// Whether it minds what requests in sight want.
[[nodiscard]] bool looks_ahead(EvictPolicy policy);
// kInvalidArgument names the policies there are.
[[nodiscard]] Result<EvictPolicy> parse_evict_policy(std::string_view name);

// What an object is worth keeping for.
struct Worth {
  double bytes = 1;   // that it takes; > 0
  double miss_s = 1;  // seconds that one use without it costs (policy/miss_cost.h)
};
// Of an object that was saved and used before the order knew it (an earlier process).
struct Past {
  double stored_s = 0;
  double last_use_s = 0;
};

class EvictionOrder {
 public:
  using Id = uint64_t;
  using May = std::function<bool(Id)>;
  struct Object;

  explicit EvictionOrder(EvictPolicy policy) : policy_(policy) {}

  // An object comes in, or comes back: what is remembered of it counts. One that is there already
  // is used.
  void insert(Id id, double now_s, const Worth& worth, std::optional<Past> past = std::nullopt);
  void use(Id id, double now_s);
  // The same use goes on.
  void touch(Id id, double now_s);
  // Of one that is here; others are left alone.
  void set_worth(Id id, const Worth& worth);
  // Evicted or deleted. Its uses are remembered for a while.
  void erase(Id id, double now_s);
  // erase() in two steps, so that what does not leave after all can be put back as it was, held
  // `held` times.
  [[nodiscard]] Object take(Id id);
  void put_back(Id id, const Object& object, uint32_t held);
  void remember(Id id, const Object& object, double now_s);
  // A request asked for an object that is not here and does not come in (the chain before it found
  // no room). What returns is learned from all that is asked for, or a policy would know only what
  // it keeps.
  void miss(Id id, double now_s);
  // Holds nest.
  void hold(Id id);
  void release(Id id);
  // Which requests in sight want it.
  void set_demand(Id id, const Demand& demand);
  // The same of objects whose demand may have changed.
  void set_demands(std::span<const Id> changed, const Wanted& wanted);

  // The next object to evict, if there is one (`may`: of those that it allows). It stays until it
  // is erased.
  [[nodiscard]] std::optional<Id> victim(double now_s, const May& may = nullptr);

  [[nodiscard]] bool contains(Id id) const { return objects_.contains(id); }
  // Of one that is here: others need it.
  [[nodiscard]] bool held(Id id) const { return objects_.at(id).held > 0; }
  // Of one that is here: a request in the queue wants it.
  [[nodiscard]] bool wanted(Id id) const { return objects_.at(id).demand.first.has_value(); }
  [[nodiscard]] size_t size() const { return objects_.size(); }

  // What a policy may look at.
  struct Object {
    double stored_s = 0;
    double last_use_s = 0;
    double watched_until_s = 0;  // what the return model was told of
    uint32_t uses = 1;
    Demand demand;
    double miss_s_per_byte = 0;
    uint32_t held = 0;
  };
  // Smallest first.
  struct Key {
    bool wanted = false;   // a request in the queue wants it: evicted after all others
    uint64_t urgency = 0;  // of those: the later its turn, the smaller
    double first = 0;
    double second = 0;
    friend bool operator<(const Key& a, const Key& b) {
      return std::tie(a.wanted, a.urgency, a.first, a.second) <
             std::tie(b.wanted, b.urgency, b.first, b.second);
    }
  };

 private:
  // Objects that are alike for the return model and cost about the same per byte when they are
  // missed, within a sixth.
  struct Group {
    int object_class = 0;
    int worth = 0;  // 4 log2 of miss_s_per_byte
    friend bool operator<(const Group& a, const Group& b) {
      return std::tie(a.object_class, a.worth) < std::tie(b.object_class, b.worth);
    }
  };
  struct Memory {  // of an object that is gone
    double last_use_s = 0;
    double watched_until_s = 0;
    uint32_t uses = 0;
  };

  void list(Id id, const Object& object);
  void unlist(Id id, const Object& object);
  [[nodiscard]] bool learns() const { return policy_ == EvictPolicy::kCostAware; }
  void note_return(double last_use_s, double watched_until_s, uint32_t uses, double now_s);
  void sweep(double now_s);
  [[nodiscard]] static Group group_of(const Object& object);
  [[nodiscard]] std::optional<Id> least_worth(double now_s, const May& may);

  const EvictPolicy policy_;
  std::unordered_map<Id, Object> objects_;
  std::set<std::pair<Key, Id>> order_;  // of what may go; kCostAware: of those that are wanted
  // kCostAware, of those that no request wants: by group, least recently used first.
  std::map<Group, std::set<std::pair<double, Id>>> groups_;
  std::unordered_map<Id, Memory> gone_;
  ReturnModel model_;
  double next_sweep_s_ = 0;
};

// A sequence of the device's arena on which no request runs.
struct IdleSequence {
  uint64_t last_used = 0;  // a running number
  bool durable = false;    // its state is saved, or never will be: it may go at once
  bool pinned = false;
  Demand demand = {};  // of requests that would go on from it
  // cost-aware:
  double idle_s = 0;     // since it was used
  double cells = 1;      // that it holds; > 0
  double restore_s = 1;  // of it, once it is gone
};
// Which of them to evict: of those that may go the policy's first. They are few, and leave
// whenever a request goes on from them, so policies that count uses see one of each, and cost-aware
// takes the chance that one is used next second as 1 / idle_s (hyperbolic caching: Blankstein et
// al., ATC'17). -1: none.
[[nodiscard]] int32_t choose_eviction(std::span<const IdleSequence> idle, EvictPolicy policy);

}  // namespace hcache::policy
