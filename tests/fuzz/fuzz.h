// A fuzz target is a file with LLVMFuzzerTestOneInput() and seeds(). Clang's libFuzzer runs it for
// as long as one likes; fuzz_main.cc runs it for a while on mutations of the seeds, in every build.
#pragma once

#include <string>
#include <vector>

namespace hcache::fuzz {

// Valid inputs to start from.
std::vector<std::string> seeds();

}  // namespace hcache::fuzz
