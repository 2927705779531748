#include "policy/snapshots.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hcache::policy {
namespace {

constexpr std::size_t kNone = SavedSnapshot::kNone;
// How likely the newest of a conversation is wanted, and the one before it.
constexpr double kNextTurn = 2;
constexpr double kReplyAgain = 1;
// What was used so short a time ago counts as in use now.
constexpr double kInUseS = 600;

// The snapshots that are left, as a forest: each follows the last one before it.
class Forest {
 public:
  explicit Forest(std::span<const SavedSnapshot> snapshots)
      : all_(snapshots.begin(), snapshots.end()), nodes_(all_.size()), order_(all_.size()) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::sort(order_.begin(), order_.end(),
              [&](std::size_t a, std::size_t b) { return all_[a].tokens > all_[b].tokens; });
  }

  // The one whose loss is the smallest for its bytes; kNone: none may go.
  [[nodiscard]] std::size_t cheapest(double now_s) {
    look();
    std::size_t best = kNone;
    double least = 0;
    for (const std::size_t i : order_) {
      if (!all_[i].may_go) continue;
      const double loss = loss_of(i, now_s);
      const bool older = best != kNone && loss == least && nodes_[i].use_s < nodes_[best].use_s;
      if (best != kNone && loss >= least && !older) continue;
      best = i;
      least = loss;
    }
    return best;
  }

  // Its followers follow the one before it now.
  void drop(std::size_t dropped) {
    std::erase(order_, dropped);
    for (const std::size_t i : order_) {
      if (all_[i].before == dropped) all_[i].before = all_[dropped].before;
    }
  }

 private:
  struct Node {
    std::int64_t tip = 0;   // tokens of the longest chain through it
    double use_s = 0;       // last use of it or of what follows
    double next_use_s = 0;  // last use of what follows
    double likely = 0;      // that it is wanted, over all chains through it
    bool followed = false;
    bool before_newest = false;  // what follows is the newest of a conversation
  };

  // Followers come before what they follow.
  void look() {
    for (const std::size_t i : order_) {
      nodes_[i] = {};
      nodes_[i].tip = all_[i].tokens;
      nodes_[i].use_s = all_[i].last_use_s;
    }
    for (const std::size_t i : order_) {
      if (all_[i].before == kNone) continue;
      const Node& node = nodes_[i];
      Node& before = nodes_[all_[i].before];
      before.tip = std::max(before.tip, node.tip);
      before.use_s = std::max(before.use_s, node.use_s);
      before.next_use_s = std::max(before.next_use_s, node.use_s);
      before.likely += between(i) / static_cast<double>(node.tip);
      before.followed = true;
    }
    for (const std::size_t i : order_) {
      if (nodes_[i].followed) continue;
      const bool left = left_behind(i);
      nodes_[i].likely = left ? between(i) / static_cast<double>(all_[i].tokens) : kNextTurn;
      if (!left && all_[i].before != kNone) nodes_[all_[i].before].before_newest = true;
    }
    for (const std::size_t i : order_) {
      if (nodes_[i].before_newest) nodes_[i].likely += kReplyAgain;
    }
  }

  // Whether the chain of one that nothing follows went on another way later.
  [[nodiscard]] bool left_behind(std::size_t i) const {
    const std::size_t before = all_[i].before;
    return before != kNone && nodes_[before].next_use_s > nodes_[i].use_s;
  }

  // Tokens from the one before it.
  [[nodiscard]] double between(std::size_t i) const {
    const std::size_t before = all_[i].before;
    return static_cast<double>(all_[i].tokens - (before == kNone ? 0 : all_[before].tokens));
  }

  [[nodiscard]] double loss_of(std::size_t i, double now_s) const {
    const double idle_s = std::max(kInUseS, now_s - nodes_[i].use_s);
    const auto bytes = static_cast<double>(std::max<std::uint64_t>(1, all_[i].bytes));
    return between(i) * nodes_[i].likely / std::sqrt(idle_s) / bytes;
  }

  std::vector<SavedSnapshot> all_;
  std::vector<Node> nodes_;
  std::vector<std::size_t> order_;  // those that are left, the longest first
};

}  // namespace

std::vector<std::size_t> snapshots_to_drop(std::span<const SavedSnapshot> snapshots,
                                           std::uint64_t excess, double now_s) {
  std::vector<std::size_t> dropped;
  Forest forest(snapshots);
  for (std::uint64_t bytes = 0; bytes < excess;) {
    const std::size_t next = forest.cheapest(now_s);
    if (next == kNone) break;
    forest.drop(next);
    dropped.push_back(next);
    bytes += snapshots[next].bytes;
  }
  return dropped;
}

std::uint64_t default_snapshot_quota(std::uint64_t store_quota, bool nothing_else) {
  return nothing_else ? store_quota / 10 * 9 : store_quota / 2;
}

}  // namespace hcache::policy
