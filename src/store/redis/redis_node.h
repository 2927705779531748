// What the Redis client knows of a node, of its connections, and of a call on its way.
//
// Threading: the client's thread.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>

#include "net/breaker.h"
#include "net/call_queue.h"
#include "redis/redis_client.h"
#include "redis/redis_url.h"

struct redisAsyncContext;

namespace hcache::store {

inline constexpr std::int64_t kMs = 1'000'000;
inline constexpr std::int64_t kProbeNs = 1'000 * kMs;  // for a ping's answer, or the map of slots
inline constexpr Breaker::Limits kNodeBreaker = {.unanswered = 2,
                                                 .first_pause_ns = 100 * kMs,
                                                 .longest_pause_ns = 10'000 * kMs,
                                                 .probe_ns = kProbeNs,
                                                 .least_wait_ns = 50 * kMs};

using Clock = std::int64_t;  // nanoseconds, monotonic

struct Connection;

struct Node {
  RedisAddress address;
  std::array<std::unique_ptr<Connection>, 2> lanes;  // for reads, for bulk
  bool listed = true;                                // a seed, or in the map of slots
  Breaker breaker{kNodeBreaker};
  [[nodiscard]] bool down() const { return breaker.open(); }
};

struct Call : QueuedCall {
  RedisCall call;
  int attempts = 0;
  Node* redirect = nullptr;  // a node that was named in an answer
  bool asking = false;       // … for this call alone
  Node* sent_to = nullptr;
  Clock sent = 0;
};
using CallPtr = std::shared_ptr<Call>;

// One connection. `context` is hiredis'; it ends in one of its callbacks.
struct Connection {
  Node* node = nullptr;
  redisAsyncContext* context = nullptr;
  bool want_read = false;
  bool want_write = false;
  bool close = false;         // by the loop, where no callback is running
  bool lost = false;          // it ended with calls in flight
  std::size_t in_flight = 0;  // bytes of payload
  std::deque<CallPtr> backlog;
};

}  // namespace hcache::store
