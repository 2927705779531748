#include "redis/redis_url.h"

#include <fmt/format.h>

#include "bytes.h"

namespace hcache::store {
namespace {

Status bad(const std::string& why) {
  return invalid_argument("the URL of a Redis server: " + why +
                          " (redis[s]://[[user]:password@]host[:port][,host…][/database])");
}

Result<std::string> percent_decoded(std::string_view text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out += text[i];
      continue;
    }
    unsigned value = 0;
    if (i + 2 >= text.size() || !parse_number(text.substr(i + 1, 2), 16, &value)) {
      return bad("'%' without two hex digits behind it");
    }
    out += static_cast<char>(value);
    i += 2;
  }
  return out;
}

// Cuts the text at the first `separator`; what follows it goes to *rest.
std::string_view split(std::string_view text, char separator, std::string_view* rest) {
  const std::size_t at = text.find(separator);
  *rest = at == std::string_view::npos ? std::string_view() : text.substr(at + 1);
  return text.substr(0, at);
}

}  // namespace

std::string RedisAddress::name() const {
  return host.find(':') == std::string::npos ? fmt::format("{}:{}", host, port)
                                             : fmt::format("[{}]:{}", host, port);
}

std::string RedisUrl::display() const {
  std::string hosts;
  for (const RedisAddress& seed : seeds) hosts += (hosts.empty() ? "" : ",") + seed.name();
  return fmt::format("{}://{}{}{}", tls ? "rediss" : "redis",
                     user.empty() && password.empty() ? "" : user + ":***@", hosts,
                     database == 0 ? "" : fmt::format("/{}", database));
}

Result<RedisAddress> parse_redis_address(std::string_view text) {
  RedisAddress address;
  std::string_view port;
  if (text.starts_with('[')) {
    const std::size_t end = text.find(']');
    if (end == std::string_view::npos) return bad("'[' without ']'");
    address.host = text.substr(1, end - 1);
    port = text.substr(end + 1);
    if (!port.empty() && !port.starts_with(':')) return bad("no ':' before the port");
    if (!port.empty()) port.remove_prefix(1);
  } else {
    const std::size_t colon = text.rfind(':');
    address.host = text.substr(0, colon);
    if (colon != std::string_view::npos) port = text.substr(colon + 1);
    if (colon != std::string_view::npos && port.empty()) return bad("a port is missing");
  }
  if (address.host.empty()) return bad("a host is missing");
  if (!port.empty() && (!parse_number(port, 10, &address.port) || address.port == 0)) {
    return bad(fmt::format("'{}' is not a port", port));
  }
  return address;
}

Result<RedisUrl> parse_redis_url(std::string_view url) {
  RedisUrl out;
  if (url.starts_with("rediss://")) {
    out.tls = true;
  } else if (!url.starts_with("redis://")) {
    return bad("it does not begin with redis:// or rediss://");
  }
  url.remove_prefix(url.find("://") + 3);
  std::string_view query;
  url = split(url, '?', &query);
  if (const std::size_t at = url.rfind('@'); at != std::string_view::npos) {
    std::string_view password;
    const std::string_view user = split(url.substr(0, at), ':', &password);
    HCACHE_ASSIGN_OR_RETURN(out.user, percent_decoded(user));
    HCACHE_ASSIGN_OR_RETURN(out.password, percent_decoded(password));
    if (out.password.empty()) return bad("a user without a password");
    url.remove_prefix(at + 1);
  }
  std::string_view database;
  std::string_view hosts = split(url, '/', &database);
  if (!database.empty() && (!parse_number(database, 10, &out.database) || out.database < 0)) {
    return bad(fmt::format("'{}' is not the number of a database", database));
  }
  do {
    HCACHE_ASSIGN_OR_RETURN(RedisAddress seed, parse_redis_address(split(hosts, ',', &hosts)));
    out.seeds.push_back(std::move(seed));
  } while (!hosts.empty());
  while (!query.empty()) {
    std::string_view value;
    const std::string_view name = split(split(query, '&', &query), '=', &value);
    if (name != "ca" || value.empty()) return bad(fmt::format("unknown option '{}'", name));
    if (!out.tls) return bad("'ca' goes with rediss:// alone");
    HCACHE_ASSIGN_OR_RETURN(out.ca_file, percent_decoded(value));
  }
  return out;
}

int redis_slot(std::string_view key) {
  if (const std::size_t open = key.find('{'); open != std::string_view::npos) {
    const std::size_t close = key.find('}', open + 1);
    if (close != std::string_view::npos && close > open + 1) {
      key = key.substr(open + 1, close - open - 1);
    }
  }
  // CRC-16/XMODEM, as Redis' cluster specification says.
  unsigned crc = 0;
  for (const char c : key) {
    crc ^= static_cast<unsigned>(static_cast<unsigned char>(c)) << 8;
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 0x8000U) != 0 ? (crc << 1) ^ 0x1021U : crc << 1;
    }
    crc &= 0xffffU;
  }
  return static_cast<int>(crc % kRedisSlots);
}

}  // namespace hcache::store
