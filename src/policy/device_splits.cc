#include "device_splits.h"

#include <algorithm>
#include <set>
#include <utility>

namespace hcache::policy {
namespace {

// What falls by less is the same sum in another order.
constexpr double kGain = 1e-9;

class Climb {
 public:
  Climb(std::span<const int32_t> device_layers, const SplitLimits& limits,
        const std::function<double(const DeviceSplits&)>& makespan, DeviceSplits start)
      : device_layers_(device_layers), limits_(limits), makespan_(makespan) {
    found.makespan = makespan_(start);
    found.splits = std::move(start);
  }

  void run() {
    bool better = true;
    while (better) {
      better = walk(limits_.most_recompute - limits_.least_recompute,
                    [this](int32_t by) { return with_recompute(by); });
      if (!limits_.choice) continue;
      // Changing a device's split alone helps while it is the slowest; where two are, both must.
      for (size_t d = 0; d < device_layers_.size(); ++d) {
        better |= walk(device_layers_[d], [this, d](int32_t by) { return with_one(d, by); });
      }
      const int32_t most = *std::max_element(device_layers_.begin(), device_layers_.end());
      better |= walk(most, [this, most](int32_t by) { return with_all(by, most); });
    }
  }

  SplitsFound found;

 private:
  // Takes steps of half the range, then of a quarter and so on, as long as they help.
  template <typename Moved>
  bool walk(int32_t range, Moved&& moved) {
    bool better = false;
    for (int32_t stride = (range + 1) / 2; stride > 0; stride /= 2) {
      for (const int32_t by : {stride, -stride}) {
        while (try_out(moved(by))) better = true;
      }
    }
    return better;
  }

  bool try_out(DeviceSplits splits) {
    std::vector<int32_t> key = splits.first;
    key.push_back(splits.recompute);
    if (!tried_.insert(std::move(key)).second) return false;
    const double makespan = makespan_(splits);
    if (makespan >= found.makespan * (1 - kGain)) return false;
    found = {std::move(splits), makespan};
    return true;
  }

  [[nodiscard]] DeviceSplits with_recompute(int32_t by) const {
    DeviceSplits splits = found.splits;
    splits.recompute =
        std::clamp(splits.recompute + by, limits_.least_recompute, limits_.most_recompute);
    return splits;
  }
  [[nodiscard]] DeviceSplits with_one(size_t d, int32_t by) const {
    DeviceSplits splits = found.splits;
    splits.first[d] = std::clamp(splits.first[d] + by, 0, device_layers_[d]);
    return splits;
  }
  // In proportion to their layers.
  [[nodiscard]] DeviceSplits with_all(int32_t by, int32_t most) const {
    DeviceSplits splits = found.splits;
    for (size_t d = 0; d < splits.first.size(); ++d) {
      const int32_t share = by * device_layers_[d] / most;
      splits.first[d] = std::clamp(splits.first[d] + share, 0, device_layers_[d]);
    }
    return splits;
  }

  const std::span<const int32_t> device_layers_;
  const SplitLimits limits_;
  const std::function<double(const DeviceSplits&)>& makespan_;
  std::set<std::vector<int32_t>> tried_;  // per device, then the recomputed layers
};

}  // namespace

SplitsFound best_splits(std::span<const int32_t> device_layers, const SplitLimits& limits,
                        const std::function<double(const DeviceSplits&)>& makespan) {
  const auto climb = [&](DeviceSplits start) {
    Climb climb(device_layers, limits, makespan, std::move(start));
    climb.run();
    return std::move(climb.found);
  };
  const std::vector<int32_t> all(device_layers.begin(), device_layers.end());
  const std::vector<int32_t> none(device_layers.size(), 0);
  const int32_t least = limits.least_recompute;
  SplitsFound best = climb({.recompute = least, .hidden_first = true, .first = all});
  if (!limits.choice) return best;
  const auto keep_better = [&](SplitsFound found) {
    if (found.makespan < best.makespan) best = std::move(found);
  };
  keep_better(climb({.recompute = least, .hidden_first = true, .first = none}));
  // The same shares in the other order.
  DeviceSplits turned = best.splits;
  turned.hidden_first = false;
  for (size_t d = 0; d < all.size(); ++d) turned.first[d] = all[d] - turned.first[d];
  keep_better(climb(std::move(turned)));
  return best;
}

}  // namespace hcache::policy
