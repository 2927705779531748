// A Redis cluster's map of slots, as a node tells it.
//
// Threading: plain values.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "redis/redis_url.h"

struct redisReply;

namespace hcache::store {

// Slots first to last, both within the map, and who has them. No master: its entry can't be read.
struct SlotRange {
  int first = 0;
  int last = 0;
  std::optional<RedisAddress> master;
  std::vector<RedisAddress> replicas;
};

// A reply to CLUSTER SLOTS that was asked of `host`; what can't be read in it is left out. Empty:
// not an array, or a cluster without slots yet.
[[nodiscard]] std::vector<SlotRange> parse_slots(const redisReply& reply, const std::string& host);

}  // namespace hcache::store
