// Which device has which layers of a model: partial offload and splits over several devices, as
// llama-server's flags of the same names say (--gpu-layers, --tensor-split, --override-tensor).
//
// Pure functions of their arguments.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model/device.h"

namespace hcache::model {

// Tensors whose name in the file the pattern is found in (an ECMAScript regular expression) go to
// the device; of several overrides the first that matches counts.
struct TensorOverride {
  std::string pattern;
  Device* device = nullptr;
};

struct Placement {
  // They share the last n_layers layers, in this order; empty: all layers are `rest`'s.
  std::vector<Device*> devices;
  Device* rest = nullptr;  // has the layers before them
  int n_layers = -1;       // more than the model has, or -1: all
  // Proportions of the devices, from 0 on; a device that has none is left out. Empty: equal parts.
  std::vector<double> split;
  // Each layer is shared by all devices instead, by these proportions (see shares.h). Excludes
  // overrides, and fewer layers than the model has.
  bool share_layers = false;
  // Whole layers alone can be moved, since a layer is computed on one device.
  std::vector<TensorOverride> overrides;
};

// "3,1": each >= 0, one above 0 at least. kInvalidArgument.
[[nodiscard]] Result<std::vector<double>> parse_split(std::string_view text);

// The device of each of n_layer layers. `tensors`: the names in the file. kInvalidArgument: the
// split has another number of parts than there are devices, or a pattern is no regular expression
// or matches no tensor that can be moved; kUnimplemented: a pattern would divide a layer.
[[nodiscard]] Result<std::vector<Device*>> place_layers(const Placement& placement, int n_layer,
                                                        std::span<const std::string> tensors);

}  // namespace hcache::model
