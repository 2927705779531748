// Which of ggml's CPU kernels this machine runs, decided before anything else runs.
//
// Our own code is baseline x86-64; ggml's CPU kernels are compiled for a CPU target: that of the
// machine that built the program, or, in a package, every one. A binary that was copied to a lesser
// machine must say so, not die of SIGILL.
#pragma once

#include <span>
#include <string_view>

#include "base/status.h"

namespace hcache {

struct CpuTarget {
  std::string_view name;   // "x86-64-v4+vnni"; "installed" where the user's own ggml is linked
  std::string_view flags;  // what it needs, separated by blanks as in /proc/cpuinfo; "": unknown
};

// What this program has kernels for, the best first.
[[nodiscard]] std::span<const CpuTarget> cpu_targets();

// The name of the best of cpu_targets() that this CPU can run; the last one's where none fits.
[[nodiscard]] std::string_view cpu_target();

// Ok where this CPU can run one of cpu_targets(), or where the system does not tell; otherwise
// kUnimplemented, naming the target, what is missing and the remedy. Call it first in main.
[[nodiscard]] Status check_cpu_target();

// The best of `targets` (the best first, at least one) that a CPU with the flags `present` can run;
// the last one where nothing is known of the CPU (`present` is empty). kUnimplemented as above.
[[nodiscard]] Result<std::string_view> choose_cpu_target(std::span<const CpuTarget> targets,
                                                         std::string_view present);

}  // namespace hcache
