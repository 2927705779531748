// What is saved of all chains of tokens, and in which tier: the simulator's store, without a byte
// of state in it.
//
// A chain is cut into chunks of kChunk tokens; the last may be shorter. An object is a chunk
// together with everything before it, so equal prefixes are one object. An object can be used when
// all before it can; one with children in a tier stays there, so chains shrink from their ends.
// New state goes into every tier, reading lifts into the first. What is in no tier is gone. A short
// chunk goes when one that continues it comes.
// Threading: plain values. Times in seconds on a clock that does not go back.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "policy/eviction.h"

namespace hcache::sim {

inline constexpr int64_t kChunk = 64;  // tokens; the store's

struct SavedTier {
  double capacity_bytes = 0;  // 0: no limit
  policy::EvictPolicy policy = policy::EvictPolicy::kLru;
};

class SavedChains {
 public:
  // At most eight tiers, fastest first; without any nothing is saved. rebuild_s: what a token costs
  // to compute again.
  SavedChains(std::vector<SavedTier> tiers, double bytes_per_token, double rebuild_s);

  struct Found {
    int64_t tokens = 0;
    std::vector<int64_t> by_tier;  // tokens whose fastest copy is there
  };
  // The longest saved prefix. A look, which policies don't see.
  [[nodiscard]] Found find(std::span<const int32_t> tokens) const;
  // The same, and uses it: its objects count as used in every tier that holds them, and come into
  // the first. Says where they were before.
  Found use(std::span<const int32_t> tokens, double now_s);
  // Saves a chain.
  void put(std::span<const int32_t> tokens, double now_s);

  [[nodiscard]] double bytes(size_t tier) const { return tiers_[tier].used; }
  [[nodiscard]] uint64_t evictions(size_t tier) const { return tiers_[tier].evictions; }

 private:
  using Id = uint64_t;
  struct Object {
    Id parent = 0;  // 0: none
    int32_t tokens = 0;
    uint8_t tiers = 0;  // bit i: it is in tier i
    uint8_t holds = 0;  // bit i: it holds its parent in tier i
  };
  struct Tier {
    SavedTier setup;
    policy::EvictionOrder order;  // empty where there is no limit
    double used = 0;
    uint64_t evictions = 0;
  };
  struct Link {
    Id id = 0;
    int32_t tokens = 0;
  };

  // The objects of a chain's saved prefix, in order.
  [[nodiscard]] std::vector<Link> walk(std::span<const int32_t> tokens) const;
  [[nodiscard]] Found describe(const std::vector<Link>& links) const;
  [[nodiscard]] bool limited(const Tier& tier) const { return tier.setup.capacity_bytes > 0; }
  // Others may have to leave, or it itself: then it may be gone altogether.
  void enter(size_t tier, Id id, double now_s);
  void leave(size_t tier, Id id, double now_s);
  void leave_all(Id id, double now_s);

  const double bytes_per_token_;
  const double rebuild_s_;
  std::vector<Tier> tiers_;
  std::unordered_map<Id, Object> objects_;
};

}  // namespace hcache::sim
