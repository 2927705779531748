#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "base/names.h"
#include "base/units.h"
#include "model/streamed_weights.h"

namespace hcache::model {
namespace {

constexpr NameTable<WeightPlace, 4> kPlaces = {{
    {WeightPlace::kAuto, "auto"},
    {WeightPlace::kResident, "resident"},
    {WeightPlace::kHost, "host"},
    {WeightPlace::kDisk, "disk"},
}};

uint64_t sum(const std::vector<uint64_t>& values, size_t begin, size_t end) {
  return std::accumulate(values.begin() + static_cast<std::ptrdiff_t>(begin),
                         values.begin() + static_cast<std::ptrdiff_t>(end), uint64_t{0});
}

// What is on the device when the layers come by halves: all of them, so that the slots hold no
// more than the largest half of each kind.
uint64_t halved_bytes(const WeightSizes& sizes) {
  uint64_t bytes = sizes.shared_bytes;
  for (const size_t half : {0, 1}) {
    uint64_t largest = 0;
    for (const auto& halves : sizes.half_bytes) largest = std::max(largest, halves.at(half));
    bytes += largest;
  }
  return bytes;
}

// What is on the device when the first `n_resident` layers are, and the others share two slots.
uint64_t device_bytes(const WeightSizes& sizes, size_t n_resident) {
  const size_t n_layer = sizes.layer_bytes.size();
  uint64_t bytes = sizes.shared_bytes + sum(sizes.layer_bytes, 0, n_resident);
  if (n_resident < n_layer) {
    const auto first = sizes.slot_bytes.begin() + static_cast<std::ptrdiff_t>(n_resident);
    bytes += std::min<uint64_t>(2, n_layer - n_resident) *
             *std::max_element(first, sizes.slot_bytes.end());
  }
  return bytes;
}

}  // namespace

Result<WeightPlace> parse_weight_place(std::string_view name) {
  return parse_name(kPlaces, "place of weights", name);
}

std::string_view weight_place_name(WeightPlace place) {
  for (const auto& [value, name] : kPlaces) {
    if (value == place) return name;
  }
  return "unknown";
}

uint64_t StreamedWeights::n_bytes() const {
  uint64_t n = 0;
  for (const StreamedUnit& unit : units) n += unit.n_bytes;
  return n;
}

std::string StreamedWeights::describe() const {
  std::string through;
  if (halves) {
    through = fmt::format("half by half through slots of {} and {}", format_bytes(slot_bytes[0]),
                          format_bytes(slot_bytes[1]));
  } else {
    through = fmt::format("through {} slots of {}", units.size() > 1 ? 2 : 1,
                          format_bytes(std::max(slot_bytes[0], slot_bytes[1])));
  }
  return fmt::format("{} streamed from {} ({} for a step) {}", n_layers(),
                     place == WeightPlace::kHost ? "host memory" : "disk", format_bytes(n_bytes()),
                     through);
}

Result<WeightPlan> plan_weights(WeightPlace wanted, const WeightSizes& sizes,
                                const WeightRoom& room) {
  if (wanted == WeightPlace::kHost && !room.own_memory) {
    return invalid_argument(
        "--weights host needs a device with memory of its own: on this one the weights are in host "
        "memory when they are resident; use --weights resident or disk");
  }
  const size_t n_layer = sizes.layer_bytes.size();
  const uint64_t all = device_bytes(sizes, n_layer);
  const bool fits = all <= room.device_bytes;
  if (wanted == WeightPlace::kResident && room.device_limited && !fits) {
    return resource_exhausted(
        fmt::format("the weights take {} of device memory, --device-memory leaves {} for them; "
                    "raise it, or use --weights auto",
                    format_bytes(all), format_bytes(room.device_bytes)));
  }
  const bool streams = wanted == WeightPlace::kAuto ? !fits : wanted != WeightPlace::kResident;
  if (!streams || (room.device_limited && fits)) {
    return WeightPlan{WeightPlace::kResident, static_cast<int>(n_layer), false};
  }
  const bool bounded = wanted == WeightPlace::kAuto || room.device_limited;
  const uint64_t whole = device_bytes(sizes, 0);
  const bool halves = whole > room.device_bytes && !sizes.half_bytes.empty();
  const uint64_t least = halves ? halved_bytes(sizes) : whole;
  if (bounded && least > room.device_bytes) {
    return resource_exhausted(fmt::format(
        "{} at a time and what belongs to no layer take {} of device memory, there are {} for "
        "weights; give it more (--device-memory), or make the KV cache (--ctx) or the batch "
        "smaller",
        halves ? "half a layer of each kind" : "two layers", format_bytes(least),
        format_bytes(room.device_bytes)));
  }
  size_t n_resident = 0;
  while (bounded && !halves && n_resident + 1 < n_layer &&
         device_bytes(sizes, n_resident + 1) <= room.device_bytes) {
    ++n_resident;
  }
  WeightPlan plan{wanted, static_cast<int>(n_resident), halves};
  if (wanted == WeightPlace::kAuto) {
    const uint64_t streamed = sum(sizes.layer_bytes, n_resident, n_layer);
    const bool in_host = room.own_memory && streamed <= room.host_bytes;
    plan.place = in_host ? WeightPlace::kHost : WeightPlace::kDisk;
  }
  return plan;
}

}  // namespace hcache::model
