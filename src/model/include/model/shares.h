// How several devices share every layer of a model (tensor parallelism, HCache §5): each has some
// of the heads and some of the feed-forward columns, and what they compute is added up.
//
// Pure functions of their arguments.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace hcache::model {

// The part of every layer that one device has: KV heads with the query heads that read them, and
// columns of the feed-forward block.
struct Share {
  int index = 0;  // among the shares; the first also has what is computed once: biases behind a
                  // sum, the output matrix
  int first_head_kv = 0;
  int n_head_kv = 0;
  int first_ff = 0;
  int n_ff = 0;

  friend bool operator==(const Share&, const Share&) = default;
};

// Something that can be cut at multiples of `unit`, the end excepted.
struct Divisible {
  int64_t n = 0;
  int64_t unit = 1;
  std::string what;    // for errors: "the KV heads (8)"
  std::string remedy;  // for errors, beside fewer devices and layers that are not shared; or empty
};

// Where each part ends, by these proportions (all above 0) as nearly as the units allow; every part
// gets one unit at least. kUnimplemented where there are fewer units than parts.
[[nodiscard]] Result<std::vector<int64_t>> cut_by_proportions(const Divisible& whole,
                                                              std::span<const double> parts);

// Shares of the heads and of the columns, each by these proportions.
[[nodiscard]] Result<std::vector<Share>> cut_shares(const Divisible& heads_kv,
                                                    const Divisible& columns,
                                                    std::span<const double> parts);

}  // namespace hcache::model
