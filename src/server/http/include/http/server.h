// An event-driven HTTP/1.1 server: connections, limits, streaming, API keys.
//
// What it promises. Every complete request gets exactly one answer or a closed connection, in the
// order sent. Anything malformed, ambiguous, too large or too slow is refused before a handler sees
// it, and so is a body whose sender lacks an API key. Memory is bounded by the limits below: an
// idle connection holds about a KiB and no thread, and a client that does not read is cut off.
//
// Threading: start() and stop() from one thread, never from a handler; everything else from any.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/env.h"
#include "base/ids.h"
#include "base/status.h"
#include "http/message.h"
#include "http/router.h"

namespace hcache::http {

using KeyHash = Id128<struct ApiKeyTag>;

// What is kept of an API key. The key itself need not stay in memory.
[[nodiscard]] KeyHash hash_api_key(std::string_view key);

struct ApiKey {
  std::string name;  // for logs and limits; not secret
  KeyHash hash;
};

// Whether a host is this machine's own, whatever its name server says: localhost, a name below it,
// 127.0.0.0/8, ::1. Without brackets and port.
[[nodiscard]] bool is_loopback_host(std::string_view host);
// Of a list of them as Options::host has it: the hosts, and whether all are this machine's own.
[[nodiscard]] std::vector<std::string> split_hosts(std::string_view hosts);
[[nodiscard]] bool are_loopback_hosts(std::string_view hosts);

struct ErrorBody {
  std::string content_type;
  std::string content;
};

// One exchange, as an access log wants it. Never holds a query, a key or a header.
struct AccessRecord {
  std::string method;  // empty where none could be read
  std::string path;    // the target as sent, without its query: visible ASCII
  std::string peer;
  std::string key_name;
  int status = 0;           // 0: gone before an answer began
  std::uint64_t bytes = 0;  // sent, headers included
  double seconds = 0;       // from the request's first byte to the answer's last
  bool complete = false;    // the client was sent all of it
};

struct Options {
  std::string host = "127.0.0.1";  // an IPv4 or IPv6 address or a name; several with commas
  std::uint16_t port = 0;          // 0: any free one
  int io_threads = 1;

  // Sizes in bytes. Beyond them: 431 for headers, 413 for a body, 503 for all bodies together.
  std::uint32_t max_header_bytes = 16U << 10;  // request line included; at least 256
  std::uint32_t max_headers = 100;
  std::uint64_t max_body_bytes = 32ULL << 20;
  std::uint64_t max_bodies_bytes = 1ULL << 30;  // of bodies being received at the same time
  std::uint64_t max_unsent_bytes = 1ULL << 20;  // of one stream

  // Connections. Beyond the limit the one that has been idle for longest is closed; where none is
  // idle, the new one gets 503. Less where the limit of open files asks for it.
  std::uint32_t max_connections = 16384;
  std::uint32_t max_connections_per_peer = 0;  // 0: no limit; beyond it 429

  // Durations in nanoseconds.
  std::int64_t header_timeout_ns = 10'000'000'000;  // from a request's first byte; then 408
  // A body must be there after body_timeout_ns plus the time its bytes take at body_bytes_per_s;
  // then 408.
  std::int64_t body_timeout_ns = 60'000'000'000;
  std::uint64_t body_bytes_per_s = 16U << 10;
  std::int64_t write_timeout_ns = 60'000'000'000;  // without any progress; then cut off
  std::int64_t idle_timeout_ns = 60'000'000'000;   // between requests; then closed

  // When there are any, routes that are not public want one of them, as `Authorization: Bearer KEY`
  // or `x-api-key: KEY`; else 401.
  std::vector<ApiKey> api_keys;
  // Origins that browsers may call from: "https://app.example", "localhost" for all of this
  // machine, "*" for all. Empty: no CORS.
  // Requests whose Origin header names neither one of them nor the server itself, as the Host
  // header has it, get 403: browsers send "simple" requests of any page without asking first.
  std::vector<std::string> cors_origins;
  // Requests whose Host header names neither loopback nor the host of an allowed origin get 403. A
  // page can have its own name lead here (DNS rebinding), and then passes for the server itself.
  bool loopback_hosts_only = false;

  // Renders every error that the server makes itself. `path` is the request's, or empty. Default: a
  // line of text.
  std::function<ErrorBody(int status, std::string_view message, std::string_view path)> error_body;
  // Called on an I/O thread after every exchange; must not block.
  std::function<void(const AccessRecord&)> access_log;
};

// Since the start, except where it says "now".
struct Counters {
  std::uint64_t connections_open = 0;  // now
  std::uint64_t connections_idle = 0;  // now
  std::uint64_t connections_accepted = 0;
  std::uint64_t connections_refused = 0;     // told 503 or 429, or dropped
  std::uint64_t connections_evicted = 0;     // idle ones that made room
  std::uint64_t requests = 0;                // begun, malformed ones included
  std::array<std::uint64_t, 6> responses{};  // by the first digit of the status
  std::uint64_t streams_open = 0;            // now
  std::uint64_t timeouts = 0;                // requests and answers that were too slow
  std::uint64_t slow_clients_cut = 0;        // did not read (max_unsent_bytes)
  std::uint64_t disconnects = 0;             // clients that left before their answer was complete
  std::uint64_t bytes_received = 0;
  std::uint64_t bytes_sent = 0;
};

class Server {
 public:
  Server() = default;
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;
  virtual ~Server() = default;  // as stop(0)

  // Listens and serves until stop(). Raises the process's limit of open files where
  // max_connections needs it, and logs a warning where that is not enough. `env` (its clock) must
  // outlive the server and every Responder.
  // invalid_argument: an option makes no sense or the host is unknown. unavailable or
  // permission_denied: the address can't be had; names host, port and remedy.
  [[nodiscard]] static Result<std::unique_ptr<Server>> start(Env& env, Options options,
                                                             Router router);
  // Without routes: every request gets 503 until serve() brings some.
  [[nodiscard]] static Result<std::unique_ptr<Server>> start(Env& env, Options options);
  // Once, from the thread that started it: from now on these routes answer.
  virtual void serve(Router router) = 0;

  // Stops listening, closes idle connections, gives what is under way `grace_ns` to end, cuts off
  // the rest, and joins the I/O threads. No handler or callback runs afterwards; responders that
  // are still held do nothing any more.
  virtual void stop(std::int64_t grace_ns) = 0;
  [[nodiscard]] virtual std::uint16_t port() const = 0;
  [[nodiscard]] virtual Counters counters() const = 0;
};

}  // namespace hcache::http
