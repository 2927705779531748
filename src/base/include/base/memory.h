// How much memory this process may still take.
//
// Threading: pure functions of what the system says.
#pragma once

#include <cstdint>
#include <string>

#include "base/env.h"
#include "base/status.h"

namespace hcache {

// Bytes that can be had without swapping: what the machine has available, or what the process's
// control groups (version 1 or 2, their parents included) leave of their limits, where that is
// less. Page cache that a group can drop counts as free. `root` stands before /proc and /sys: a
// folder of a test. unavailable: the system does not say.
[[nodiscard]] Result<std::uint64_t> free_memory(Env& env, const std::string& root = {});

}  // namespace hcache
