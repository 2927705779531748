#include "policy/eviction.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

namespace hcache::policy {
namespace {

using Key = EvictionOrder::Key;
using Object = EvictionOrder::Object;

// How often the return model is told how long everything has been watched.
constexpr double kSweepS = 5;
// With more objects than this it is told less often, so that looking at all of them stays cheap.
constexpr double kSweptObjects = 200'000;
// What is gone is watched for so long; nearly all that returns does so earlier.
constexpr double kMemoryS = 3600;
// Below it two sequences of the arena are equally young.
constexpr double kLeastIdleS = 1e-3;
// Steps of an object's worth that are told apart, per factor of two.
constexpr double kWorthSteps = 4;

double miss_s_per_byte(const Worth& worth) {
  return std::max(worth.miss_s, 1e-9) / std::max(worth.bytes, 1.0);
}

Key queue_key(const Object& o) {
  Key key{.first = o.last_use_s};
  if (o.demand.first) {
    key.wanted = true;
    key.urgency = std::numeric_limits<uint64_t>::max() - *o.demand.first;
  }
  return key;
}

struct PolicyRow {
  std::string_view name;
  std::string_view keeps;
  Key (*key)(const Object&);
  bool looks_ahead = false;
};

// In the order of EvictPolicy, and behind them those that no code names.
constexpr std::array kPolicies = {
    PolicyRow{"lru", "what was used last",
              [](const Object& o) { return Key{.first = o.last_use_s}; }},
    PolicyRow{"fifo", "what was stored last",
              [](const Object& o) { return Key{.first = o.stored_s}; }},
    PolicyRow{"lfu", "what was used often",
              [](const Object& o) {
                return Key{.first = static_cast<double>(o.uses), .second = o.last_use_s};
              }},
    PolicyRow{"scheduler-aware", "what requests in the queue want, then what was used last",
              queue_key, true},
    PolicyRow{"car-score", "what most of the first 16 in the queue and of those that run want",
              [](const Object& o) {
                return Key{.first = static_cast<double>(o.demand.score), .second = o.last_use_s};
              },
              true},
    PolicyRow{"cost-aware",
              "what requests in the queue want, then what is most likely to return, for the "
              "seconds that doing without it costs per byte",
              queue_key, true},
    // Lee et al., "LRFU" (IEEE Trans. Computers, 2001), with all uses taken to be as old as the
    // last: twice as many are worth as much as one that is this much younger.
    PolicyRow{"lrfu", "what was used last, by ten minutes more for twice as many uses",
              [](const Object& o) { return Key{.first = o.last_use_s + 600 * std::log2(o.uses)}; }},
};

const PolicyRow& row_of(EvictPolicy policy) { return kPolicies[static_cast<size_t>(policy)]; }

}  // namespace

std::string_view evict_policy_name(EvictPolicy policy) { return row_of(policy).name; }

std::vector<EvictPolicyInfo> evict_policies() {
  std::vector<EvictPolicyInfo> out;
  for (const PolicyRow& row : kPolicies) out.push_back({row.name, row.keeps});
  return out;
}

bool looks_ahead(EvictPolicy policy) { return row_of(policy).looks_ahead; }

Result<EvictPolicy> parse_evict_policy(std::string_view name) {
  std::string names;
  for (size_t i = 0; i < kPolicies.size(); ++i) {
    if (kPolicies[i].name == name) return static_cast<EvictPolicy>(i);
    names += fmt::format("{}{}", names.empty() ? "" : ", ", kPolicies[i].name);
  }
  return invalid_argument(fmt::format("no eviction policy '{}'; there are {}", name, names));
}

EvictionOrder::Group EvictionOrder::group_of(const Object& object) {
  return {.object_class = ReturnModel::class_of(object.uses),
          .worth = static_cast<int>(std::lround(kWorthSteps * std::log2(object.miss_s_per_byte)))};
}

void EvictionOrder::list(Id id, const Object& object) {
  if (object.held > 0) return;
  if (learns() && !object.demand.first) {
    groups_[group_of(object)].emplace(object.last_use_s, id);
  } else {
    order_.emplace(row_of(policy_).key(object), id);
  }
}

void EvictionOrder::unlist(Id id, const Object& object) {
  if (object.held > 0) return;
  if (learns() && !object.demand.first) {
    const auto group = groups_.find(group_of(object));
    group->second.erase({object.last_use_s, id});
    if (group->second.empty()) groups_.erase(group);
  } else {
    order_.erase({row_of(policy_).key(object), id});
  }
}

void EvictionOrder::insert(Id id, double now_s, const Worth& worth, std::optional<Past> past) {
  if (objects_.contains(id)) return use(id, now_s);
  Object object;
  object.stored_s = past ? past->stored_s : now_s;
  object.last_use_s = past ? past->last_use_s : now_s;
  object.watched_until_s = now_s;
  object.miss_s_per_byte = miss_s_per_byte(worth);
  if (const auto gone = gone_.find(id); gone != gone_.end()) {
    const Memory& m = gone->second;
    note_return(m.last_use_s, m.watched_until_s, m.uses, now_s);
    object.uses = m.uses + 1;
    gone_.erase(gone);
  }
  list(id, objects_.emplace(id, object).first->second);
}

void EvictionOrder::set_worth(Id id, const Worth& worth) {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return;
  unlist(id, found->second);
  found->second.miss_s_per_byte = miss_s_per_byte(worth);
  list(id, found->second);
}

void EvictionOrder::use(Id id, double now_s) {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return;
  Object& object = found->second;
  unlist(id, object);
  note_return(object.last_use_s, object.watched_until_s, object.uses, now_s);
  object.last_use_s = now_s;
  object.watched_until_s = now_s;
  ++object.uses;
  list(id, object);
}

void EvictionOrder::touch(Id id, double now_s) {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return;
  unlist(id, found->second);
  found->second.last_use_s = found->second.watched_until_s = now_s;
  list(id, found->second);
}

void EvictionOrder::erase(Id id, double now_s) {
  if (objects_.contains(id)) remember(id, take(id), now_s);
}

EvictionOrder::Object EvictionOrder::take(Id id) {
  const auto found = objects_.find(id);
  const Object object = found->second;
  unlist(id, object);
  objects_.erase(found);
  return object;
}

void EvictionOrder::put_back(Id id, const Object& object, uint32_t held) {
  const auto [place, is_new] = objects_.emplace(id, object);
  if (!is_new) return;
  place->second.held = held;
  list(id, place->second);
}

void EvictionOrder::remember(Id id, const Object& object, double now_s) {
  if (!learns()) return;
  gone_[id] = {object.last_use_s, object.watched_until_s, object.uses};
  sweep(now_s);
}

void EvictionOrder::miss(Id id, double now_s) {
  if (!learns() || objects_.contains(id)) return;
  Memory& m = gone_[id];
  if (m.uses > 0) note_return(m.last_use_s, m.watched_until_s, m.uses, now_s);
  m = {.last_use_s = now_s, .watched_until_s = now_s, .uses = m.uses + 1};
}

void EvictionOrder::hold(Id id) {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return;
  unlist(id, found->second);
  ++found->second.held;
}

void EvictionOrder::release(Id id) {
  const auto found = objects_.find(id);
  if (found == objects_.end() || found->second.held == 0) return;
  --found->second.held;
  list(id, found->second);
}

void EvictionOrder::set_demand(Id id, const Demand& demand) {
  const auto found = objects_.find(id);
  if (found == objects_.end() || found->second.demand == demand) return;
  unlist(id, found->second);
  found->second.demand = demand;
  list(id, found->second);
}

void EvictionOrder::set_demands(std::span<const Id> changed, const Wanted& wanted) {
  for (const Id id : changed) set_demand(id, wanted.demand(id));
}

void EvictionOrder::note_return(double last_use_s, double watched_until_s, uint32_t uses,
                                double now_s) {
  if (!learns()) return;
  const int object_class = ReturnModel::class_of(uses);
  model_.watched(object_class, watched_until_s - last_use_s, now_s - last_use_s);
  model_.returned(object_class, now_s - last_use_s);
}

void EvictionOrder::sweep(double now_s) {
  if (now_s < next_sweep_s_) return;
  const auto watched = static_cast<double>(objects_.size() + gone_.size());
  next_sweep_s_ = now_s + kSweepS * std::max(1.0, watched / kSweptObjects);
  for (auto& [id, o] : objects_) {
    model_.watched(ReturnModel::class_of(o.uses), o.watched_until_s - o.last_use_s,
                   now_s - o.last_use_s);
    o.watched_until_s = now_s;
  }
  for (auto it = gone_.begin(); it != gone_.end();) {
    Memory& m = it->second;
    model_.watched(ReturnModel::class_of(m.uses), m.watched_until_s - m.last_use_s,
                   now_s - m.last_use_s);
    m.watched_until_s = now_s;
    it = now_s - m.last_use_s > kMemoryS ? gone_.erase(it) : std::next(it);
  }
  model_.learn();
}

std::optional<EvictionOrder::Id> EvictionOrder::victim(double now_s, const May& may) {
  if (learns()) {
    sweep(now_s);
    if (const auto id = least_worth(now_s, may)) return id;
  }
  for (const auto& [key, id] : order_) {
    if (!may || may(id)) return id;
  }
  return std::nullopt;
}

// Objects of a group and of one span of ages are worth the same: the oldest stands for them.
std::optional<EvictionOrder::Id> EvictionOrder::least_worth(double now_s, const May& may) {
  std::optional<Id> found;
  double least = std::numeric_limits<double>::infinity();
  for (const auto& [group, members] : groups_) {
    const double miss_s = std::exp2(group.worth / kWorthSteps);
    auto member = members.begin();
    while (member != members.end()) {
      const int age = ReturnModel::age_of(now_s - member->first);
      const double worth = model_.index(group.object_class, age) * miss_s;
      // On to the next younger span, unless the oldest that may go is sought in this one.
      if (worth < least && (!may || may(member->second))) {
        least = worth;
        found = member->second;
      } else if (worth < least) {
        ++member;
        continue;
      }
      if (age == 0) break;
      member = members.upper_bound(
          {now_s - ReturnModel::age_begin_s(age), std::numeric_limits<Id>::max()});
    }
  }
  return found;
}

int32_t choose_eviction(std::span<const IdleSequence> idle, EvictPolicy policy) {
  const auto key = [&](const IdleSequence& sequence) {
    Object object;
    object.stored_s = object.last_use_s = static_cast<double>(sequence.last_used);
    object.demand = sequence.demand;
    Key own = row_of(policy).key(object);
    if (policy == EvictPolicy::kCostAware) {
      own.second = own.first;
      own.first = sequence.restore_s / (sequence.cells * std::max(sequence.idle_s, kLeastIdleS));
    }
    return own;
  };
  int32_t victim = -1;
  Key least;
  for (size_t i = 0; i < idle.size(); ++i) {
    if (!idle[i].durable || idle[i].pinned) continue;
    const Key own = key(idle[i]);
    if (victim >= 0 && !(own < least)) continue;
    victim = static_cast<int32_t>(i);
    least = own;
  }
  return victim;
}

}  // namespace hcache::policy
