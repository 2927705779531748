// One line of text for every request that has ended: `name=value` pairs in a fixed order, for
// people and for programs. docs/operations.md lists them. Never holds what was said, nor a key.
//
// Threading: pure functions.
#pragma once

#include <string>
#include <string_view>

#include "scheduler/request.h"

namespace hcache::server {

// `answer_id` is the id of the answer without its protocol's prefix, `choice` the number of the
// reply within it, `key_name` the API key's name or empty.
[[nodiscard]] std::string request_line(std::string_view answer_id, size_t choice,
                                       std::string_view key_name,
                                       const scheduler::Outcome& outcome);

}  // namespace hcache::server
