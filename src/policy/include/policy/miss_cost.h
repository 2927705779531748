// What it costs when saved rows are not where they were: the seconds by which a restore takes
// longer, which cost-aware eviction weighs against the bytes that keeping them takes.
//
// Pure functions over the planner's costs (restore_plan.h). Threading: plain values.
#pragma once

#include <cstdint>

#include "policy/restore_plan.h"
#include "policy/save_plan.h"

namespace hcache::policy {

// Consecutive rows of a sequence with what is saved of them.
struct SavedRows {
  int64_t first = 0;  // position of the first
  int64_t rows = 0;
  double bytes = 0;       // that a restore reads
  int32_t projected = 0;  // layers that are restored from hidden states
  int32_t copied = 0;     // layers that are restored from K and V
};

// Of rows that were saved by this plan.
[[nodiscard]] SavedRows saved_rows(const SavePlan& plan, int64_t first, int64_t rows);

// Seconds for these rows, as their share of a full batch of a prefill, or a full slice of a
// restore.
[[nodiscard]] double recompute_rows_s(const RestoreCosts& costs, int64_t first, int64_t rows);
// Reading and computing side by side, the slower counts. bytes_per_s 0: nothing has to be read.
[[nodiscard]] double restore_rows_s(const RestoreCosts& costs, const SavedRows& saved,
                                    double bytes_per_s);

// A tier: what it saves over doing without it.
struct TierCosts {
  RestoreCosts costs;
  double bytes_per_s = 0;        // of reading from it; 0: host memory, which takes no time
  double below_bytes_per_s = 0;  // of the tier that has its rows as well; 0: there is none, and
                                 // what is gone is computed again
  // Seconds until the rows are there when this tier has not got them. What is below is computed
  // again where that is faster than reading it.
  [[nodiscard]] double without_s(const SavedRows& saved) const;
  // How much longer that takes than restoring from this tier; at least 0.
  [[nodiscard]] double miss_s(const SavedRows& saved) const;
};

}  // namespace hcache::policy
