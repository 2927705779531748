// What goes over the wire before and around an answer's bytes.
//
// Every answer carries these unless the handler sets a header of the same name:
//   X-Content-Type-Options: nosniff
//   Content-Security-Policy: default-src 'none'; frame-ancestors 'none'    (a page sets its own)
//   Referrer-Policy: no-referrer
//   Cache-Control: no-store
//
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "http/message.h"

namespace hcache::http {

enum class Framing {
  kLength,   // Content-Length
  kChunked,  // pieces with their lengths; HTTP/1.1 only
  kToEnd,    // until the connection ends
  kNone,     // an answer that can't have a body (204, 304)
};

struct Head {
  int status = 0;
  Framing framing = Framing::kLength;
  std::uint64_t content_length = 0;  // of kLength
  bool keep_alive = false;
  bool http_1_0 = false;       // of the request: keep-alive has to be said
  std::int64_t wall_ns = 0;    // for Date
  std::string allowed_origin;  // CORS; empty: none
};

// Status line and headers, with the empty line that ends them.
[[nodiscard]] std::string head_text(const Head& head, const Headers& headers);
// A piece of a chunked body; `piece` must not be empty, which would mean the end.
void append_chunk(std::string_view piece, std::string* out);
inline constexpr std::string_view kLastChunk = "0\r\n\r\n";
inline constexpr std::string_view kContinue = "HTTP/1.1 100 Continue\r\n\r\n";

// Whether an answer of this status may have a body.
[[nodiscard]] bool has_body(int status);

}  // namespace hcache::http
