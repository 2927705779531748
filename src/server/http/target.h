// A request target taken apart: percent-decoding, dot segments, query.
//
// Threading: pure functions.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "http/message.h"

namespace hcache::http {

struct Target {
  std::string path;
  std::vector<std::string> segments;
  Pairs query;
};

// The path and query of a target in origin form ("/a?b") or absolute form ("http://host/a?b"); "*"
// gives the path "*" without segments. Slashes are split at before decoding, so "%2F" stays inside
// its segment; empty and "." segments vanish, ".." takes one away. invalid_argument: anything but
// visible ASCII, a fragment, bad or control characters after '%', ".." above the root.
[[nodiscard]] Result<Target> parse_target(std::string_view target);

}  // namespace hcache::http
