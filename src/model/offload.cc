#include "model/offload.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <set>
#include <utility>

#include "base/log.h"

namespace hcache::model {
namespace {

constexpr const char* kCpu = "cpu";

std::vector<std::string> split_at_commas(const std::string& text) {
  std::vector<std::string> parts;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    parts.push_back(text.substr(at, comma - at));
    at = comma + 1;
  }
  return parts;
}

std::vector<std::string> accelerators() {
  std::vector<std::string> names;
  for (const DeviceInfo& device : Device::list()) {
    if (device.name != kCpu) names.push_back(device.name);
  }
  return names.empty() ? std::vector<std::string>{kCpu} : names;
}

Result<std::vector<std::string>> device_names(const std::string& text, const Offload& offload) {
  std::vector<std::string> names = split_at_commas(text);
  if (text == "none") names = {kCpu};
  if (text == "auto") names = accelerators();
  const std::set<std::string> unique(names.begin(), names.end());
  if (unique.size() < names.size()) {
    return invalid_argument(fmt::format(
        "--device {} names a device twice; --tensor-split gives one more layers", text));
  }
  if (!offload.one_device) {
    if (offload.main_device != 0) {
      return invalid_argument(
          "--main-gpu says which device has all layers, which is so with --split-mode none alone");
    }
    return names;
  }
  if (!offload.tensor_split.empty()) {
    return invalid_argument("--tensor-split does nothing with --split-mode none");
  }
  if (offload.main_device < 0 || offload.main_device >= static_cast<int>(names.size())) {
    return invalid_argument(fmt::format("--main-gpu {}: --device names {} devices, from 0 on",
                                        offload.main_device, names.size()));
  }
  return std::vector<std::string>{names[static_cast<size_t>(offload.main_device)]};
}

// ggml's names as well: "CPU" is cpu, "CUDA0" cuda:0.
std::string our_name(std::string_view given) {
  if (given.starts_with("rpc:")) return std::string(given);
  std::string name(given);
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const size_t digits = name.find_first_of("0123456789");
  if (digits != std::string::npos && digits > 0 && name[digits - 1] != ':')
    name.insert(digits, ":");
  return name;
}

// The CPU is opened when something asks for it.
class Opener {
 public:
  explicit Opener(int n_threads) : n_threads_(n_threads) {}

  Result<Device*> open(const std::string& name) {
    for (const auto& device : open_) {
      if (device->name() == name) return device.get();
    }
    HCACHE_ASSIGN_OR_RETURN(auto device, Device::open(name, n_threads_));
    open_.push_back(std::move(device));
    return open_.back().get();
  }
  // "blk\.(1|2)\.=cpu".
  Result<TensorOverride> parse_override(const std::string& text) {
    const size_t at = text.rfind('=');
    if (at == std::string::npos || at == 0 || at + 1 == text.size()) {
      return invalid_argument(fmt::format(
          "--override-tensor '{}': expected PATTERN=DEVICE, such as 'blk\\.3\\.=cpu'", text));
    }
    const std::string name = our_name(std::string_view(text).substr(at + 1));
    const bool known = name == kCpu || std::any_of(open_.begin(), open_.end(), [&](const auto& d) {
                         return d->name() == name;
                       });
    if (!known) {
      return invalid_argument(fmt::format(
          "--override-tensor '{}': device {} is not one of --device; add it there", text, name));
    }
    HCACHE_ASSIGN_OR_RETURN(Device * device, open(name));
    return TensorOverride{.pattern = text.substr(0, at), .device = device};
  }
  std::vector<std::unique_ptr<Device>> take() { return std::move(open_); }

 private:
  int n_threads_;
  std::vector<std::unique_ptr<Device>> open_;
};

}  // namespace

Result<OpenDevices> open_devices(const std::string& names, int n_threads, const Offload& offload) {
  HCACHE_ASSIGN_OR_RETURN(const std::vector<std::string> wanted, device_names(names, offload));
  OpenDevices out;
  Placement& placement = out.placement;
  Opener opener(n_threads);
  const bool partial = offload.n_layers >= 0;
  for (const std::string& name : wanted) {
    HCACHE_ASSIGN_OR_RETURN(Device * device, opener.open(name));
    if (!partial || !device->is_cpu()) placement.devices.push_back(device);
  }
  if (partial) {
    if (placement.devices.empty()) {
      log::warn("--gpu-layers does nothing: --device {} names no device but the CPU", names);
    }
    HCACHE_ASSIGN_OR_RETURN(placement.rest, opener.open(kCpu));
  }
  placement.share_layers = offload.share_layers;
  if (placement.share_layers && placement.devices.size() < 2) {
    return invalid_argument(fmt::format(
        "--split-mode tensor shares each layer between the devices, and --device {} gives {}{}; "
        "name two or more",
        names, placement.devices.size(), partial ? " beside the CPU of --gpu-layers" : ""));
  }
  placement.n_layers = offload.n_layers;
  if (!offload.tensor_split.empty()) {
    HCACHE_ASSIGN_OR_RETURN(placement.split, parse_split(offload.tensor_split));
    if (placement.split.size() != placement.devices.size()) {
      return invalid_argument(fmt::format(
          "--tensor-split {}: {} parts for {} devices; give each of --device one, in their order{}",
          offload.tensor_split, placement.split.size(), placement.devices.size(),
          partial ? " (with --gpu-layers the CPU has none)" : ""));
    }
  }
  for (const std::string& texts : offload.override_tensors) {
    for (const std::string& text : split_at_commas(texts)) {
      HCACHE_ASSIGN_OR_RETURN(placement.overrides.emplace_back(), opener.parse_override(text));
    }
  }
  out.devices = opener.take();
  if (placement.rest == nullptr) placement.rest = out.devices.front().get();
  return out;
}

}  // namespace hcache::model
