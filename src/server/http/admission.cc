#include "admission.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "target.h"
#include "text.h"

namespace hcache::http {
namespace {

// The key that is presented; null where there is none.
std::optional<std::string_view> presented_key(const Request& request) {
  constexpr std::string_view kScheme = "bearer ";
  if (const std::string* value = request.header("authorization")) {
    if (value->size() > kScheme.size() &&
        same_ignoring_case(std::string_view(*value).substr(0, kScheme.size()), kScheme)) {
      std::string_view key = std::string_view(*value).substr(kScheme.size());
      key.remove_prefix(std::min(key.find_first_not_of(' '), key.size()));
      return key;
    }
  }
  if (const std::string* value = request.header("x-api-key")) return *value;
  return std::nullopt;
}

std::string join(const std::vector<std::string>& words) {
  return fmt::format("{}", fmt::join(words, ", "));
}

// "localhost:8080" of "http://localhost:8080"; empty for "null" and the like.
std::string_view authority_of(std::string_view origin) {
  const std::size_t at = origin.find("://");
  return at == std::string_view::npos ? std::string_view() : origin.substr(at + 3);
}

// "localhost" of "localhost:8080", "::1" of "[::1]:8080".
std::string_view host_of(std::string_view authority) {
  if (authority.starts_with('[')) return authority.substr(1, authority.find(']') - 1);
  return authority.substr(0, authority.find(':'));
}

// What a browser says of where a request comes from and whom it takes the server for.
std::optional<std::string> why_foreign(const Options& options, const Request& request) {
  const std::string* origin = request.header("origin");
  const std::string* host = request.header("host");
  // Who asks for leave gets none, and that is all: the browser goes no further.
  const bool asks = request.method == "OPTIONS";
  if (!asks && origin != nullptr && allowed_origin(options, request).empty()) {
    const std::string_view own = host == nullptr ? std::string_view() : *host;
    if (own.empty() || !same_ignoring_case(authority_of(*origin), own)) {
      return "a page of another origin may not call this server: its Origin is not allowed";
    }
  }
  if (!options.loopback_hosts_only || host == nullptr || is_loopback_host(host_of(*host))) {
    return std::nullopt;
  }
  const bool named =
      std::any_of(options.cors_origins.begin(), options.cors_origins.end(), [&](const auto& o) {
        const std::string_view allowed = host_of(authority_of(o));
        return o == "*" || (!allowed.empty() && same_ignoring_case(allowed, host_of(*host)));
      });
  if (named) return std::nullopt;
  return "this server is for this machine alone: its Host is neither loopback nor allowed";
}

Admission refuse(int status, std::string message, Headers headers = {}) {
  Admission out;
  out.refusal = HttpError{status, std::move(message)};
  out.headers = std::move(headers);
  return out;
}

// What llama-server allows everywhere, and what this path knows beside that.
std::string allowed_methods(const std::vector<std::string>& methods) {
  std::vector<std::string> all = {"GET", "POST", "DELETE", "OPTIONS"};
  for (const std::string& method : methods) {
    if (std::find(all.begin(), all.end(), method) == all.end()) all.push_back(method);
  }
  return join(all);
}

// OPTIONS asks what a path knows, or for leave to call it from another origin.
Admission answer_options(const Options& options, const std::vector<std::string>& methods,
                         const Request& request) {
  Admission out;
  out.headers = {{"Allow", join(methods)}};
  if (allowed_origin(options, request).empty()) return out;
  out.headers.emplace_back("Access-Control-Allow-Methods", allowed_methods(methods));
  out.headers.emplace_back("Access-Control-Allow-Credentials", "true");
  if (const std::string* wanted = request.header("access-control-request-headers")) {
    out.headers.emplace_back("Access-Control-Allow-Headers", *wanted);
  }
  out.headers.emplace_back("Access-Control-Max-Age", "600");
  return out;
}

// As sent, for the words of a refusal alone.
void take_sent_path(Request* request) {
  request->path = request->target.substr(0, request->target.find('?'));
}

}  // namespace

Admission starting(Request* request) {
  take_sent_path(request);
  return refuse(503, "the server is starting", {{"Retry-After", "1"}});
}

bool is_loopback_host(std::string_view host) {
  constexpr std::string_view kBelow = ".localhost";
  if (same_ignoring_case(host, "localhost") || host == "::1") return true;
  if (host.size() > kBelow.size() &&
      same_ignoring_case(host.substr(host.size() - kBelow.size()), kBelow)) {
    return true;
  }
  // Digits alone: 127.example.org is anybody's.
  return host.starts_with("127.") &&
         host.find_first_not_of("0123456789.") == std::string_view::npos;
}

KeyHash hash_api_key(std::string_view key) {
  return Hasher("hcache api key").add(key).finish<KeyHash>();
}

std::vector<std::string> split_hosts(std::string_view hosts) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin <= hosts.size();) {
    const std::size_t end = std::min(hosts.find(',', begin), hosts.size());
    std::string_view host = hosts.substr(begin, end - begin);
    while (host.starts_with(' ')) host.remove_prefix(1);
    while (host.ends_with(' ')) host.remove_suffix(1);
    out.emplace_back(host);
    begin = end + 1;
  }
  return out;
}

bool are_loopback_hosts(std::string_view hosts) {
  return std::ranges::all_of(split_hosts(hosts), [](std::string_view host) {
    if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
    return is_loopback_host(host);
  });
}

int find_key(const Options& options, const Request& request) {
  const std::optional<std::string_view> key = presented_key(request);
  if (!key) return -1;
  const KeyHash hash = hash_api_key(*key);
  int found = -1;
  for (std::size_t i = 0; i < options.api_keys.size(); ++i) {
    unsigned difference = 0;
    for (std::size_t b = 0; b < hash.bytes.size(); ++b) {
      difference |= static_cast<unsigned>(hash.bytes[b] ^ options.api_keys[i].hash.bytes[b]);
    }
    // All ones where there is no difference: no branch depends on which key it was.
    const int same = -static_cast<int>((difference - 1) >> 31);
    found = (same & static_cast<int>(i)) | (~same & found);
  }
  return found;
}

std::string allowed_origin(const Options& options, const Request& request) {
  const std::string* origin = request.header("origin");
  if (origin == nullptr) return {};
  const bool allowed = std::any_of(
      options.cors_origins.begin(), options.cors_origins.end(), [&](const std::string& o) {
        return o == "*" || o == *origin ||
               (o == "localhost" && is_loopback_host(host_of(authority_of(*origin))));
      });
  return allowed ? *origin : std::string();
}

Admission admit(const Options& options, const Router& router, std::uint64_t content_length,
                Request* request) {
  auto target = parse_target(request->target);
  if (!target.ok()) {
    take_sent_path(request);
    return refuse(400, target.status().message());
  }
  request->path = std::move(target->path);
  request->segments = std::move(target->segments);
  request->query = std::move(target->query);
  if (const auto why = why_foreign(options, *request)) return refuse(403, *why);

  if (request->path == "*") {
    if (request->method == "OPTIONS") return answer_options(options, router.methods(), *request);
    return refuse(400, "only OPTIONS may ask for *");
  }
  RouteMatch match = router.match(request->method, request->segments);
  if (match.methods.empty()) return refuse(404, "there is nothing at this path");
  if (match.route == nullptr && request->method == "OPTIONS") {
    return answer_options(options, match.methods, *request);
  }
  if (match.route == nullptr) {
    const std::string allow = join(match.methods);
    return refuse(405, "this path knows only the methods " + allow, {{"Allow", allow}});
  }
  request->params = std::move(match.params);
  request->key_index = find_key(options, *request);
  if (request->key_index >= 0) {
    request->key_name = options.api_keys[static_cast<std::size_t>(request->key_index)].name;
  } else if (!options.api_keys.empty() && !match.route->options.is_public) {
    return refuse(401, "a valid API key is needed (Authorization: Bearer KEY, or x-api-key: KEY)",
                  {{"WWW-Authenticate", "Bearer"}});
  }
  Admission out;
  out.max_body_bytes = match.route->options.max_body_bytes > 0 ? match.route->options.max_body_bytes
                                                               : options.max_body_bytes;
  if (content_length > out.max_body_bytes) {
    return refuse(413, fmt::format("the body of {} bytes is larger than the {} that are allowed",
                                   content_length, out.max_body_bytes));
  }
  out.route = match.route;
  return out;
}

}  // namespace hcache::http
