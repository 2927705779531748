#include "policy/wanted.h"

#include <utility>

namespace hcache::policy {

std::vector<Wanted::Id> Wanted::add(uint64_t ticket, std::vector<Id> ids) {
  std::vector<Id> changed = ids;
  for (const Id id : ids) {
    Object& object = objects_[id];
    object.tickets.insert(ticket);
    ++object.requests;
  }
  waiting_[ticket].ids = std::move(ids);
  move_window(&changed);
  return changed;
}

std::vector<Wanted::Id> Wanted::dispatch(uint64_t ticket) {
  auto left = waiting_.extract(ticket);
  if (left.empty()) return {};
  std::vector<Id> changed;
  Request& request = running_[ticket] = std::move(left.mapped());
  leave_queue(ticket, request);
  rate(request, 2, &changed);
  move_window(&changed);
  return changed;
}

std::vector<Wanted::Id> Wanted::remove(uint64_t ticket) {
  Request request;
  if (auto left = waiting_.extract(ticket); !left.empty()) {
    request = std::move(left.mapped());
    leave_queue(ticket, request);
  } else if (auto done = running_.extract(ticket); !done.empty()) {
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

Demand Wanted::demand(Id id) const {
  const auto found = objects_.find(id);
  if (found == objects_.end()) return {};
  const Object& object = found->second;
  Demand demand;
  if (!object.tickets.empty()) demand.first = *object.tickets.begin();
  demand.score = object.score;
  return demand;
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

void Wanted::leave_queue(uint64_t ticket, const Request& request) {
  for (const Id id : request.ids) objects_.at(id).tickets.erase(ticket);
}

}  // namespace hcache::policy
