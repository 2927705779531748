// Packed pages of K and V: fewer bytes over the link, for compute that unpacks them. Whether they
// are worth it; docs/planner.md, "Packed pages". Without loss, or rounded to so few bits.
//
// Pure functions; units and threading as in restore_plan.h.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "policy/save_plan.h"

namespace hcache::policy {

enum class PackMode : uint8_t {
  kAuto,  // where restores come earlier by it
  kOn,    // wherever K and V can be packed
  kOff,
  kQ8_0,  // rounded to eight bits and a scale for 32 values, wherever they can be
  kQ4_0,  // to four bits
};
[[nodiscard]] std::string_view pack_mode_name(
    PackMode mode);  // "auto", "on", "off", "q8_0", "q4_0"
// What is restored is no longer what was computed.
[[nodiscard]] inline bool loses(PackMode mode) {
  return mode == PackMode::kQ8_0 || mode == PackMode::kQ4_0;
}
[[nodiscard]] Result<PackMode> parse_pack_mode(std::string_view name);

// What packing was measured to do.
struct KvPacking {
  double ratio = 0;         // bytes of a packed page over those of a plain one; 0: can't be packed
  double unpack_row_s = 0;  // of one layer's K and V of a token
};

struct KvPackings {
  KvPacking lossless{};
  KvPacking q8_0{};
  KvPacking q4_0{};

  [[nodiscard]] const KvPacking& of(PackMode mode) const {
    if (mode == PackMode::kQ8_0) return q8_0;
    return mode == PackMode::kQ4_0 ? q4_0 : lossless;
  }
};

// Mean KL divergence, in nats, of predictions behind rounded K and V.
struct RoundingKl {
  double q8_0 = 0;
  double q4_0 = 0;
};

// Of the K and V that a restore may read.
struct PackedShare {
  double share = 0;  // of the pages' rows that are packed
  double ratio = 1;  // of those pages
};

// The costs of restores where so much of K and V is packed.
[[nodiscard]] RestoreCosts with_packed(const RestoreCosts& costs, const PackedShare& packed,
                                       double unpack_row_s);

// Whether the best restore from these saved layers comes earlier with K and V packed than with them
// plain, or (`was_packed`: this was chosen before) not later. False where it makes no difference.
// Errors: as plan_save().
[[nodiscard]] Result<bool> packing_pays(const RestoreCosts& costs, const SaveRequest& request,
                                        const std::vector<Encoding>& layers,
                                        const KvPacking& packing, bool was_packed);

// To what K and V are rounded where a mean KL divergence of `most_kl` is allowed: to what lets the
// best restore of the best save plan come earliest; kAuto, without loss, unless rounding makes that
// a tenth earlier. `in_force`, which was chosen before, stays while it is allowed and nothing is a
// fifth earlier: state that was saved otherwise is of no use any more. Errors: as plan_save().
[[nodiscard]] Result<PackMode> choose_rounding(const RestoreCosts& costs,
                                               const SaveRequest& request,
                                               const KvPackings& packings, const RoundingKl& kl,
                                               double most_kl, PackMode in_force);

}  // namespace hcache::policy
