// JSON as it comes from and goes to the network.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "base/status.h"

namespace hcache::api {

// Objects keep the order of their keys: the order of a schema's properties is the order in which a
// model writes them.
using Json = nlohmann::ordered_json;

struct BodyLimits {
  size_t max_depth = 64;                // of nested arrays and objects
  size_t max_values = size_t{1} << 20;  // in all; a small body can hold very many empty arrays
};

// Parses untrusted bytes in time linear in their number. kInvalidArgument names the byte where
// they stop being JSON (NaN and infinities are none) or UTF-8, or the limit they exceed. Of keys
// that an object holds twice, the first counts.
[[nodiscard]] Result<Json> parse_body(std::string_view body, const BodyLimits& limits = {});

// Compact text; bytes that are no UTF-8 become U+FFFD.
[[nodiscard]] std::string to_text(const Json& json);

// "2026-01-31T23:59:59.000000Z" (RFC 3339); nanoseconds since 1970-01-01 UTC.
[[nodiscard]] std::string moment_text(int64_t wall_ns);

}  // namespace hcache::api
