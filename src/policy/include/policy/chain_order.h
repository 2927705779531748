// Which chunks of a full tier give way, where a chunk is of use only together with all before it in
// its chain: the order of an eviction policy, from the ends of chains up. Host memory, the disks
// and the simulator's tiers evict by it.
//
// Threading: plain values, no shared state; the caller locks. Times as in eviction.h.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "policy/eviction.h"

namespace hcache::policy {

struct TierPolicy {
  EvictPolicy evict = EvictPolicy::kLru;
  // Whole conversations leave (AttentionStore §3.3.2): with a chunk that gives way go all
  // before it that no other chain continues. false: chains shrink from their ends.
  bool whole_chains = false;
  // Of the capacity, in [0, 1): when something has to leave, so much more leaves that this share is
  // free afterwards (§3.3.1's buffer): what comes next finds room.
  double reserve = 0;
};

// How many bytes leave a tier of `capacity` before `coming` more enter; 0 while they fit.
[[nodiscard]] double bytes_to_evict(const TierPolicy& policy, double used, double coming,
                                    double capacity);

class ChainOrder {
 public:
  using Id = EvictionOrder::Id;
  // Whether a chunk may leave now.
  using MayLeave = std::function<bool(Id)>;
  // What take() gives.
  struct Taken {
    EvictionOrder::Object object;
    std::optional<Id> parent;
  };

  explicit ChainOrder(const TierPolicy& policy)
      : whole_chains_(policy.whole_chains), order_(policy.evict) {}

  // A chunk comes in, behind `parent`; none: the first of its chain. Otherwise as EvictionOrder's.
  void insert(Id id, std::optional<Id> parent, double now_s, const Worth& worth,
              std::optional<Past> past = std::nullopt);
  void use(Id id, double now_s) { order_.use(id, now_s); }
  void touch(Id id, double now_s) { order_.touch(id, now_s); }
  void miss(Id id, double now_s) { order_.miss(id, now_s); }
  void set_worth(Id id, const Worth& worth) { order_.set_worth(id, worth); }
  void set_demands(std::span<const Id> changed, const Wanted& wanted) {
    order_.set_demands(changed, wanted);
  }
  // Evicted or deleted. Its uses are remembered for a while.
  void erase(Id id, double now_s);

  // Who gives way next: nobody; one chunk; or, with whole_chains, it and those before it that go
  // with it, in the order in which they leave. They stay until they are erased or taken.
  [[nodiscard]] std::vector<Id> victims(double now_s, const MayLeave& may = nullptr);

  // Takes a chunk out for now: it has either left then, or is put back as it was.
  [[nodiscard]] std::optional<Taken> take(Id id);
  void put_back(Id id, const Taken& taken);
  void left(Id id, const Taken& taken, double now_s) { order_.remember(id, taken.object, now_s); }

  [[nodiscard]] bool contains(Id id) const { return order_.contains(id); }
  [[nodiscard]] size_t size() const { return order_.size(); }

 private:
  void add_follower(Id id);

  const bool whole_chains_;
  EvictionOrder order_;
  std::unordered_map<Id, Id> parents_;          // of those that are here and have one
  std::unordered_map<Id, uint32_t> followers_;  // that are here, of a chunk that may be gone
};

}  // namespace hcache::policy
