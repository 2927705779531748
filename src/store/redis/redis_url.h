// Where a Redis server or cluster is, and who we are there.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::store {

struct RedisAddress {
  std::string host;
  std::uint16_t port = 6379;

  [[nodiscard]] std::string name() const;  // host:port
  friend bool operator==(const RedisAddress&, const RedisAddress&) = default;
};

struct RedisUrl {
  bool tls = false;
  std::string user;  // empty: the default user
  std::string password;
  std::vector<RedisAddress> seeds;  // of a cluster any, one is enough
  int database = 0;                 // of a single server
  std::string ca_file;              // with TLS; empty: the system's certificates

  // Without the password: what may be logged.
  [[nodiscard]] std::string display() const;
};

// redis[s]://[[user]:password@]host[:port][,host[:port]…][/database][?ca=FILE]
// Percent-encoding is taken back in user, password and FILE; an IPv6 address stands in brackets.
// invalid_argument says what is wrong and never shows the password.
[[nodiscard]] Result<RedisUrl> parse_redis_url(std::string_view url);

// "host:port", with an IPv6 address in brackets or bare as Redis prints it.
[[nodiscard]] Result<RedisAddress> parse_redis_address(std::string_view text);

// The cluster's hash slot of a key: CRC16 of the part in its first braces, if any, modulo 16,384.
inline constexpr int kRedisSlots = 16384;
[[nodiscard]] int redis_slot(std::string_view key);

}  // namespace hcache::store
