#include "redis/redis_slots.h"

#include <hiredis.h>

#include <algorithm>

namespace hcache::store {
namespace {

std::optional<RedisAddress> parse_node(const redisReply& entry, const std::string& asked_host) {
  if (entry.type != REDIS_REPLY_ARRAY || entry.elements < 2) return std::nullopt;
  const redisReply& host = *entry.element[0];
  RedisAddress address{host.str == nullptr ? std::string() : std::string(host.str, host.len),
                       static_cast<std::uint16_t>(entry.element[1]->integer)};
  // A node that does not know its own name means: as you have reached me.
  if (address.host.empty() || address.host == "?") address.host = asked_host;
  if (address.port == 0) return std::nullopt;
  return address;
}

}  // namespace

std::vector<SlotRange> parse_slots(const redisReply& reply, const std::string& host) {
  std::vector<SlotRange> out;
  if (reply.type != REDIS_REPLY_ARRAY) return out;
  for (std::size_t i = 0; i < reply.elements; ++i) {
    const redisReply& range = *reply.element[i];
    if (range.type != REDIS_REPLY_ARRAY || range.elements < 3) continue;
    SlotRange& slots = out.emplace_back();
    slots.first =
        static_cast<int>(std::clamp<long long>(range.element[0]->integer, 0, kRedisSlots - 1));
    slots.last =
        static_cast<int>(std::clamp<long long>(range.element[1]->integer, 0, kRedisSlots - 1));
    slots.master = parse_node(*range.element[2], host);
    for (std::size_t r = 3; r < range.elements; ++r) {
      if (auto replica = parse_node(*range.element[r], host)) slots.replicas.push_back(*replica);
    }
  }
  return out;
}

}  // namespace hcache::store
