#include "policy/packing.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace hcache::policy {
namespace {

constexpr std::array<std::string_view, 5> kModeNames = {"auto", "on", "off", "q8_0", "q4_0"};
constexpr double kMargin = 0.01;       // of the time; less is noise of what was measured
constexpr double kRoundingGain = 0.1;  // of the time, for which exactness is given up
constexpr double kChangeGain = 0.2;    // for which what is saved is

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

Result<PackMode> choose_rounding(const RestoreCosts& costs, const SaveRequest& request,
                                 const KvPackings& packings, const RoundingKl& kl, double most_kl,
                                 PackMode in_force) {
  const auto restored_s = [&](const RestoreCosts& with) -> Result<double> {
    HCACHE_ASSIGN_OR_RETURN(const SavePlan plan, plan_save(with, request, nullptr));
    HCACHE_ASSIGN_OR_RETURN(const Plan restore,
                            plan_restore_of(with, request, request.history, plan.layers));
    return restore.predicted.makespan_s;
  };
  const auto packed_s = [&](const KvPacking& packing) {
    return restored_s(
        with_packed(costs, {.share = 1, .ratio = packing.ratio}, packing.unpack_row_s));
  };
  HCACHE_ASSIGN_OR_RETURN(double exact_s, restored_s(costs));
  if (packings.lossless.ratio > 0) {
    HCACHE_ASSIGN_OR_RETURN(const double packed, packed_s(packings.lossless));
    exact_s = std::min(exact_s, packed);
  }
  PackMode best = PackMode::kAuto;
  double best_s = exact_s * (1 - kRoundingGain);
  double in_force_s = in_force == PackMode::kAuto ? exact_s : 0;  // 0: no longer allowed
  for (const auto& [mode, divergence] :
       {std::pair(PackMode::kQ8_0, kl.q8_0), std::pair(PackMode::kQ4_0, kl.q4_0)}) {
    if (divergence > most_kl || packings.of(mode).ratio <= 0) continue;
    HCACHE_ASSIGN_OR_RETURN(const double rounded_s, packed_s(packings.of(mode)));
    if (mode == in_force) in_force_s = rounded_s;
    if (rounded_s >= best_s) continue;
    best = mode;
    best_s = rounded_s;
  }
  const double found_s = best == PackMode::kAuto ? exact_s : best_s;
  return in_force_s > 0 && found_s > in_force_s * (1 - kChangeGain) ? in_force : best;
}

}  // namespace hcache::policy
