// llama-server's spellings of `hcache serve`'s options, so that scripts and services can change the
// one for the other: flags with one dash and several letters, other names, other units, and flags
// of what needs no choosing here. One table; docs/operations.md says the same to users.
//
// Flags that would change what is served and can't be followed are left as they are: the command
// line then refuses them.
//
// Threading: pure functions, but for what `get_env` does.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"

namespace hcache::cli {

struct LlamaFlags {
  std::vector<std::string> args;   // with hcache's own options alone
  std::vector<std::string> notes;  // what is ignored and why, a line each
};

// The value of an environment variable; null where there is none.
using GetEnv = std::function<const char*(const char* name)>;

// Translates what stands behind `hcache serve`, and those variables of llama-server that are not
// options of the same unit here (a flag goes before its variable). kInvalidArgument: a flag without
// its value, different types for K and V, sizes that are no numbers.
[[nodiscard]] Result<LlamaFlags> translate_llama_flags(std::span<const std::string> args,
                                                       const GetEnv& get_env);

}  // namespace hcache::cli
