#include "base/cpu_target.h"

#include <fmt/format.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

#include "cpu_targets.h"

namespace hcache {
namespace {

// The first processor's flags; every processor of an x86-64 machine has the same.
std::string read_cpu_flags() {
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    const size_t colon = line.find(':');
    if (line.starts_with("flags") && colon != std::string::npos) return line.substr(colon + 1);
  }
  return {};
}

std::set<std::string> words(std::string_view text) {
  std::istringstream stream{std::string(text)};
  std::set<std::string> out;
  for (std::string word; stream >> word;) out.insert(word);
  return out;
}

// Those of the flags that are not among the known ones, in the order in which they are needed.
std::string missing_flags(std::string_view needed, const std::set<std::string>& known) {
  std::istringstream stream{std::string(needed)};
  std::string missing;
  for (std::string flag; stream >> flag;) {
    if (!known.contains(flag)) missing += (missing.empty() ? "" : ", ") + flag;
  }
  return missing;
}

}  // namespace

std::span<const CpuTarget> cpu_targets() { return kCpuTargets; }

std::string_view cpu_target() {
  static const std::string_view chosen =
      choose_cpu_target(cpu_targets(), read_cpu_flags()).value_or(cpu_targets().back().name);
  return chosen;
}

Status check_cpu_target() { return choose_cpu_target(cpu_targets(), read_cpu_flags()).status(); }

Result<std::string_view> choose_cpu_target(std::span<const CpuTarget> targets,
                                           std::string_view present) {
  const std::set<std::string> known = words(present);
  if (known.empty()) return targets.back().name;
  std::string missing;
  for (const CpuTarget& target : targets) {
    missing = missing_flags(target.flags, known);
    if (missing.empty()) return target.name;
  }
  if (targets.size() > 1) {
    return unimplemented(fmt::format(
        "this CPU lacks {}, which even the least of this program's kernels ({}) need; it runs on "
        "machines that have them",
        missing, targets.back().name));
  }
  return unimplemented(
      fmt::format("this program was built for the CPU target {}, and this CPU lacks {}; "
                  "run make again on this machine",
                  targets.back().name, missing));
}

}  // namespace hcache
