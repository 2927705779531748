// What a snapshot of kept rows begins with (state/kept_state.h).
#pragma once

#include <bit>
#include <cstdint>

namespace hcache::state {

struct KeptHeader {
  static constexpr uint32_t kMagic = 0x31535248;  // "HRS1"

  uint32_t magic = kMagic;
  uint32_t n_layer = 0;
  uint64_t n_tokens = 0;
  uint64_t row_bytes = 0;  // of K, and of V
};
static_assert(std::endian::native == std::endian::little && sizeof(KeptHeader) == 24);

}  // namespace hcache::state
