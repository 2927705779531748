// Which of the waiting requests is admitted next: the policies of --queue-policy.
//
// The queue is in order of batching.h's admitted_before(). A policy may reorder a window at its
// front. Pure functions. Threading: no state.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::policy {

enum class QueuePolicy : uint8_t {
  kFcfs,  // nothing is reordered
  kCar,   // by what has to be moved before a request can be computed (CaR §III-B)
};
[[nodiscard]] std::string_view queue_policy_name(QueuePolicy policy);  // "fcfs", "car"
// kInvalidArgument names the policies there are.
[[nodiscard]] Result<QueuePolicy> parse_queue_policy(std::string_view name);

// CaR's priority groups, first to last. Loading a part of a history and computing the rest ranks
// behind having none: without one there is nothing to wait for.
enum class QueueGroup : uint8_t {
  kResident,   // its history is in the device's memory
  kNoHistory,  // nothing is known of it
  kLoading,    // all or a part of its history has to be loaded
};

struct WindowEntry {
  bool preempted = false;  // was running before: goes on before anything else
  int32_t priority = 0;    // the client's; higher goes first whatever has to be moved
  int32_t overtaken = 0;   // how often a later one was admitted before it
  QueueGroup group = QueueGroup::kNoHistory;
};

struct QueueLimits {
  QueuePolicy policy = QueuePolicy::kFcfs;
  // Requests at the front among which groups count. One that was overtaken so often goes first: so
  // no request is overtaken by more later ones than the window holds.
  int32_t window = 16;
};

// The order of the window's entries, as indices; entries in order of the queue.
[[nodiscard]] std::vector<int32_t> window_order(std::span<const WindowEntry> window,
                                                const QueueLimits& limits);

}  // namespace hcache::policy
