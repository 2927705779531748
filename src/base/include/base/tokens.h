// What several modules ask of chains of tokens.
//
// Threading: pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

namespace hcache {

// How many leading tokens two chains share.
[[nodiscard]] inline int64_t common_prefix(std::span<const int32_t> a, std::span<const int32_t> b) {
  return std::ranges::mismatch(a, b).in1 - a.begin();
}

}  // namespace hcache
