// What a snapshot of kept rows begins with (state/kept_state.h).
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "policy/compression.h"

namespace hcache::state {

struct KeptHeader {
  static constexpr uint32_t kMagic = 0x32535248;  // "HRS2"

  uint32_t magic = kMagic;
  uint32_t n_layer = 0;
  uint64_t n_tokens = 0;
  uint64_t row_bytes = 0;  // of K, and of V
  uint64_t n_scored = 0;   // the first tokens whose rows have scores
};
static_assert(std::endian::native == std::endian::little && sizeof(KeptHeader) == 32);

// The header, how many rows each layer has, and RowScores::top of the first rows in F16.
// `scores` may have none.
[[nodiscard]] std::vector<std::byte> kept_head(const engine::Engine& engine, int64_t n_tokens,
                                               std::span<const int64_t> rows,
                                               const policy::RowScores& scores);

struct KeptHead {
  std::vector<int64_t> rows{};  // of each layer
  policy::RowScores scores{};   // of the first rows; .sum is empty
  size_t n_bytes = 0;           // up to where the layers' rows begin, the frame included
};
// What the first bytes of a snapshot's parts, which have n_bytes in all, say of n_tokens tokens;
// nullopt: there are too few. kDataLoss where they are not this engine's.
[[nodiscard]] Result<std::optional<KeptHead>> read_kept_head(const engine::Engine& engine,
                                                             std::span<const std::byte> bytes,
                                                             size_t n_bytes, int64_t n_tokens);

}  // namespace hcache::state
