// Which objects the requests in the queue want, and who of them first: what policies that look
// ahead are told (EvictionOrder::set_wanted).
//
// Threading: plain values; the caller locks.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace hcache::policy {

class Wanted {
 public:
  using Id = uint64_t;

  // The request at this place in the queue (smaller: earlier; nobody else's) wants the objects.
  void add(uint64_t place, std::vector<Id> ids) {
    for (const Id id : ids) places_[id].insert(place);
    ids_[place] = std::move(ids);
  }
  // It waits no longer. Returns what it wanted.
  std::vector<Id> remove(uint64_t place) {
    auto wanted = ids_.extract(place);
    if (wanted.empty()) return {};
    for (const Id id : wanted.mapped()) {
      const auto places = places_.find(id);
      if (places == places_.end()) continue;  // named twice
      places->second.erase(place);
      if (places->second.empty()) places_.erase(places);
    }
    return std::move(wanted.mapped());
  }
  // The place of the first that wants it.
  [[nodiscard]] std::optional<uint64_t> first(Id id) const {
    const auto places = places_.find(id);
    if (places == places_.end()) return std::nullopt;
    return *places->second.begin();
  }

 private:
  std::unordered_map<uint64_t, std::vector<Id>> ids_;  // by place
  std::unordered_map<Id, std::set<uint64_t>> places_;
};

}  // namespace hcache::policy
