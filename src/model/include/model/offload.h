// Opens the devices that a user names and says which layers go where.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "model/device.h"
#include "model/placement.h"

namespace hcache::model {

// What the flags beside --device say, as llama-server has them; the defaults change nothing.
struct Offload {
  int n_layers = -1;         // --gpu-layers: the last so many go to the devices; -1: all
  std::string tensor_split;  // --tensor-split: proportions with commas; empty: equal parts
  // --override-tensor: PATTERN=DEVICE, several with commas between them.
  std::vector<std::string> override_tensors;
  bool one_device = false;    // --split-mode none: all layers on the main device
  bool share_layers = false;  // --split-mode tensor: each layer is shared by the devices
  int main_device = 0;        // --main-gpu: its index among those of --device
};

struct OpenDevices {
  std::vector<std::unique_ptr<Device>> devices;
  Placement placement;  // over them
};

// `names`: what Device::open() takes, several with commas between them; "none" is the CPU, "auto"
// every accelerator of this build, else the CPU. With n_layers the CPU has the layers before the
// last ones whether it is named or not, and takes no part of the split.
//
// kInvalidArgument: a device that is named twice, a flag that would do nothing, or one that is
// malformed; else what Device::open() says.
[[nodiscard]] Result<OpenDevices> open_devices(const std::string& names, int n_threads,
                                               const Offload& offload = {});

}  // namespace hcache::model
