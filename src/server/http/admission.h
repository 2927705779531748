// What becomes of a request once its header is there: which route, whose key, or which refusal.
// Decided before any of the body is read.
//
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "http/router.h"
#include "http/server.h"
#include "request_parser.h"

namespace hcache::http {

struct Admission {
  const Route* route = nullptr;  // null: `refusal` is sent or, without one, an empty 204 (OPTIONS)
  std::optional<HttpError> refusal;
  Headers headers;  // that go with the refusal or the empty answer
  std::uint64_t max_body_bytes = 0;
};

// Fills path, segments, query, params and key of the request. `content_length` is what the client
// announced, 0 if nothing.
[[nodiscard]] Admission admit(const Options& options, const Router& router,
                              std::uint64_t content_length, Request* request);

// Of a server that has no routes yet: 503, come back soon. Fills in the request's path, as sent.
[[nodiscard]] Admission starting(Request* request);

// The request's origin where options.cors_origins allow it; else empty.
[[nodiscard]] std::string allowed_origin(const Options& options, const Request& request);

// The index of the key that the request presents; -1 for none or an unknown one. Takes the same
// time whichever key it is.
[[nodiscard]] int find_key(const Options& options, const Request& request);

}  // namespace hcache::http
