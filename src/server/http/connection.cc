#include "connection.h"

#include <algorithm>
#include <boost/asio/buffer.hpp>
#include <boost/asio/error.hpp>
#include <boost/asio/post.hpp>
#include <exception>
#include <limits>

#include "admission.h"
#include "base/log.h"

namespace hcache::http {
namespace {

namespace asio = boost::asio;
using boost::system::error_code;

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();
// How long what a client still sends is thrown away, so that it gets to read why it was refused.
constexpr std::int64_t kLingerNs = 2'000'000'000;

// A target as the access log may have it: without the query, visible ASCII.
std::string loggable_path(const std::string& target) {
  std::string path = target.substr(0, target.find('?'));
  std::replace_if(
      path.begin(), path.end(), [](char c) { return c <= 0x20 || c >= 0x7f; }, '?');
  return path;
}

}  // namespace

Connection::Connection(std::shared_ptr<Core> core, const std::shared_ptr<Loop>& loop, Socket socket,
                       std::string peer)
    : core_(std::move(core)),
      weak_loop_(loop),
      loop_(*loop),
      socket_(std::move(socket)),
      peer_(std::move(peer)) {
  clear_deadline();
}

void Connection::start() {
  loop_.connections.insert(shared_from_this());
  error_code ignored;
  socket_.set_option(asio::ip::tcp::no_delay(true), ignored);
  socket_.non_blocking(true, ignored);
  process();
  want_read();
}

void Connection::start_refused(const HttpError& refusal) {
  loop_.connections.insert(shared_from_this());
  error_code ignored;
  socket_.non_blocking(true, ignored);
  started_ns_ = core_->env.monotonic_ns();
  fail(refusal);
  want_read();
}

void Connection::set_deadline(std::int64_t from_now_ns) {
  deadline_ns_ = core_->env.monotonic_ns() + from_now_ns;
}
void Connection::clear_deadline() { deadline_ns_ = kNever; }

void Connection::on_deadline() {
  switch (state_) {
    case State::kReceiving:
      ++core_->live.timeouts;
      fail({408, "the request took too long to arrive"});
      break;
    case State::kAnswering:
      ++core_->live.timeouts;
      close();
      break;
    case State::kIdle:
    case State::kLingering:
    case State::kClosed: close(); break;
  }
}

void Connection::close_if_idle() {
  if (state_ == State::kIdle) close();
}

void Connection::post_close_if_idle() {
  asio::post(loop_.context, [self = shared_from_this()] { self->close_if_idle(); });
}

void Connection::close() {
  if (state_ == State::kClosed) return;
  const std::shared_ptr<Connection> self = shared_from_this();
  state_ = State::kClosed;
  clear_deadline();
  core_->remove_idle(idle_ticket_);
  release_body();
  if (exchange_) {
    exchange_->close();
    log_exchange(false);
    exchange_.reset();
  }
  parser_.reset();
  error_code ignored;
  socket_.close(ignored);
  core_->leave(peer_);
  loop_.connections.erase(self);
}

// The client went away, or the network did.
void Connection::lost() {
  if (state_ == State::kReceiving || state_ == State::kAnswering) ++core_->live.disconnects;
  close();
}

// ---- Reading ---------------------------------------------------------------------------------

// While an answer is being made, reading goes on: that is how a client that leaves is noticed. What
// it sends ahead waits in input_, which then may not grow beyond a header's size.
void Connection::want_read() {
  if (reading_ || peer_left_ || state_ == State::kClosed) return;
  if (state_ == State::kAnswering && input_.size() >= core_->options.max_header_bytes) return;
  reading_ = true;
  socket_.async_wait(Socket::wait_read, [self = shared_from_this()](const error_code& error) {
    self->on_readable(static_cast<bool>(error));
  });
}

void Connection::on_readable(bool failed) {
  reading_ = false;
  if (state_ == State::kClosed) return;
  if (failed) return lost();
  std::size_t room = loop_.scratch.size();
  if (state_ == State::kAnswering) {
    const std::size_t limit = core_->options.max_header_bytes;
    room = std::min(room, limit - std::min(limit, input_.size()));
    if (room == 0) return;
  }
  error_code error;
  const std::size_t n = socket_.read_some(asio::buffer(loop_.scratch.data(), room), error);
  if (error == asio::error::would_block) return want_read();
  if (error == asio::error::eof) return on_end_of_input();
  if (error) return lost();
  core_->live.bytes_received += n;
  if (state_ != State::kLingering) {
    input_.append(loop_.scratch.data(), n);
    process();
  }
  want_read();
}

void Connection::on_end_of_input() {
  peer_left_ = true;
  if (state_ != State::kAnswering) return lost();
  if (exchange_->peer_left()) ++core_->live.disconnects;
  // What is answered in full is still delivered; a handler that never answers must not keep this.
  set_deadline(core_->options.write_timeout_ns);
  pump();
}

void Connection::process() {
  while (true) {
    if (state_ == State::kIdle) {
      // Empty lines before a request are allowed for, and don't count as one.
      const std::size_t begin = std::min(input_.find_first_not_of("\r\n"), input_.size());
      input_.erase(0, begin);
      if (input_.empty()) return rest();
      begin_request();
    } else if (state_ == State::kReceiving) {
      if (!receive()) return;
    } else {
      return;
    }
  }
}

void Connection::rest() {
  if (peer_left_ || core_->draining) return close();
  if (idle_ticket_ != 0) return;
  std::string().swap(input_);
  std::string().swap(output_);
  idle_ticket_ = core_->push_idle(shared_from_this());
  set_deadline(core_->options.idle_timeout_ns);
}

void Connection::begin_request() {
  core_->remove_idle(std::exchange(idle_ticket_, 0));
  state_ = State::kReceiving;
  unread_ = false;
  ++core_->live.requests;
  parser_ = std::make_unique<RequestParser>(
      ParserLimits{core_->options.max_header_bytes, core_->options.max_headers});
  started_ns_ = core_->env.monotonic_ns();
  set_deadline(core_->options.header_timeout_ns);
}

bool Connection::receive() {
  switch (parser_->feed(&input_)) {
    case RequestParser::Event::kHead: on_head(); return true;
    case RequestParser::Event::kDone: dispatch(); break;
    case RequestParser::Event::kFailed: fail(parser_->error()); break;
    case RequestParser::Event::kNeedMore:
      if (peer_left_) {
        lost();
      } else if (route_ != nullptr) {
        on_more_body();
      }
      break;
  }
  return false;
}

void Connection::on_head() {
  Request& request = parser_->request();
  request.peer = peer_;
  const Router* router = core_->router();
  Admission admission = router == nullptr
                            ? starting(&request)
                            : admit(core_->options, *router, parser_->content_length(), &request);
  unread_ = admission.route == nullptr && parser_->has_body();
  make_exchange(parser_->keep_alive() && !unread_);
  if (admission.route != nullptr) {
    route_ = admission.route;
    parser_->set_body_limit(admission.max_body_bytes);
    body_started_ns_ = core_->env.monotonic_ns();
    set_deadline(core_->options.body_timeout_ns);
    const bool waits = parser_->expects_continue() && parser_->has_body() && input_.empty();
    if (waits) exchange_->send_continue();
    return;
  }
  state_ = State::kAnswering;
  clear_deadline();
  if (admission.refusal) {
    exchange_->send_error(admission.refusal->status, admission.refusal->message, admission.headers);
  } else {
    exchange_->send(200, admission.headers, {});
  }
}

// A body may take longer the more of it has come, and all bodies together must fit their limit.
void Connection::on_more_body() {
  const Options& options = core_->options;
  const std::uint64_t size = parser_->request().body.size();
  const std::uint64_t all = core_->body_bytes += size - counted_body_;
  counted_body_ = size;
  if (all > options.max_bodies_bytes) {
    return fail({503, "the server is receiving as much as it can hold"});
  }
  const double earned_s = static_cast<double>(size) / static_cast<double>(options.body_bytes_per_s);
  deadline_ns_ =
      body_started_ns_ + options.body_timeout_ns + static_cast<std::int64_t>(earned_s * 1e9);
}

void Connection::release_body() { core_->body_bytes -= std::exchange(counted_body_, 0); }

void Connection::dispatch() {
  release_body();
  state_ = State::kAnswering;
  clear_deadline();
  Request request = std::move(parser_->request());
  parser_.reset();
  const Route& route = *std::exchange(route_, nullptr);
  if (peer_left_) {
    exchange_->peer_left();
    set_deadline(core_->options.write_timeout_ns);
  }
  try {
    route.handler(std::move(request), Exchange::handle(exchange_));
  } catch (const std::exception& e) {
    log::error("the handler of {} threw: {}", exchange_->record().path, e.what());
  }
}

// Answers what can't be received, and ends the connection: it is unknown where the next request
// would begin.
void Connection::fail(const HttpError& error) {
  release_body();
  unread_ = true;
  route_ = nullptr;
  if (exchange_ == nullptr) make_exchange(false);
  exchange_->end_connection();
  core_->remove_idle(std::exchange(idle_ticket_, 0));
  state_ = State::kAnswering;
  clear_deadline();
  exchange_->send_error(error.status, error.message, {});
}

void Connection::make_exchange(bool keep_alive) {
  Exchange::Client client;
  client.keep_alive = keep_alive;
  AccessRecord record;
  record.peer = peer_;
  if (parser_) {
    const Request& request = parser_->request();
    client.http_1_0 = parser_->http_1_0();
    client.head = request.method == "HEAD";
    client.allowed_origin = allowed_origin(core_->options, request);
    client.path = request.path;
    record.method = request.method;
    record.path = loggable_path(request.target);
    record.key_name = request.key_name;
  }
  auto notify = [weak_loop = weak_loop_, weak = weak_from_this()] {
    const std::shared_ptr<Loop> loop = weak_loop.lock();
    if (!loop) return;
    asio::post(loop->context, [weak] {
      if (const auto self = weak.lock()) self->pump();
    });
  };
  exchange_ = std::make_shared<Exchange>(core_, std::move(client), std::move(notify));
  exchange_->record() = std::move(record);
}

// ---- Writing ---------------------------------------------------------------------------------

// A stream that is cut must end at once, also when a write of it waits for the client.
void Connection::pump() {
  if (exchange_ == nullptr) return;
  if (!writing_) {
    output_.clear();
    written_ = 0;
  }
  const Exchange::Output out = exchange_->take(writing_ ? nullptr : &output_);
  if (out.cut) return close();
  if (writing_) return;
  if (!output_.empty()) return write_some();
  if (out.done) end_exchange(out.keep_alive);
}

void Connection::write_some() {
  writing_ = true;
  if (state_ == State::kAnswering) set_deadline(core_->options.write_timeout_ns);
  socket_.async_write_some(asio::buffer(output_.data() + written_, output_.size() - written_),
                           [self = shared_from_this()](const error_code& error, std::size_t n) {
                             self->on_written(static_cast<bool>(error), n);
                           });
}

void Connection::on_written(bool failed, std::size_t n) {
  writing_ = false;
  if (state_ == State::kClosed) return;
  if (failed) return lost();
  core_->live.bytes_sent += n;
  written_ += n;
  exchange_->sent(n);
  if (written_ < output_.size()) return write_some();
  if (state_ == State::kAnswering && !peer_left_) clear_deadline();
  pump();
}

void Connection::end_exchange(bool keep_alive) {
  log_exchange(true);
  exchange_.reset();
  parser_.reset();
  clear_deadline();
  if (keep_alive && !core_->draining) {
    state_ = State::kIdle;
    process();
    want_read();
  } else if ((unread_ || !input_.empty()) && !peer_left_) {
    // Closing with bytes unread would reset the connection under the answer.
    state_ = State::kLingering;
    error_code ignored;
    socket_.shutdown(Socket::shutdown_send, ignored);
    std::string().swap(input_);
    set_deadline(kLingerNs);
    want_read();
  } else {
    close();
  }
}

void Connection::log_exchange(bool complete) {
  if (!core_->options.access_log) return;
  AccessRecord& record = exchange_->record();
  record.status = exchange_->status();
  record.complete = complete;
  record.seconds = static_cast<double>(core_->env.monotonic_ns() - started_ns_) / 1e9;
  core_->options.access_log(record);
}

}  // namespace hcache::http
