// The check that this machine can run the program, made before anything else runs.
//
// Our own code is baseline x86-64; ggml's CPU backend is compiled for the CPU of the machine
// that built it. A binary that was copied to a lesser machine must say so, not die of SIGILL.
#pragma once

#include <string_view>

#include "base/status.h"

namespace hcache {

// The CPU target that ggml was built for ("x86-64-v4+vnni"; "installed" where the user's own
// ggml is linked, whose needs are unknown).
[[nodiscard]] std::string_view cpu_target();

// Ok where this CPU has what cpu_target() needs, or where the system does not tell; otherwise
// kUnimplemented, naming the target, what is missing and the remedy. Call it first in main.
[[nodiscard]] Status check_cpu_target();

// The same for given texts: `needed` and `present` are CPU flags separated by blanks, as
// /proc/cpuinfo spells them. An empty `present` means that nothing is known.
[[nodiscard]] Status check_cpu_flags(std::string_view target, std::string_view needed,
                                     std::string_view present);

}  // namespace hcache
