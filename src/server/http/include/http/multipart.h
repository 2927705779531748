// Forms with files: bodies of the type multipart/form-data (RFC 7578).
//
// Threading: pure functions.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hcache::http {

struct FormPart {
  std::string name;          // of the field
  std::string filename;      // of a file, as the client has it: a path perhaps; empty: none
  std::string_view content;  // within the body
};

struct FormLimits {
  std::size_t parts = 32;
  std::size_t header_bytes = 4096;  // of one part
};

// The parts of a body in their order. Nothing of the body is copied but names, so it must outlive
// what is returned. kInvalidArgument: the Content-Type (empty: there is none) is of no form, or the
// body is torn, malformed or beyond the limits.
[[nodiscard]] Result<std::vector<FormPart>> parse_form(std::string_view content_type,
                                                       std::string_view body,
                                                       const FormLimits& limits = {});

}  // namespace hcache::http
