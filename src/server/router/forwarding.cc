#include "forwarding.h"

#include <strings.h>

#include <algorithm>
#include <array>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/post.hpp>
#include <boost/beast/core/error.hpp>
#include <boost/beast/core/flat_buffer.hpp>
#include <boost/beast/http.hpp>
#include <limits>
#include <utility>

namespace hcache::router {
namespace {

namespace asio = boost::asio;
namespace beast_http = boost::beast::http;
using asio::ip::tcp;
using boost::system::error_code;

constexpr std::uint32_t kHeaderBytes = 64 * 1024;
constexpr std::size_t kPieceBytes = 16 * 1024;

// Of the connection, or made anew on the other side; Origin and Host have been looked at already.
constexpr std::array<std::string_view, 15> kKeptBack = {"connection",
                                                        "keep-alive",
                                                        "proxy-authenticate",
                                                        "proxy-authorization",
                                                        "te",
                                                        "trailer",
                                                        "transfer-encoding",
                                                        "upgrade",
                                                        "expect",
                                                        "content-length",
                                                        "host",
                                                        "origin",
                                                        "date",
                                                        "proxy-connection",
                                                        "access-control-allow-origin"};

class ForwardingImpl final : public Forwarding,
                             public std::enable_shared_from_this<ForwardingImpl> {
 public:
  ForwardingImpl(asio::io_context& context, std::uint16_t port, Outgoing request,
                 ForwardHandler handler)
      : socket_(context),
        server_(asio::ip::address_v4::loopback(), port),
        handler_(std::move(handler)) {
    request_.method_string(request.method);
    request_.target(request.target);
    request_.version(11);
    for (const auto& [name, value] : request.headers) {
      if (forwardable(name)) request_.insert(name, value);
    }
    request_.set(beast_http::field::host, "127.0.0.1:" + std::to_string(port));
    request_.keep_alive(false);
    const bool bodiless =
        request.body.empty() && (request.method == "GET" || request.method == "HEAD");
    request_.body() = std::move(request.body);
    if (!bodiless) request_.prepare_payload();
    parser_.header_limit(kHeaderBytes);
    parser_.body_limit(std::numeric_limits<std::uint64_t>::max());
    parser_.skip(request.method == "HEAD");
  }

  void run() {
    if (stopped_) return end(ForwardEnd::kStopped);
    socket_.async_connect(server_, [self = shared_from_this()](error_code error) {
      if (error) return self->end(ForwardEnd::kNoHead);
      self->send();
    });
  }

  void resume() override {
    if (std::exchange(paused_, false) && !ended_) read_body();
  }

  void stop() override {
    stopped_ = true;
    error_code ignored;
    socket_.close(ignored);
    if (paused_) end(ForwardEnd::kStopped);
  }

 private:
  void send() {
    error_code ignored;  // a matter of speed
    socket_.set_option(tcp::no_delay(true), ignored);
    // A server may refuse a request before it has read all of it, so its answer tells more than an
    // error of the write.
    beast_http::async_write(
        socket_, request_,
        [self = shared_from_this()](error_code, std::size_t) { self->request_.body().clear(); });
    beast_http::async_read_header(
        socket_, input_, parser_,
        [self = shared_from_this()](error_code error, std::size_t) { self->on_head(error); });
  }

  void on_head(error_code error) {
    if (error) return end(ForwardEnd::kNoHead);
    const auto& head = parser_.get();
    http::Headers headers;
    for (const auto& field : head) {
      const std::string name(field.name_string().data(), field.name_string().size());
      const std::string value(field.value().data(), field.value().size());
      if (forwardable(name)) headers.emplace_back(name, value);
    }
    const auto length = parser_.content_length();
    const bool known = parser_.is_done() || length.has_value();
    handler_.on_head(static_cast<int>(head.result_int()), std::move(headers),
                     known ? static_cast<std::int64_t>(length.value_or(0)) : -1);
    if (parser_.is_done()) return end(ForwardEnd::kWhole);
    read_body();
  }

  void read_body() {
    auto& body = parser_.get().body();
    body.data = piece_.data();
    body.size = piece_.size();
    beast_http::async_read_some(
        socket_, input_, parser_,
        [self = shared_from_this()](error_code error, std::size_t) { self->on_body(error); });
  }

  void on_body(error_code error) {
    if (stopped_) return end(ForwardEnd::kStopped);
    const std::string_view piece(piece_.data(), piece_.size() - parser_.get().body().size);
    const bool more = piece.empty() || handler_.on_body(piece);
    if (error && error != beast_http::error::need_buffer) return end(ForwardEnd::kCutOff);
    if (parser_.is_done()) return end(ForwardEnd::kWhole);
    if (stopped_) return end(ForwardEnd::kStopped);
    if (more) return read_body();
    paused_ = true;
  }

  void end(ForwardEnd how) {
    if (std::exchange(ended_, true)) return;
    error_code ignored;
    socket_.close(ignored);
    const ForwardHandler handler = std::exchange(handler_, {});
    handler.on_end(stopped_ ? ForwardEnd::kStopped : how);
  }

  tcp::socket socket_;
  const tcp::endpoint server_;
  beast_http::request<beast_http::string_body> request_;
  ForwardHandler handler_;
  beast_http::response_parser<beast_http::buffer_body> parser_;
  boost::beast::flat_buffer input_;
  std::array<char, kPieceBytes> piece_{};
  bool paused_ = false;
  bool stopped_ = false;
  bool ended_ = false;
};

}  // namespace

std::shared_ptr<Forwarding> Forwarding::start(asio::io_context& context, std::uint16_t port,
                                              Outgoing request, ForwardHandler handler) {
  const auto forwarding =
      std::make_shared<ForwardingImpl>(context, port, std::move(request), std::move(handler));
  asio::post(context, [forwarding] { forwarding->run(); });
  return forwarding;
}

bool forwardable(std::string_view name) {
  return std::ranges::none_of(kKeptBack, [&](std::string_view kept) {
    return kept.size() == name.size() && strncasecmp(kept.data(), name.data(), name.size()) == 0;
  });
}

}  // namespace hcache::router
