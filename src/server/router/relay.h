// A client's request on its way to a model's server, and the answer on its way back.
//
// Threading: made on any thread, then everything on the thread that runs the context.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "forwarding.h"
#include "http/message.h"

namespace hcache::router {

class Relay : public std::enable_shared_from_this<Relay> {
 public:
  // `target`: what the model's server is asked for, the request's own or what stands behind a
  // prefix.
  Relay(boost::asio::io_context& context, http::Request request, std::string target,
        std::shared_ptr<http::Responder> responder);

  // Called at most once, when the client goes away before it has its answer. Setting one replaces
  // the one before.
  void on_gone(std::function<void()> callback);
  // Sends the request to the model's server, once, and passes its answer on. `done` is called at
  // the end; with kNoHead the client has got nothing, and refuse() is to answer.
  void run(std::uint16_t port, std::function<void(ForwardEnd)> done);
  // Answers with an error as the path's protocol words it.
  void refuse(int status, std::string_view message);
  // How many bytes of the request it holds in memory.
  [[nodiscard]] std::size_t bytes() const { return request_.body.size(); }

 private:
  void on_head(int status, http::Headers headers, std::int64_t length);
  bool on_body(std::string_view piece);
  void on_end(ForwardEnd how);
  void wait_for_client();
  void leave();

  boost::asio::io_context& context_;
  http::Request request_;
  std::string target_;
  std::shared_ptr<http::Responder> responder_;  // null once the answer is given
  boost::asio::steady_timer pause_;
  std::shared_ptr<Forwarding> forwarding_;
  std::function<void()> gone_;
  std::function<void(ForwardEnd)> done_;
  bool left_ = false;
  // Of an answer that is sent as a whole.
  bool collecting_ = false;
  int status_ = 0;
  http::Headers headers_;
  std::string body_;
};

}  // namespace hcache::router
