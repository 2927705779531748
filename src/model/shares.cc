#include "model/shares.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace hcache::model {

Result<std::vector<int64_t>> cut_by_proportions(const Divisible& whole,
                                                std::span<const double> parts) {
  const int64_t n_units = (whole.n + whole.unit - 1) / whole.unit;
  const auto n_parts = static_cast<int64_t>(parts.size());
  if (n_units < n_parts) {
    return unimplemented(fmt::format(
        "{} can be cut into {} at most, not into a part for each of {} devices; use fewer devices "
        "or --split-mode layer{}",
        whole.what, n_units, n_parts, whole.remedy.empty() ? "" : ", or " + whole.remedy));
  }
  const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  std::vector<int64_t> ends;
  double share = 0;
  int64_t units = 0;
  for (int64_t i = 0; i < n_parts; ++i) {
    share += parts[static_cast<size_t>(i)] / sum;
    const int64_t wanted = std::llround(share * static_cast<double>(n_units));
    units = std::clamp(wanted, units + 1, n_units - (n_parts - 1 - i));
    ends.push_back(std::min(units * whole.unit, whole.n));
  }
  ends.back() = whole.n;
  return ends;
}

Result<std::vector<Share>> cut_shares(const Divisible& heads_kv, const Divisible& columns,
                                      std::span<const double> parts) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int64_t> heads, cut_by_proportions(heads_kv, parts));
  HCACHE_ASSIGN_OR_RETURN(const std::vector<int64_t> ff, cut_by_proportions(columns, parts));
  std::vector<Share> shares;
  for (size_t i = 0; i < parts.size(); ++i) {
    const int64_t head = i == 0 ? 0 : heads[i - 1];
    const int64_t column = i == 0 ? 0 : ff[i - 1];
    shares.push_back({.index = static_cast<int>(i),
                      .first_head_kv = static_cast<int>(head),
                      .n_head_kv = static_cast<int>(heads[i] - head),
                      .first_ff = static_cast<int>(column),
                      .n_ff = static_cast<int>(ff[i] - column)});
  }
  return shares;
}

}  // namespace hcache::model
