#include "policy/wanted.h"

#include <utility>

namespace hcache::policy {

std::vector<Wanted::Id> Wanted::add(uint64_t place, std::vector<Id> ids) {
  std::vector<Id> changed = ids;
  for (const Id id : ids) {
    Object& object = objects_[id];
    object.places.insert(place);
    ++object.requests;
  }
  waiting_[place].ids = std::move(ids);
  move_window(&changed);
  return changed;
}

std::vector<Wanted::Id> Wanted::dispatch(uint64_t place) {
  auto left = waiting_.extract(place);
  if (left.empty()) return {};
  std::vector<Id> changed;
  Request& request = running_[place] = std::move(left.mapped());
  leave_queue(place, request);
  rate(request, 2, &changed);
  move_window(&changed);
  return changed;
}

std::vector<Wanted::Id> Wanted::remove(uint64_t place) {
  Request request;
  if (auto left = waiting_.extract(place); !left.empty()) {
    request = std::move(left.mapped());
    leave_queue(place, request);
  } else if (auto done = running_.extract(place); !done.empty()) {
    request = std::move(done.mapped());
  }
  std::vector<Id> changed;
  rate(request, 0, &changed);
  for (const Id id : request.ids) {
    const auto object = objects_.find(id);
    if (--object->second.requests == 0) objects_.erase(object);
  }
  changed = std::move(request.ids);
  move_window(&changed);
  return changed;
}

Wish Wanted::wish(Id id) const {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return {};
  const Object& object = found->second;
  Wish wish;
  if (!object.places.empty()) wish.first = *object.places.begin();
  wish.score = object.score;
  return wish;
}

void Wanted::rate(Request& request, int64_t score, std::vector<Id>* changed) {
  if (request.score == score) return;
  for (const Id id : request.ids) objects_.at(id).score += score - request.score;
  request.score = score;
  changed->insert(changed->end(), request.ids.begin(), request.ids.end());
}

// One change of the queue lets one request in or pushes one out.
void Wanted::move_window(std::vector<Id>* changed) {
  auto request = waiting_.begin();
  for (size_t i = 0; i <= kWindow && request != waiting_.end(); ++i, ++request) {
    rate(request->second, i < kWindow ? 1 : 0, changed);
  }
}

void Wanted::leave_queue(uint64_t place, const Request& request) {
  for (const Id id : request.ids) objects_.at(id).places.erase(place);
}

}  // namespace hcache::policy
