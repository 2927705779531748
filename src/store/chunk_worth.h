// What an eviction order knows of a chunk: its key and what keeping it is worth.
//
// Pure functions. Threading: any thread.
#pragma once

#include <cstdint>
#include <optional>

#include "policy/eviction.h"
#include "policy/miss_cost.h"
#include "store/store.h"

namespace hcache::store {

// Without costs all chunks are worth the same per byte.
[[nodiscard]] policy::Worth worth_of(const ChunkInfo& info,
                                     const std::optional<policy::TierCosts>& costs);
// The first bytes of an id. Whoever uses it as a key compares the whole id as well.
[[nodiscard]] std::uint64_t short_id(const ChunkId& id);

}  // namespace hcache::store
