// Rounded values back into F16 in one pass, which is what reading rounded K and V costs.
#pragma once

#include <cstddef>
#include <span>

#include "ggml.h"

namespace hcache::state {

// The values of Q8_0 or Q4_0 `blocks` as a page of F16, to the bit what ggml's to_float and
// from_float_ref make of them. False, and nothing is written: this CPU or this type has no such
// pass. The page holds whole blocks' values.
[[nodiscard]] bool rounded_to_f16(ggml_type type, std::span<const std::byte> blocks,
                                  std::span<std::byte> page);

}  // namespace hcache::state
