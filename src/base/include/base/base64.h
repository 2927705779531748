// Bytes as text of 64 characters (RFC 4648 §4).
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace hcache {

[[nodiscard]] std::string base64(std::string_view bytes);
// Padding may be missing; line breaks and blanks count nothing. kInvalidArgument names the place of
// any other character.
[[nodiscard]] Result<std::string> from_base64(std::string_view text);

}  // namespace hcache
