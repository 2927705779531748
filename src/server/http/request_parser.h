// One HTTP/1.1 request out of bytes that come in any pieces. Stricter than RFC 9112 asks for:
// whatever two implementations might read differently (both lengths, repeated lengths, folded
// lines, other transfer codings) is refused. The only place that knows Boost.Beast.
//
// Threading: one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "http/message.h"

namespace hcache::http {

struct HttpError {
  int status = 0;
  std::string message;
};

struct ParserLimits {
  std::uint32_t header_bytes = 0;  // also of a chunk's header line and of the trailers
  std::uint32_t headers = 0;
};

class RequestParser {
 public:
  enum class Event {
    kNeedMore,  // everything that could be used was
    kHead,      // once: method, target and headers are there; the body has not been touched
    kDone,      // the request is whole; what is left in the input belongs to the next one
    kFailed,    // see error(); nothing more may be fed
  };

  explicit RequestParser(const ParserLimits& limits);
  ~RequestParser();
  RequestParser(const RequestParser&) = delete;
  RequestParser& operator=(const RequestParser&) = delete;

  // Takes what it can from the front of `input`. `input` never needs to hold more than
  // header_bytes for it to get on.
  [[nodiscard]] Event feed(std::string* input);

  // The request so far: method and target also after most failures. path, query and params are the
  // caller's to fill.
  [[nodiscard]] Request& request();
  [[nodiscard]] const HttpError& error() const;

  // ---- From kHead on ----
  [[nodiscard]] bool keep_alive() const;
  [[nodiscard]] bool http_1_0() const;
  [[nodiscard]] bool has_body() const;          // some of it is still to come
  [[nodiscard]] bool expects_continue() const;  // the client waits for 100
  // The body's length, where the client said so; else 0.
  [[nodiscard]] std::uint64_t content_length() const;
  // Beyond it: kFailed with 413. Set at kHead.
  void set_body_limit(std::uint64_t bytes);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::http
