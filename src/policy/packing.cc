#include "policy/packing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace hcache::policy {
namespace {

constexpr std::array<std::string_view, 3> kModeNames = {"auto", "on", "off"};
constexpr double kMargin = 0.01;  // of the time; less is noise of what was measured

}  // namespace

std::string_view pack_mode_name(PackMode mode) { return kModeNames.at(static_cast<size_t>(mode)); }

Result<PackMode> parse_pack_mode(std::string_view name) {
  const auto at = std::find(kModeNames.begin(), kModeNames.end(), name);
  if (at != kModeNames.end()) return static_cast<PackMode>(at - kModeNames.begin());
  return invalid_argument(fmt::format("'{}' is none of {}", name, fmt::join(kModeNames, ", ")));
}

RestoreCosts with_packed(const RestoreCosts& costs, const PackedShare& packed,
                         double unpack_row_s) {
  RestoreCosts out = costs;
  for (LayerCosts& layer : out.layers) {
    const double left = 1 - packed.share * (1 - packed.ratio);
    layer.kv_bytes = std::llround(static_cast<double>(layer.kv_bytes) * left);
    layer.load_kv = layer.load_kv.with_row_s(packed.share * unpack_row_s);
  }
  return out;
}

Result<bool> packing_pays(const RestoreCosts& costs, const SaveRequest& request,
                          const std::vector<Encoding>& layers, const KvPacking& packing,
                          bool was_packed) {
  if (packing.ratio <= 0) return false;
  HCACHE_ASSIGN_OR_RETURN(const Plan plain,
                          plan_restore_of(costs, request, request.history, layers));
  const RestoreCosts packed_costs =
      with_packed(costs, {.share = 1, .ratio = packing.ratio}, packing.unpack_row_s);
  HCACHE_ASSIGN_OR_RETURN(const Plan packed,
                          plan_restore_of(packed_costs, request, request.history, layers));
  const double gain = plain.predicted.makespan_s - packed.predicted.makespan_s;
  return was_packed ? gain > 0 : gain > kMargin * plain.predicted.makespan_s;
}

}  // namespace hcache::policy
