// Which snapshots of sequences' state (docs/format.md) are dropped when they take more of the disks
// than they may.
//
// A snapshot stands at one place of a chain of tokens, and is of use to requests that go on from
// there or from somewhere before the next one: they compute what lies between. So one that is
// dropped costs the tokens back to the snapshot before it, each time that somebody wants it. Those
// go first whose loss is the smallest for the bytes that it gives back:
//
//   loss = tokens back to the one before · how likely it is wanted / √(time since its last use)
//
// The root, since pauses of days are not rare where pauses of hours are: a conversation that was
// left four times as long ago counts half.
//
// How likely: 2 for the newest of a conversation, where its next turn goes on, and 1 for the one
// before that, where its last reply began (another answer is asked for; or the conversation goes on
// from there, as where thoughts leave the prompt). To that comes the share of its chain that lies
// between it and the next one, summed over the chains that go on from it: a request may go on from
// any place. The newest of a chain that went on another way since has such a share alone: of what
// lies between the one before and it.
//
// What follows from that: chains are thinned out first, until what is left of each is about evenly
// spaced and one of its last two; then conversations that were not used for long lose these; what
// many conversations begin with stays longest.
//
// Pure. Threading: no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace hcache::policy {

struct SavedSnapshot {
  static constexpr std::size_t kNone = static_cast<std::size_t>(-1);

  std::size_t before = kNone;  // the last one before it in its chain: its index
  std::int64_t tokens = 0;     // of its chain up to its place; more than of the one before
  std::uint64_t bytes = 0;
  double last_use_s = 0;
  bool may_go = true;  // false: a restore reads it, say
};

// The indices of those to drop, in that order, for their bytes to be `excess` or more; of all that
// may go, if these are fewer.
[[nodiscard]] std::vector<std::size_t> snapshots_to_drop(std::span<const SavedSnapshot> snapshots,
                                                         std::uint64_t excess, double now_s);

// What snapshots may take of a store's quota unless it is said; 0, as the quota: any amount. Half:
// of models that keep both, a conversation of some thousand tokens has about as many bytes of rows
// as of the two snapshots that it needs. `nothing_else`: of models without rows most of it, so that
// chains are thinned out before whole chunks are evicted.
[[nodiscard]] std::uint64_t default_snapshot_quota(std::uint64_t store_quota, bool nothing_else);

}  // namespace hcache::policy
