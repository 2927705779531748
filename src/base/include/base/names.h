// Tables of values and the names that people give them.
#pragma once

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <string>
#include <string_view>
#include <utility>

#include "base/status.h"

namespace hcache {

template <typename T, std::size_t N>
using NameTable = std::array<std::pair<T, std::string_view>, N>;

// kInvalidArgument says `what` is meant, and which names there are.
template <typename T, std::size_t N>
[[nodiscard]] Result<T> parse_name(const NameTable<T, N>& table, std::string_view what,
                                   std::string_view name) {
  std::string names;
  for (const auto& [value, known] : table) {
    if (known == name) return value;
    names += fmt::format("{}{}", names.empty() ? "" : ", ", known);
  }
  return invalid_argument(fmt::format("no {} '{}'; there are {}", what, name, names));
}

}  // namespace hcache
