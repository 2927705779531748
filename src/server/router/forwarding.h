// One request to a model's server and its answer, piece by piece. The only place of the router that
// knows Boost.Beast.
//
// Threading: everything on the thread that runs the context.
#pragma once

#include <boost/asio/io_context.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "http/message.h"

namespace hcache::router {

struct Outgoing {
  std::string method;
  std::string target;
  http::Headers headers;  // those of the connection itself are left out, see forwardable()
  std::string body;
};

enum class ForwardEnd : std::uint8_t {
  kWhole,    // the answer is whole
  kNoHead,   // the server was not reached, or went away before it answered
  kCutOff,   // it went away in the middle of its answer
  kStopped,  // stop() was called
};

struct ForwardHandler {
  // The answer's status and headers; `length`: of its body, -1 where it is not known yet.
  std::function<void(int status, http::Headers headers, std::int64_t length)> on_head;
  // A piece of its body. false: no more for now, until resume().
  std::function<bool(std::string_view piece)> on_body;
  // Once, last.
  std::function<void(ForwardEnd)> on_end;
};

// Sends the request to 127.0.0.1 and keeps itself alive until on_end.
class Forwarding {
 public:
  Forwarding() = default;
  Forwarding(const Forwarding&) = delete;
  Forwarding& operator=(const Forwarding&) = delete;
  virtual ~Forwarding() = default;

  static std::shared_ptr<Forwarding> start(boost::asio::io_context& context, std::uint16_t port,
                                           Outgoing request, ForwardHandler handler);
  virtual void resume() = 0;
  // Closes the connection: the server stops working on the answer.
  virtual void stop() = 0;
};

// Whether a header of this name (in any case) says something of the message, not of the connection
// that it came on or of the page that sent it.
[[nodiscard]] bool forwardable(std::string_view name);

}  // namespace hcache::router
