#include "base/cpu_target.h"

#include <fmt/format.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

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

}  // namespace

std::string_view cpu_target() { return HCACHE_CPU_TARGET; }

Status check_cpu_target() {
  return check_cpu_flags(HCACHE_CPU_TARGET, HCACHE_CPU_FLAGS, read_cpu_flags());
}

Status check_cpu_flags(std::string_view target, std::string_view needed, std::string_view present) {
  std::set<std::string> known;
  std::istringstream present_words{std::string(present)};
  for (std::string flag; present_words >> flag;) known.insert(flag);
  if (known.empty()) return {};

  std::string missing;
  std::istringstream needed_words{std::string(needed)};
  for (std::string flag; needed_words >> flag;) {
    if (!known.contains(flag)) missing += (missing.empty() ? "" : ", ") + flag;
  }
  if (missing.empty()) return {};
  return unimplemented(
      fmt::format("this program was built for the CPU target {}, and this CPU lacks {}; "
                  "run make again on this machine",
                  target, missing));
}

}  // namespace hcache
