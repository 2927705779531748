#include "request_parser.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/beast/http/basic_parser.hpp>
#include <boost/beast/http/error.hpp>
#include <limits>
#include <string_view>
#include <utility>

namespace hcache::http {
namespace {

namespace beast = boost::beast;
using beast::error_code;

bool is_token_char(char c) {
  static constexpr std::string_view kOthers = "!#$%&'*+-.^_`|~";
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         kOthers.find(c) != std::string_view::npos;
}

std::string lower(beast::string_view text) {
  std::string out(text.data(), text.size());
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

// Any line that begins with white space: a folded field, or a request line that was moved.
bool has_folded_line(std::string_view head) {
  for (std::size_t at = head.find('\n'); at + 1 < head.size(); at = head.find('\n', at + 1)) {
    if (head[at + 1] == ' ' || head[at + 1] == '\t') return true;
  }
  return false;
}

constexpr std::size_t kShortestEnd = std::string_view("0\r\n\r\n").size();

// "GET / HTTP/2.0": well-formed but for its version.
bool names_a_version(std::string_view head) {
  const std::string_view line = head.substr(0, head.find('\r'));
  return std::count(line.begin(), line.end(), ' ') == 2 && line.size() > 8 &&
         line.substr(line.size() - 8, 5) == "HTTP/";
}

}  // namespace

class RequestParser::Impl final : public beast::http::basic_parser<true> {
 public:
  explicit Impl(const ParserLimits& limits) : limits_(limits) {
    // Both limits are kept here, where there is a status to go with them.
    header_limit(limits.header_bytes + 1);
    body_limit(std::numeric_limits<std::uint64_t>::max());
  }

  Event feed(std::string* input) {
    if (!is_header_done()) return feed_head(input);
    std::size_t at = 0;
    const Event event = feed_body(*input, &at);
    input->erase(0, at);
    return event;
  }

  [[nodiscard]] bool http_1_0() const { return http_1_0_; }

  Request request_;
  HttpError error_;
  bool expects_continue_ = false;
  std::uint64_t content_length_ = 0;
  std::uint64_t body_bytes_limit_ = 0;

 private:
  Event feed_head(std::string* input) {
    if (!input->empty() && !is_token_char(input->front())) {
      return fail(400, "this is not an HTTP request (the server speaks HTTP without TLS)");
    }
    constexpr std::string_view kEnd = "\r\n\r\n";
    const std::size_t end = input->find(kEnd, searched_);
    searched_ = input->size() - std::min(input->size(), kEnd.size() - 1);
    const std::size_t size = end == std::string::npos ? input->size() : end + kEnd.size();
    if (size > limits_.header_bytes) return fail(431, "the request's header is too large");
    if (end == std::string::npos) return Event::kNeedMore;

    const std::string_view head(input->data(), size);
    if (has_folded_line(head)) return fail(400, "a header is folded over several lines");
    error_code error;
    const std::size_t used = put({head.data(), head.size()}, error);
    if (error == beast::http::error::bad_version && names_a_version(head)) {
      return fail(505, "the server speaks HTTP/1.0 and HTTP/1.1");
    }
    if (error) return fail(400, "the request's header is malformed: " + error.message());
    if (used != size) return fail(400, "the request's header is malformed");
    input->erase(0, used);
    return Event::kHead;
  }

  // One element of the body after the other. Beast is shown at most header_bytes at a time, so
  // whether a chunk's header or the trailers are too long does not depend on how the bytes arrive.
  Event feed_body(std::string_view input, std::size_t* at) {
    while (!is_done() && *at < input.size()) {
      const std::string_view window = input.substr(*at, limits_.header_bytes);
      // Beast asserts that it has this much of a last chunk, and no chunked body ends with less.
      if (chunked() && window.size() < kShortestEnd) return Event::kNeedMore;
      error_code error;
      const std::size_t used = put({window.data(), window.size()}, error);
      *at += used;
      if (error && error != beast::http::error::need_more) {
        return fail(400, "the body is malformed: " + error.message());
      }
      if (used > 0) continue;
      if (window.size() < limits_.header_bytes) return Event::kNeedMore;
      return fail(400, "a chunk's header or the trailers are too long");
    }
    return is_done() ? Event::kDone : Event::kNeedMore;
  }

  // The first reason stays: a callback's says more than Beast's code for it.
  Event fail(int status, std::string message) {
    if (error_.status == 0) error_ = {status, std::move(message)};
    return Event::kFailed;
  }
  void refuse(int status, std::string message, error_code* error) {
    fail(status, std::move(message));
    *error = beast::http::error::bad_value;
  }

  void on_request_impl(beast::http::verb, beast::string_view method, beast::string_view target,
                       int version, error_code&) override {
    request_.method.assign(method.data(), method.size());
    request_.target.assign(target.data(), target.size());
    http_1_0_ = version < 11;
  }

  void on_field_impl(beast::http::field field, beast::string_view name, beast::string_view value,
                     error_code& error) override {
    if (head_done_) return;  // trailers mean nothing here
    if (request_.headers.size() == limits_.headers) {
      return refuse(431, "the request has too many headers", &error);
    }
    switch (field) {
      case beast::http::field::content_length:
        if (std::exchange(has_length_, true)) {
          return refuse(400, "Content-Length is there twice", &error);
        }
        if (!std::all_of(value.begin(), value.end(), [](char c) { return c >= '0' && c <= '9'; })) {
          return refuse(400, "Content-Length is not a number", &error);
        }
        break;
      case beast::http::field::transfer_encoding:
        if (http_1_0_) return refuse(400, "HTTP/1.0 has no Transfer-Encoding", &error);
        if (lower(value) != "chunked") {
          return refuse(501, "the only Transfer-Encoding known is chunked", &error);
        }
        break;
      case beast::http::field::expect:
        if (lower(value) != "100-continue") {
          return refuse(417, "the only expectation known is 100-continue", &error);
        }
        expects_continue_ = !http_1_0_;
        break;
      default: break;
    }
    request_.headers.emplace_back(lower(name), std::string(value.data(), value.size()));
  }

  void on_header_impl(error_code&) override { head_done_ = true; }

  void on_body_init_impl(const boost::optional<std::uint64_t>&, error_code&) override {}

  std::size_t on_body_impl(beast::string_view piece, error_code&) override {
    request_.body.append(piece.data(), piece.size());
    return piece.size();
  }
  void on_chunk_header_impl(std::uint64_t size, beast::string_view, error_code& error) override {
    if (size > body_bytes_limit_ - request_.body.size()) {
      refuse(413, "the request's body is too large", &error);
    }
  }
  std::size_t on_chunk_body_impl(std::uint64_t, beast::string_view piece, error_code&) override {
    request_.body.append(piece.data(), piece.size());
    return piece.size();
  }
  void on_finish_impl(error_code&) override {}
  // Beast's interface for answers.
  void on_response_impl(int, beast::string_view, int, error_code&) override {}

  const ParserLimits limits_;
  std::size_t searched_ = 0;  // no end of the header begins before this
  bool http_1_0_ = false;
  bool has_length_ = false;
  bool head_done_ = false;
};

RequestParser::RequestParser(const ParserLimits& limits) : impl_(std::make_unique<Impl>(limits)) {}
RequestParser::~RequestParser() = default;

RequestParser::Event RequestParser::feed(std::string* input) { return impl_->feed(input); }
Request& RequestParser::request() { return impl_->request_; }
const HttpError& RequestParser::error() const { return impl_->error_; }
bool RequestParser::keep_alive() const { return impl_->keep_alive(); }
bool RequestParser::http_1_0() const { return impl_->http_1_0(); }
bool RequestParser::has_body() const { return !impl_->is_done(); }
bool RequestParser::expects_continue() const { return impl_->expects_continue_; }
std::uint64_t RequestParser::content_length() const { return impl_->content_length().value_or(0); }
void RequestParser::set_body_limit(std::uint64_t bytes) { impl_->body_bytes_limit_ = bytes; }

}  // namespace hcache::http
