// The search for the restore plan where several devices compute at once, private to the policy
// module: how each device's layers are split between two methods.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace hcache::policy {

struct DeviceSplits {
  int32_t recompute = 0;       // layers [0, recompute) are recomputed
  bool hidden_first = true;    // else the layers by KV come first
  std::vector<int32_t> first;  // per device: so many of its layers are of the first kind
};

struct SplitLimits {
  int32_t least_recompute = 0;
  int32_t most_recompute = 0;
  bool choice = false;  // whether any layer can be restored in two ways
};

struct SplitsFound {
  DeviceSplits splits;
  double makespan = 0;  // seconds
};

// Climbs from all layers by hidden states, and from all by KV, changing one number at a time, or
// all devices' splits in proportion, as long as the makespan falls; then from the best of it with
// the methods in the other order. device_layers: more than one.
[[nodiscard]] SplitsFound best_splits(std::span<const int32_t> device_layers,
                                      const SplitLimits& limits,
                                      const std::function<double(const DeviceSplits&)>& makespan);

}  // namespace hcache::policy
