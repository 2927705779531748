// One client's connection: reads requests one after the other, hands them to handlers, and writes
// the answers. Private to the server; the only header that knows Asio.
//
//   idle ──bytes──> receiving ──whole request, or refused──> answering ──> idle
//                                                                └─> lingering ──> closed
//
// Threading: a connection lives on one I/O thread; only post_close_if_idle() may be called from
// another.
#pragma once

#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core.h"
#include "exchange.h"
#include "request_parser.h"

namespace hcache::http {

using Context = boost::asio::io_context;
using Socket =
    boost::asio::basic_stream_socket<boost::asio::ip::tcp, boost::asio::io_context::executor_type>;

// What one I/O thread serves. Only that thread touches the members, the context aside.
struct Loop {
  static constexpr std::size_t kReadBytes = 64U << 10;

  Context context{1};
  std::vector<char> scratch = std::vector<char>(kReadBytes);  // bytes on their way to a connection
  std::unordered_set<std::shared_ptr<Connection>> connections;
};

class Connection final : public std::enable_shared_from_this<Connection> {
 public:
  Connection(std::shared_ptr<Core> core, const std::shared_ptr<Loop>& loop, Socket socket,
             std::string peer);
  ~Connection() = default;
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void start();
  // Tells the client why it is not served.
  void start_refused(const HttpError& refusal);
  [[nodiscard]] bool is_late(std::int64_t now_ns) const { return now_ns >= deadline_ns_; }
  void on_deadline();  // when it is late
  void close_if_idle();
  void post_close_if_idle();
  void close();

 private:
  enum class State { kIdle, kReceiving, kAnswering, kLingering, kClosed };

  void set_deadline(std::int64_t from_now_ns);
  void clear_deadline();

  void want_read();
  void on_readable(bool failed);
  void on_end_of_input();
  void process();
  void rest();
  void begin_request();
  // Whether there may be more to do with the bytes at hand.
  bool receive();
  void on_head();
  void on_more_body();
  void dispatch();
  void fail(const HttpError& error);
  void make_exchange(bool keep_alive);
  void release_body();

  void pump();
  void write_some();
  void on_written(bool failed, std::size_t n);
  void end_exchange(bool keep_alive);
  void log_exchange(bool complete);
  void lost();

  const std::shared_ptr<Core> core_;
  const std::weak_ptr<Loop> weak_loop_;
  Loop& loop_;
  Socket socket_;
  const std::string peer_;

  State state_ = State::kIdle;
  bool reading_ = false;
  bool writing_ = false;
  bool peer_left_ = false;         // the client has closed its sending side
  bool unread_ = false;            // a part of the last request's body is still to come
  std::uint64_t idle_ticket_ = 0;  // 0: not on the list of idle ones
  std::int64_t deadline_ns_ = 0;
  std::int64_t started_ns_ = 0;       // when the request's first byte came
  std::int64_t body_started_ns_ = 0;  // when its header was there
  std::uint64_t counted_body_ = 0;    // bytes of ours in Core::body_bytes
  const Route* route_ = nullptr;      // once the request is admitted
  std::string input_;                 // bytes not parsed yet
  std::string output_;                // bytes being written
  std::size_t written_ = 0;           // of output_
  std::unique_ptr<RequestParser> parser_;
  std::shared_ptr<Exchange> exchange_;
};

}  // namespace hcache::http
