// The device of tests that run on any: HCACHE_TEST_DEVICE, as --device takes it, or the CPU.
#pragma once

#include <cstdlib>
#include <string>

namespace hcache::testing {

inline std::string test_device() {
  const char* chosen = std::getenv("HCACHE_TEST_DEVICE");
  return chosen != nullptr && *chosen != '\0' ? chosen : "cpu";
}

inline bool on_cpu() { return test_device() == "cpu"; }

}  // namespace hcache::testing
