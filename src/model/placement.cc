#include "model/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <numeric>
#include <optional>
#include <regex>

namespace hcache::model {
namespace {

// By --gpu-layers and --tensor-split alone.
Result<std::vector<Device*>> split_layers(const Placement& p, int n_layer) {
  std::vector<Device*> layers(static_cast<size_t>(n_layer), p.rest);
  if (p.devices.empty()) return layers;
  if (!p.split.empty() && p.split.size() != p.devices.size()) {
    return invalid_argument(fmt::format(
        "a tensor split of {} parts for {} devices; give one part to each device of --device",
        p.split.size(), p.devices.size()));
  }
  const std::vector<double> parts =
      p.split.empty() ? std::vector<double>(p.devices.size(), 1.0) : p.split;
  const double sum = std::accumulate(parts.begin(), parts.end(), 0.0);
  if (!std::isfinite(sum) || sum <= 0) {
    return invalid_argument("a tensor split without a part above 0");
  }
  std::vector<double> ends;  // of each device's share of [0, 1)
  double end = 0;
  for (const double part : parts) ends.push_back((end += part) / sum);
  const int n = p.n_layers < 0 ? n_layer : std::min(p.n_layers, n_layer);
  const int first = n_layer - n;
  for (int i = 0; i < n; ++i) {
    const auto owner = std::upper_bound(ends.begin(), ends.end(), static_cast<double>(i) / n);
    layers[static_cast<size_t>(first) + static_cast<size_t>(i)] =
        p.devices[static_cast<size_t>(owner - ends.begin())];
  }
  return layers;
}

// "blk.12.ffn_up.weight": 12.
std::optional<int> layer_of(std::string_view tensor) {
  constexpr std::string_view kBlock = "blk.";
  if (!tensor.starts_with(kBlock)) return std::nullopt;
  int layer = 0;
  const char* const end = tensor.data() + tensor.size();
  const auto [rest, error] = std::from_chars(tensor.data() + kBlock.size(), end, layer);
  if (error != std::errc() || rest == end || *rest != '.') return std::nullopt;
  return layer;
}

bool is_output(std::string_view tensor) {
  return tensor.starts_with("output.") || tensor.starts_with("output_norm.");
}

Result<std::vector<std::regex>> compile(std::span<const TensorOverride> overrides) {
  std::vector<std::regex> patterns;
  for (const TensorOverride& o : overrides) {
    try {
      patterns.emplace_back(o.pattern);
    } catch (const std::regex_error& e) {
      return invalid_argument(fmt::format("the tensor override '{}' is no regular expression: {}",
                                          o.pattern, e.what()));
    }
  }
  return patterns;
}

// Moves layers as the overrides say.
class Overrides {
 public:
  Overrides(std::span<const TensorOverride> overrides, std::vector<std::regex> patterns)
      : overrides_(overrides), patterns_(std::move(patterns)), used_(overrides.size(), false) {}

  Status apply(std::span<const std::string> tensors, std::vector<Device*>& layers) {
    const std::vector<Device*> before = layers;
    std::vector<std::string> first(layers.size());  // the tensor that decided for a layer
    for (const std::string& name : tensors) {
      const std::optional<int> layer = layer_of(name);
      if (!layer || *layer >= static_cast<int>(layers.size())) continue;
      const auto at = static_cast<size_t>(*layer);
      Device* const wanted = device_of(name, before[at]);
      if (first[at].empty()) {
        first[at] = name;
        layers[at] = wanted;
      } else if (wanted != layers[at]) {
        return unimplemented(fmt::format(
            "the tensor overrides put {} on {} and {} on {}; a layer is computed on one device, so "
            "a pattern must name all of its tensors, such as 'blk\\.{}\\.'",
            first[at], layers[at]->name(), name, wanted->name(), *layer));
      }
    }
    return check_output(tensors, layers.back());
  }

 private:
  Device* device_of(const std::string& tensor, Device* otherwise) {
    for (size_t i = 0; i < patterns_.size(); ++i) {
      if (!std::regex_search(tensor, patterns_[i])) continue;
      used_[i] = true;
      return overrides_[i].device;
    }
    return otherwise;
  }

  Status check_output(std::span<const std::string> tensors, Device* last) {
    for (const std::string& name : tensors) {
      if (!is_output(name)) continue;
      if (Device* const wanted = device_of(name, last); wanted != last) {
        return unimplemented(fmt::format(
            "the tensor overrides put {} on {}, but the output is computed where the last layer is "
            "({}); move that layer too",
            name, wanted->name(), last->name()));
      }
    }
    for (size_t i = 0; i < used_.size(); ++i) {
      if (used_[i]) continue;
      return invalid_argument(fmt::format(
          "the tensor override '{}' moves nothing: it is found in the name of no layer's tensor "
          "that another override does not move (embeddings are looked up on the host)",
          overrides_[i].pattern));
    }
    return {};
  }

  std::span<const TensorOverride> overrides_;
  std::vector<std::regex> patterns_;
  std::vector<bool> used_;
};

}  // namespace

Result<std::vector<double>> parse_split(std::string_view text) {
  std::vector<double> parts;
  double sum = 0;
  for (size_t at = 0; at <= text.size();) {
    const size_t comma = std::min(text.find(',', at), text.size());
    double part = 0;
    const auto [rest, error] = std::from_chars(text.data() + at, text.data() + comma, part);
    if (error != std::errc() || rest != text.data() + comma || !std::isfinite(part) || part < 0) {
      return invalid_argument(
          fmt::format("a tensor split of '{}': expected a number from 0 on for each device, with "
                      "commas between them",
                      text));
    }
    parts.push_back(part);
    sum += part;
    at = comma + 1;
  }
  if (sum <= 0) return invalid_argument(fmt::format("a tensor split of '{}' gives nothing", text));
  return parts;
}

Result<std::vector<Device*>> place_layers(const Placement& placement, int n_layer,
                                          std::span<const std::string> tensors) {
  HCACHE_ASSIGN_OR_RETURN(std::vector<Device*> layers, split_layers(placement, n_layer));
  if (placement.overrides.empty()) return layers;
  HCACHE_ASSIGN_OR_RETURN(auto patterns, compile(placement.overrides));
  HCACHE_RETURN_IF_ERROR(
      Overrides(placement.overrides, std::move(patterns)).apply(tensors, layers));
  return layers;
}

}  // namespace hcache::model
