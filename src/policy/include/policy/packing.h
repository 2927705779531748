// Packed pages of K and V: fewer bytes over the link, for compute that unpacks them. Whether they
// are worth it; docs/planner.md, "Packed pages".
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
};
[[nodiscard]] std::string_view pack_mode_name(PackMode mode);  // "auto", "on", "off"
[[nodiscard]] Result<PackMode> parse_pack_mode(std::string_view name);

// What packing was measured to do.
struct KvPacking {
  double ratio = 0;         // bytes of a packed page over those of a plain one; 0: can't be packed
  double unpack_row_s = 0;  // of one layer's K and V of a token
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

}  // namespace hcache::policy
