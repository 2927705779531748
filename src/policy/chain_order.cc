#include "policy/chain_order.h"

namespace hcache::policy {

double bytes_to_evict(const TierPolicy& policy, double used, double coming, double capacity) {
  if (used + coming <= capacity) return 0;
  return used + coming - capacity * (1 - policy.reserve);
}

void ChainOrder::add_follower(Id id) {
  ++followers_[id];
  order_.hold(id);
}

void ChainOrder::insert(Id id, std::optional<Id> parent, double now_s, const Worth& worth,
                        std::optional<Past> past) {
  if (order_.contains(id)) return order_.use(id, now_s);
  order_.insert(id, now_s, worth, past);
  if (const auto found = followers_.find(id); found != followers_.end()) {
    for (uint32_t i = 0; i < found->second; ++i) order_.hold(id);
  }
  if (!parent) return;
  parents_[id] = *parent;
  add_follower(*parent);
}

std::optional<ChainOrder::Taken> ChainOrder::take(Id id) {
  if (!order_.contains(id)) return std::nullopt;
  Taken taken;
  taken.object = order_.take(id);
  const auto parent = parents_.find(id);
  if (parent == parents_.end()) return taken;
  taken.parent = parent->second;
  parents_.erase(parent);
  const auto followers = followers_.find(*taken.parent);
  if (--followers->second == 0) followers_.erase(followers);
  order_.release(*taken.parent);
  return taken;
}

void ChainOrder::put_back(Id id, const Taken& taken) {
  const auto found = followers_.find(id);
  order_.put_back(id, taken.object, found == followers_.end() ? 0 : found->second);
  if (!taken.parent) return;
  parents_[id] = *taken.parent;
  add_follower(*taken.parent);
}

void ChainOrder::erase(Id id, double now_s) {
  if (const auto taken = take(id)) left(id, *taken, now_s);
}

std::vector<ChainOrder::Id> ChainOrder::victims(double now_s, const MayLeave& may) {
  std::vector<Id> leaving;
  const std::optional<Id> first = order_.victim(now_s, may);
  if (!first) return leaving;
  leaving.push_back(*first);
  if (!whole_chains_) return leaving;
  const bool wanted = order_.wanted(*first);
  for (auto at = parents_.find(*first); at != parents_.end(); at = parents_.find(at->second)) {
    const Id parent = at->second;
    if (!order_.contains(parent) || followers_.at(parent) > 1) break;
    // A request in the queue wants the chain up to here.
    if (!wanted && order_.wanted(parent)) break;
    if (may && !may(parent)) break;
    leaving.push_back(parent);
  }
  return leaving;
}

}  // namespace hcache::policy
