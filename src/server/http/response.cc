#include "response.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <ctime>
#include <iterator>
#include <utility>

#include "text.h"

namespace hcache::http {
namespace {

constexpr std::array<std::pair<std::string_view, std::string_view>, 4> kSecurityHeaders = {{
    {"X-Content-Type-Options", "nosniff"},
    {"Content-Security-Policy", "default-src 'none'; frame-ancestors 'none'"},
    {"Referrer-Policy", "no-referrer"},
    {"Cache-Control", "no-store"},
}};

bool contains(const Headers& headers, std::string_view name) {
  return std::any_of(headers.begin(), headers.end(),
                     [&](const auto& header) { return same_ignoring_case(header.first, name); });
}

void append_clean(std::string_view text, std::string* out) {
  for (const char c : text) out->push_back(static_cast<unsigned char>(c) < 0x20 ? ' ' : c);
}

void append_header(std::string_view name, std::string_view value, std::string* out) {
  append_clean(name, out);
  out->append(": ");
  append_clean(value, out);
  out->append("\r\n");
}

// "Sun, 06 Nov 1994 08:49:37 GMT", whatever the locale.
std::string date_text(std::int64_t wall_ns) {
  static constexpr const char* kDays[] = {"Sun", "Mon", "Tue", "Wed", "Thu", "Fri", "Sat"};
  static constexpr const char* kMonths[] = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                            "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
  const auto seconds = static_cast<std::time_t>(wall_ns / 1'000'000'000);
  std::tm t{};
  gmtime_r(&seconds, &t);
  return fmt::format("{}, {:02} {} {} {:02}:{:02}:{:02} GMT", kDays[t.tm_wday], t.tm_mday,
                     kMonths[t.tm_mon], t.tm_year + 1900, t.tm_hour, t.tm_min, t.tm_sec);
}

}  // namespace

bool has_body(int status) { return status != 204 && status != 304; }

std::string head_text(const Head& head, const Headers& headers) {
  std::string out;
  out.reserve(512);
  fmt::format_to(std::back_inserter(out), "HTTP/1.1 {:03} {}\r\n", head.status,
                 reason_phrase(head.status));
  append_header("Date", date_text(head.wall_ns), &out);
  for (const auto& [name, value] : headers) append_header(name, value, &out);
  for (const auto& [name, value] : kSecurityHeaders) {
    if (!contains(headers, name)) append_header(name, value, &out);
  }
  if (!head.allowed_origin.empty()) {
    append_header("Access-Control-Allow-Origin", head.allowed_origin, &out);
    append_header("Vary", "Origin", &out);
  }
  if (head.framing == Framing::kLength) {
    append_header("Content-Length", std::to_string(head.content_length), &out);
  } else if (head.framing == Framing::kChunked) {
    append_header("Transfer-Encoding", "chunked", &out);
  }
  if (!head.keep_alive) {
    append_header("Connection", "close", &out);
  } else if (head.http_1_0) {
    append_header("Connection", "keep-alive", &out);
  }
  out.append("\r\n");
  return out;
}

void append_chunk(std::string_view piece, std::string* out) {
  fmt::format_to(std::back_inserter(*out), "{:x}\r\n", piece.size());
  out->append(piece).append("\r\n");
}

}  // namespace hcache::http
