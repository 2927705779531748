// Names in HTTP, which differ in case alone where they are the same.
//
// Threading: pure functions.
#pragma once

#include <strings.h>

#include <string_view>

namespace hcache::http {

[[nodiscard]] inline bool same_ignoring_case(std::string_view a, std::string_view b) {
  return a.size() == b.size() && strncasecmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace hcache::http
