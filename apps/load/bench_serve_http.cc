// The one file that knows Boost.Beast.
#include "bench_serve_http.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/core.hpp>
#include <boost/beast/http.hpp>
#include <charconv>
#include <chrono>
#include <limits>
#include <utility>

namespace hcache::load {
namespace {

namespace asio = boost::asio;
namespace beast = boost::beast;
namespace http = beast::http;
using boost::system::error_code;
using tcp = asio::ip::tcp;
using Endpoints = tcp::resolver::results_type;

constexpr uint32_t kHeaderBytes = 64 * 1024;
constexpr size_t kPieceBytes = 16 * 1024;
constexpr std::chrono::milliseconds kTick{100};
constexpr double kLongest = 1e9;  // seconds that a timer takes, and more than anybody waits

std::optional<double> seconds_of(std::string_view text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= 0)) return {};
  return std::min(value, kLongest);
}

// One request and its answer; keeps itself alive while an operation is under way.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(asio::io_context& context, http::request<http::string_body> request, HttpHandler handler)
      : stream_(context), request_(std::move(request)), handler_(std::move(handler)) {
    parser_.header_limit(kHeaderBytes);
    parser_.body_limit(std::numeric_limits<uint64_t>::max());
  }

  void start(const Endpoints& endpoints, int64_t timeout_ns) {
    // Set once, so that it holds for all operations together.
    if (timeout_ns > 0) stream_.expires_after(std::chrono::nanoseconds(timeout_ns));
    stream_.async_connect(endpoints, [self = shared_from_this()](error_code error, const auto&) {
      self->on_connect(error);
    });
  }

 private:
  void on_connect(error_code error) {
    if (error) return fail(error, HttpEnd::kConnect);
    error_code ignored;  // a matter of speed
    stream_.socket().set_option(tcp::no_delay(true), ignored);
    http::async_write(stream_, request_, [self = shared_from_this()](error_code, size_t) {
      // A server may refuse a request before it has read all of it, so the answer tells more than
      // an error of the write.
      self->read_head();
    });
  }

  void read_head() {
    http::async_read_header(
        stream_, input_, parser_,
        [self = shared_from_this()](error_code error, size_t) { self->on_head(error); });
  }

  void on_head(error_code error) {
    if (error) return fail(error, HttpEnd::kDisconnect);
    const auto& head = parser_.get();
    const auto retry_after = head[http::field::retry_after];
    handler_.on_head({static_cast<int>(head.result_int()),
                      seconds_of(std::string_view(retry_after.data(), retry_after.size()))});
    if (parser_.is_done()) return handler_.on_end(HttpEnd::kDone, "");
    read_body();
  }

  void read_body() {
    auto& body = parser_.get().body();
    body.data = piece_.data();
    body.size = piece_.size();
    http::async_read_some(
        stream_, input_, parser_,
        [self = shared_from_this()](error_code error, size_t) { self->on_body(error); });
  }

  void on_body(error_code error) {
    const std::string_view piece(piece_.data(), piece_.size() - parser_.get().body().size);
    if (!piece.empty() && !handler_.on_body(piece)) return handler_.on_end(HttpEnd::kDone, "");
    if (error && error != http::error::need_buffer) return fail(error, HttpEnd::kDisconnect);
    if (parser_.is_done()) return handler_.on_end(HttpEnd::kDone, "");
    read_body();
  }

  void fail(error_code error, HttpEnd end) {
    if (error == beast::error::timeout) {
      end = HttpEnd::kTimeout;
    } else if (error.category() == make_error_code(http::error::bad_version).category() &&
               error != http::error::end_of_stream && error != http::error::partial_message) {
      end = HttpEnd::kMalformed;
    }
    handler_.on_end(end, error.message());
  }

  beast::tcp_stream stream_;
  http::request<http::string_body> request_;
  HttpHandler handler_;
  http::response_parser<http::buffer_body> parser_;
  beast::flat_buffer input_;
  std::array<char, kPieceBytes> piece_{};
};

// Every request is a connection, and a connection is a file.
void allow_many_files() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

}  // namespace

Result<HttpUrl> parse_url(std::string_view url) {
  constexpr std::string_view kScheme = "http://";
  if (url.starts_with("https://")) {
    return unimplemented(
        fmt::format("{}: only plain http is spoken here; name the server's own "
                    "port, or put a proxy that ends TLS in between",
                    url));
  }
  const Status malformed =
      invalid_argument(fmt::format("'{}' is not of the form http://HOST:PORT", url));
  if (!url.starts_with(kScheme)) return malformed;
  const std::string_view rest = url.substr(kScheme.size());
  const size_t slash = std::min(rest.find('/'), rest.size());
  std::string_view host = rest.substr(0, slash);
  std::string_view prefix = rest.substr(slash);
  HttpUrl out;
  out.port = "80";
  const size_t colon = host.rfind(':');
  if (colon != std::string_view::npos && host.find(']', colon) == std::string_view::npos) {
    out.port = host.substr(colon + 1);
    host = host.substr(0, colon);
  }
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  out.host = host;
  uint16_t port = 0;
  const char* end = out.port.data() + out.port.size();
  const auto parsed = std::from_chars(out.port.data(), end, port);
  if (out.host.empty() || out.host.find_first_of("@?# ") != std::string::npos ||
      parsed.ec != std::errc() || parsed.ptr != end) {
    return malformed;
  }
  while (prefix.ends_with('/')) prefix.remove_suffix(1);
  if (prefix.ends_with("/v1")) prefix.remove_suffix(3);
  out.prefix = prefix;
  return out;
}

struct HttpLoop::Impl {
  HttpUrl url;
  HttpOptions options;
  asio::io_context context{1};
  Endpoints endpoints;
};

HttpLoop::HttpLoop(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
HttpLoop::~HttpLoop() = default;

Result<std::unique_ptr<HttpLoop>> HttpLoop::open(const HttpUrl& url, const HttpOptions& options) {
  allow_many_files();
  auto impl = std::make_unique<Impl>();
  impl->url = url;
  impl->options = options;
  error_code error;
  impl->endpoints = tcp::resolver(impl->context).resolve(url.host, url.port, error);
  if (error) return unavailable(fmt::format("{}: {}", url.host, error.message()));
  return std::unique_ptr<HttpLoop>(new HttpLoop(std::move(impl)));
}

void HttpLoop::after(double seconds, std::function<void()> callback) {
  const auto timer = std::make_shared<asio::steady_timer>(impl_->context);
  const double ns = std::clamp(seconds, 0.0, kLongest) * 1e9;
  timer->expires_after(std::chrono::nanoseconds(static_cast<int64_t>(ns)));
  timer->async_wait([timer, callback = std::move(callback)](error_code error) {
    if (!error) callback();
  });
}

void HttpLoop::send(const HttpRequest& request, HttpHandler handler) {
  const HttpUrl& url = impl_->url;
  http::request<http::string_body> message(
      request.body.empty() ? http::verb::get : http::verb::post, url.prefix + request.path, 11);
  const bool ipv6 = url.host.find(':') != std::string::npos;
  message.set(http::field::host,
              fmt::format("{}{}{}:{}", ipv6 ? "[" : "", url.host, ipv6 ? "]" : "", url.port));
  message.set(http::field::user_agent, "hcache-bench");
  message.set(http::field::accept, "text/event-stream, application/json");
  if (!impl_->options.api_key.empty()) {
    message.set(http::field::authorization, "Bearer " + impl_->options.api_key);
  }
  message.keep_alive(false);
  if (!request.body.empty()) {
    message.set(http::field::content_type, "application/json");
    message.body() = request.body;
    message.prepare_payload();
  }
  std::make_shared<Exchange>(impl_->context, std::move(message), std::move(handler))
      ->start(impl_->endpoints, impl_->options.timeout_ns);
}

void HttpLoop::run(const std::function<bool()>& proceed) {
  impl_->context.restart();
  while (!impl_->context.stopped() && proceed()) impl_->context.run_for(kTick);
}

}  // namespace hcache::load
