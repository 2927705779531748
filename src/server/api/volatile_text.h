// Text that a request marks as different from request to request: the time of day in a system
// prompt, say. Where it stands it would keep all behind it from being restored.
//
// Threading: pure functions.
#pragma once

#include <optional>

#include "api/json.h"

namespace hcache::api {

// The body with the texts that have "cache_control": {"type": "volatile"} at the end of the last
// turn that is not the assistant's (a user's message or a tool's result), in their order, with an
// empty line before each. They come from the contents of system, user's and tool's messages in any
// protocol's form. A system message that nothing is left of goes. Null: there is nothing to move,
// or nowhere to move it; then the body counts as it is.
[[nodiscard]] std::optional<Json> with_volatile_text_last(const Json& body);

}  // namespace hcache::api
