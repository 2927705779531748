// The web page that the server shows at `/`: chat, sessions, where answers came from, gauges. One
// HTML document without any other file, made of page.html, style.css and js/ when the build is
// configured. It talks to the server's API alone, with paths relative to its own.
//
// Threading: pure functions of constants.
#pragma once

#include <string_view>

namespace hcache::page {

// The document, UTF-8.
[[nodiscard]] std::string_view page_html();

// The Content-Security-Policy to send with it: its one script and its one style by their SHA-256,
// requests to its own origin, nothing else.
[[nodiscard]] std::string_view page_csp();

}  // namespace hcache::page
