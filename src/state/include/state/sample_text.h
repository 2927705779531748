// The predefined prompts that a model's attention, and what rounding costs it, are measured on.
#pragma once

#include <string>

namespace hcache::state {

// A story, instructions, a program, a conversation and a table: some 900 tokens.
[[nodiscard]] std::string sample_text();

}  // namespace hcache::state
