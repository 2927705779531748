// What the requests in sight want of a cache, for the policies that look ahead.
//
// A request wants its objects from the time it joins the queue until it is done. Each object's
// Demand sums up those who want it; an EvictionOrder is told of it (set_demand) whenever it
// changes.
//
// Threading: plain values; the caller locks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

namespace hcache::policy {

struct Demand {
  // The queue ticket of the first that wants it; none: no waiting request does.
  std::optional<uint64_t> first;
  // CaR's (CaR §III-B.3): one for each who has entered the window, the first of the queue, and
  // another when it is dispatched; both are taken back when it is done.
  int64_t score = 0;

  friend bool operator==(const Demand&, const Demand&) = default;
};

class Wanted {
 public:
  using Id = uint64_t;

  static constexpr size_t kWindow = 16;  // requests

  // The request with this ticket in the queue (smaller: earlier; unique) wants the objects.
  // Like those below, returns objects whose demand may have changed.
  std::vector<Id> add(uint64_t ticket, std::vector<Id> ids);
  // It has left the queue and runs.
  std::vector<Id> dispatch(uint64_t ticket);
  // It wants nothing any more: it is done, or has left the queue otherwise.
  std::vector<Id> remove(uint64_t ticket);

  [[nodiscard]] Demand demand(Id id) const;

 private:
  struct Request {
    std::vector<Id> ids;
    int64_t score = 0;  // that it gives each
  };
  struct Object {
    std::set<uint64_t> tickets;
    int64_t score = 0;
    size_t requests = 0;
  };

  void rate(Request& request, int64_t score, std::vector<Id>* changed);
  void move_window(std::vector<Id>* changed);
  void leave_queue(uint64_t ticket, const Request& request);

  std::map<uint64_t, Request> waiting_;  // by ticket
  std::unordered_map<uint64_t, Request> running_;
  std::unordered_map<Id, Object> objects_;
};

}  // namespace hcache::policy
