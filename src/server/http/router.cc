#include "http/router.h"

#include <algorithm>
#include <set>

#include "base/status.h"

namespace hcache::http {
namespace {

bool is_param(const std::string& segment) { return segment.starts_with('{'); }

std::vector<std::string> split_pattern(std::string_view pattern) {
  std::vector<std::string> segments;
  const std::string text(pattern);
  if (!pattern.starts_with('/')) die("route '" + text + "' does not begin with '/'");
  while (pattern.size() > 1) {
    pattern.remove_prefix(1);
    const std::string segment(pattern.substr(0, pattern.find('/')));
    const bool braces = segment.find_first_of("{}") != std::string::npos;
    const bool whole = segment.size() > 2 && segment.front() == '{' && segment.back() == '}';
    if (segment.empty() || (braces && !whole)) die("route '" + text + "' is malformed");
    segments.push_back(segment);
    pattern.remove_prefix(segment.size());
  }
  return segments;
}

bool same_pattern(const std::vector<std::string>& a, const std::vector<std::string>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const std::string& x, const std::string& y) {
                      return x == y || (is_param(x) && is_param(y));
                    });
}

bool matches(const Route& route, std::span<const std::string> segments) {
  return std::equal(route.segments.begin(), route.segments.end(), segments.begin(), segments.end(),
                    [](const std::string& want, const std::string& got) {
                      return is_param(want) || want == got;
                    });
}

// Whether `a` has a literal segment where they first differ; both match the same path.
bool more_literal(const Route& a, const Route& b) {
  for (std::size_t i = 0; i < a.segments.size(); ++i) {
    if (is_param(a.segments[i]) != is_param(b.segments[i])) return !is_param(a.segments[i]);
  }
  return false;
}

void add_method(const std::string& method, std::set<std::string>* methods) {
  methods->insert(method);
  methods->insert("OPTIONS");
  if (method == "GET") methods->insert("HEAD");
}

}  // namespace

void Router::add(std::string method, std::string_view pattern, Handler handler,
                 RouteOptions options) {
  std::vector<std::string> segments = split_pattern(pattern);
  for (const Route& route : routes_) {
    if (route.method == method && same_pattern(route.segments, segments)) {
      die("route " + method + " " + std::string(pattern) + " is there twice");
    }
  }
  routes_.push_back({std::move(method), std::move(segments), options, std::move(handler)});
}

RouteMatch Router::match(std::string_view method, std::span<const std::string> segments) const {
  RouteMatch out;
  std::set<std::string> methods;
  for (const Route& route : routes_) {
    if (!matches(route, segments)) continue;
    add_method(route.method, &methods);
    const bool fits = route.method == method || (method == "HEAD" && route.method == "GET");
    if (fits && (out.route == nullptr || more_literal(route, *out.route))) out.route = &route;
  }
  out.methods.assign(methods.begin(), methods.end());
  if (out.route == nullptr) return out;
  for (std::size_t i = 0; i < segments.size(); ++i) {
    const std::string& name = out.route->segments[i];
    if (is_param(name)) out.params.emplace_back(name.substr(1, name.size() - 2), segments[i]);
  }
  return out;
}

std::vector<std::string> Router::methods() const {
  std::set<std::string> methods;
  for (const Route& route : routes_) add_method(route.method, &methods);
  return {methods.begin(), methods.end()};
}

}  // namespace hcache::http
