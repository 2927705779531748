// Which rows of a sequence matter to layers that see a window of them.
//
// A row attends the last `window` rows, its own included. Its attention looks at the arena from
// attended_from() on, which depends on its position alone: so the bits of its result do not depend
// on what else is held. A sequence of n tokens holds rows from held_from() on, and what is restored
// of it begins with needed_from(), a little before its window, so that it can still be trimmed.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/attention.h"
#include "engine/engine.h"

namespace hcache::engine {

// Rows count in the kernel's partitions from a sequence's start.
constexpr int64_t whole_partitions(int64_t rows) {
  return std::max<int64_t>(rows, 0) / kAttentionPartition * kAttentionPartition;
}

constexpr int64_t attended_from(int64_t window, int64_t pos) {
  return whole_partitions(pos + 1 - window);
}

constexpr int64_t needed_from(int64_t window, int64_t n_tokens) {
  return std::max<int64_t>(0, n_tokens - window - kWindowSlack);
}

// Early enough for erase_range(), which moves what is needed to another place of a partition.
constexpr int64_t held_from(int64_t window, int64_t n_tokens) {
  return whole_partitions(n_tokens - window - kAttentionPartition);
}
static_assert(kWindowSlack <= kAttentionPartition);

// Cells that one sequence may take at most, beside the rows of a step.
constexpr int64_t most_cells(int64_t window) { return window + 2 * int64_t{kAttentionPartition}; }

}  // namespace hcache::engine
