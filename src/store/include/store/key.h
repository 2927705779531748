// The key of an encrypted store (StoreOptions::key), and the file that it comes from.
//
// Threading: plain values.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/env.h"
#include "base/status.h"

namespace hcache::store {

struct StoreKey {
  std::array<std::uint8_t, 32> bytes{};
};

// A file holds a key as 64 hex digits. invalid_argument: it holds something else.
[[nodiscard]] Result<StoreKey> read_store_key(Env& env, const std::string& path);
// Writes a new key to a new file (mode 0600). already_exists: there is one; it is left alone.
[[nodiscard]] Status make_store_key(Env& env, const std::string& path);

}  // namespace hcache::store
