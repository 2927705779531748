// The part of a saved chain whose rows a sequence holds that was cut (policy/truncation.h).
//
// Threading: a pure function.
#pragma once

#include <cstdint>
#include <span>

#include "policy/truncation.h"
#include "state/chosen_rows.h"
#include "store/store.h"

namespace hcache::state {

// Of a match of a chain with these cuts, of its first `length` tokens: the rows that are held of
// them, in the order of the sequence, with how each has moved since it was saved. What was
// never cut is the match itself, as far as `length`. `chosen`: at the last of those cuts.
[[nodiscard]] store::Match held_match(const store::Match& chain,
                                      std::span<const policy::HeldRows> cuts, int64_t length,
                                      std::span<const ChosenBlock> chosen = {});

}  // namespace hcache::state
