// Which handler answers what: a table of (method, pattern, flags, handler).
//
// Threading: filled by one thread, then read-only.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "http/message.h"

namespace hcache::http {

// Called on an I/O thread, so it must not block; the responder may be kept and used from elsewhere.
using Handler = std::function<void(Request, std::shared_ptr<Responder>)>;

struct RouteOptions {
  bool is_public = false;            // needs no API key
  std::uint64_t max_body_bytes = 0;  // 0: Options::max_body_bytes
};

struct Route {
  std::string method;
  std::vector<std::string> segments;  // "{id}" matches any one segment
  RouteOptions options;
  Handler handler;
};

struct RouteMatch {
  const Route* route = nullptr;      // null: nothing for this method
  Pairs params;                      // of the route
  std::vector<std::string> methods;  // that this path knows, sorted; empty: the path is unknown
};

class Router {
 public:
  // `pattern` is "/v1/sessions/{id}". GET routes answer HEAD too, and every path answers OPTIONS. A
  // malformed pattern or one that is there already is a bug: it ends the process.
  void add(std::string method, std::string_view pattern, Handler handler,
           RouteOptions options = {});
  // A literal segment is preferred to a {name}, from the left.
  [[nodiscard]] RouteMatch match(std::string_view method,
                                 std::span<const std::string> segments) const;
  // All methods of all routes, with HEAD and OPTIONS.
  [[nodiscard]] std::vector<std::string> methods() const;

 private:
  std::vector<Route> routes_;
};

}  // namespace hcache::http
