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
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "policy/chain_order.h"
#include "policy/wanted.h"

namespace hcache::sim {

inline constexpr int64_t kChunk = 64;  // tokens; the store's

struct SavedTier {
  double capacity_bytes = 0;  // 0: no limit
  policy::TierPolicy policy = {};
  // Whose room a chain takes, whatever its length: a store that sets aside the whole context for
  // each conversation. 0: that of its own.
  int64_t chain_tokens = 0;
};

class SavedChains {
 public:
  // What doing without `tokens` tokens from position `first` on costs, when they are not in a tier.
  using MissCost = std::function<double(size_t tier, int64_t first, int64_t tokens)>;

  // At most eight tiers, fastest first; without any nothing is saved.
  SavedChains(std::vector<SavedTier> tiers, double bytes_per_token, MissCost miss_s);

  struct Found {
    int64_t tokens = 0;
    std::vector<int64_t> by_tier;  // tokens whose fastest copy is there
  };
  struct Chunk {
    int64_t tokens = 0;
    size_t tier = 0;  // the fastest that holds it
  };
  // The chunks of the longest saved prefix. A look, which policies don't see.
  [[nodiscard]] std::vector<Chunk> chunks(std::span<const int32_t> tokens) const;
  // Their sum.
  [[nodiscard]] Found find(std::span<const int32_t> tokens) const;
  // The same, and uses it: its objects count as used in every tier that holds them, and come into
  // the first. Says where they were before.
  Found use(std::span<const int32_t> tokens, double now_s);
  // Saves a chain.
  void put(std::span<const int32_t> tokens, double now_s);
  // Brings the chunks that end within the first `upto` tokens into the first tier, ahead of their
  // use. Policies of the others don't see it.
  void lift(std::span<const int32_t> tokens, int64_t upto, double now_s);
  // The first `drop` tokens (whole chunks) are cut off, and what was saved of the rest is valid for
  // the shorter chain: state whose positions are put in when it is loaded (AttentionStore
  // §3.4). The chain as it was is gone, but for what other chains share with it.
  void cut_front(std::span<const int32_t> tokens, int64_t drop, double now_s);

  // A request in the queue wants a chain: what is saved of it, until it is unwanted. Policies that
  // look ahead keep it. No other request has the same ticket.
  void want(uint64_t ticket, std::span<const int32_t> tokens);
  void dispatch(uint64_t ticket);  // it waits no longer and runs
  void unwant(uint64_t ticket);

  [[nodiscard]] double bytes(size_t tier) const { return tiers_[tier].used; }
  [[nodiscard]] uint64_t evictions(size_t tier) const { return tiers_[tier].evictions; }

 private:
  using Id = uint64_t;
  struct Object {
    Id parent = 0;  // 0: none
    int32_t tokens = 0;
    uint8_t tiers = 0;  // bit i: it is in tier i
    int32_t children = 0;
    int64_t first = 0;  // position of its first token
  };
  struct Tier {
    SavedTier setup;
    policy::ChainOrder order;  // empty where there is no limit
    double used = 0;
    uint64_t evictions = 0;
  };
  struct Link {
    Id id = 0;
    int32_t tokens = 0;
  };

  // The objects of a chain's saved prefix, in order.
  [[nodiscard]] std::vector<Link> walk(std::span<const int32_t> tokens) const;
  [[nodiscard]] Chunk chunk_of(const Link& link) const;
  [[nodiscard]] Found describe(const std::vector<Link>& links) const;
  // What it takes of a tier's capacity.
  [[nodiscard]] double room(const Tier& tier, const Object& object) const;
  [[nodiscard]] bool limited(const Tier& tier) const { return tier.setup.capacity_bytes > 0; }
  // Tells the policies of all tiers who wants what now.
  void mark(std::span<const Id> changed);
  // In no tier yet.
  void create(Id id, Id parent, int64_t first, int32_t tokens);
  // Others may have to leave, or it itself: then it may be gone altogether.
  void enter(size_t tier, Id id, double now_s);
  void leave(size_t tier, Id id, double now_s);
  void leave_all(Id id, double now_s);

  const double bytes_per_token_;
  const MissCost miss_s_;
  std::vector<Tier> tiers_;
  std::unordered_map<Id, Object> objects_;
  policy::Wanted wanted_;
};

}  // namespace hcache::sim
