// An HTTP client for many requests at a time from one thread: timers and streamed answers.
//
// Every request has a connection of its own, so that none waits for another or meets one that the
// server has just closed. Nothing is sent twice. Plain HTTP only.
// Threading: everything on one thread; handlers run inside run().
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace hcache::load {

struct HttpUrl {
  std::string host;  // a name or an address, IPv6 without brackets
  std::string port;
  std::string prefix;  // of every path: "" or "/some/where"; "/v1" at the end is dropped
};
// "http://127.0.0.1:8080", "http://[::1]:8080/v1". kInvalidArgument; kUnimplemented for https.
[[nodiscard]] Result<HttpUrl> parse_url(std::string_view url);

struct HttpOptions {
  std::string api_key;     // sent as a bearer token; empty: none
  int64_t timeout_ns = 0;  // of a whole exchange; 0: none
};

struct HttpRequest {
  std::string path;  // "/v1/models"
  std::string body;  // JSON, sent with POST; empty: GET
};

enum class HttpEnd {
  kDone,        // the answer is whole, or the handler wanted no more of it
  kConnect,     // no connection
  kDisconnect,  // the connection broke before the answer was whole
  kTimeout,
  kMalformed,  // not HTTP
};

struct HttpHead {
  int status = 0;
  std::optional<double> retry_after_s;  // where it is given in seconds
};

struct HttpHandler {
  std::function<void(const HttpHead&)> on_head;
  std::function<bool(std::string_view)> on_body;  // a piece; false: no more is wanted
  // Once, last; the message belongs to ends other than kDone.
  std::function<void(HttpEnd, const std::string& message)> on_end;
};

class HttpLoop {
 public:
  // Resolves the name and raises the limit of open files as far as it goes. kUnavailable.
  [[nodiscard]] static Result<std::unique_ptr<HttpLoop>> open(const HttpUrl& url,
                                                              const HttpOptions& options);
  ~HttpLoop();
  HttpLoop(const HttpLoop&) = delete;
  HttpLoop& operator=(const HttpLoop&) = delete;

  void after(double seconds, std::function<void()> callback);
  void send(const HttpRequest& request, HttpHandler handler);
  // Returns when nothing is left to do, or when `proceed`, which is called a few times per second,
  // says false; what is under way then stays as it is, and its handlers are not called again unless
  // run() is.
  void run(const std::function<bool()>& proceed);

 private:
  struct Impl;
  explicit HttpLoop(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::load
