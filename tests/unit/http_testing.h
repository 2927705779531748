// A raw client and a small server for the tests of http: bytes as a test wants them, nothing
// corrected by a client library.
#pragma once

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cctype>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/env.h"
#include "base/sync.h"
#include "base_testing.h"
#include "http/server.h"
#include "patience.h"

namespace hcache::http::testing {

// How long a test's client waits for bytes before it gives up.
inline constexpr std::chrono::seconds kPatience{120};

using hcache::test::eventually;

struct Reply {
  int status = 0;                                   // 0: the connection ended before an answer
  std::multimap<std::string, std::string> headers;  // names in lower case
  std::string body;
  bool whole = false;  // not cut off

  [[nodiscard]] std::string header(const std::string& name) const {
    const auto found = headers.find(name);
    return found == headers.end() ? "" : found->second;
  }
};

// Threading: one thread.
class Client {
 public:
  explicit Client(std::uint16_t port, int receive_buffer = 0, const char* host = "127.0.0.1") {
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (receive_buffer > 0) {
      setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof(receive_buffer));
    }
    const timeval patience = {.tv_sec = kPatience.count(), .tv_usec = 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    inet_pton(AF_INET, host, &address.sin_addr);
    connected_ = connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client() { close(); }

  [[nodiscard]] bool connected() const { return connected_; }
  // False when the server has closed the connection.
  bool send(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
  }
  void stop_sending() { shutdown(fd_, SHUT_WR); }
  void close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }
  // Closes with a reset.
  void reset() {
    const linger now = {.l_onoff = 1, .l_linger = 0};
    setsockopt(fd_, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
    close();
  }

  // The next answer. `bodiless`: to a HEAD request.
  Reply read(bool bodiless = false) {
    Reply reply;
    const std::optional<std::string> head = take_until("\r\n\r\n");
    if (!head) return reply;
    reply.status = std::atoi(head->c_str() + std::string_view("HTTP/1.1 ").size());
    parse_headers(*head, &reply);
    if (bodiless || reply.status < 200 || reply.status == 204 || reply.status == 304) {
      reply.whole = true;
    } else if (reply.header("transfer-encoding") == "chunked") {
      read_chunks(&reply);
    } else if (reply.headers.contains("content-length")) {
      const auto body = take(std::strtoull(reply.header("content-length").c_str(), nullptr, 10));
      reply.whole = body.has_value();
      reply.body = body.value_or("");
    } else {
      while (fill()) {
      }
      reply.body.swap(input_);
      reply.whole = true;
    }
    return reply;
  }
  Reply ask(std::string_view request) {
    send(request);
    return read(request.starts_with("HEAD "));
  }
  // Waits for bytes up to and including `end`; nothing if the connection ends first.
  std::optional<std::string> take_until(std::string_view end) {
    std::size_t at = 0;
    while ((at = input_.find(end)) == std::string::npos) {
      if (!fill()) return std::nullopt;
    }
    return take(at + end.size());
  }
  // Whether the server closes the connection without sending anything more.
  bool at_end() { return input_.empty() && !fill() && !timed_out_; }

 private:
  bool fill() {
    char buffer[16384];
    const ssize_t n = recv(fd_, buffer, sizeof(buffer), 0);
    if (n > 0) input_.append(buffer, static_cast<std::size_t>(n));
    timed_out_ = n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK);
    return n > 0;
  }
  std::optional<std::string> take(std::size_t n) {
    while (input_.size() < n) {
      if (!fill()) return std::nullopt;
    }
    std::string out = input_.substr(0, n);
    input_.erase(0, n);
    return out;
  }
  static void parse_headers(std::string_view head, Reply* reply) {
    head.remove_prefix(head.find("\r\n") + 2);
    while (!head.starts_with("\r\n")) {
      const std::string_view line = head.substr(0, head.find("\r\n"));
      std::string name(line.substr(0, line.find(": ")));
      for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
      reply->headers.emplace(name, line.substr(name.size() + 2));
      head.remove_prefix(line.size() + 2);
    }
  }
  void read_chunks(Reply* reply) {
    while (true) {
      const auto size = take_until("\r\n");
      if (!size) return;
      const std::size_t n = std::strtoull(size->c_str(), nullptr, 16);
      const auto piece = take(n + 2);
      if (!piece) return;
      if (n == 0) break;
      reply->body += piece->substr(0, n);
    }
    reply->whole = true;
  }

  int fd_ = -1;
  bool connected_ = false;
  bool timed_out_ = false;
  std::string input_;
};

struct Held {
  Request request;
  std::shared_ptr<Responder> responder;
};

// Requests that a handler put aside for the test to answer. Threading: any thread.
class Shelf {
 public:
  Handler handler() {
    return [this](Request request, std::shared_ptr<Responder> responder) {
      MutexLock lock(mutex_);
      held_.push_back({std::move(request), std::move(responder)});
    };
  }
  [[nodiscard]] std::size_t size() {
    MutexLock lock(mutex_);
    return held_.size();
  }
  // The oldest; an empty one if none comes.
  Held take() {
    if (!eventually([this] { return size() > 0; })) return {};
    MutexLock lock(mutex_);
    Held out = std::move(held_.front());
    held_.pop_front();
    return out;
  }

 private:
  Mutex mutex_;
  std::deque<Held> held_;
};

// What most tests need: /health (public), /echo, /items/{id}, and /held, whose requests the test
// answers. Members that the server uses are declared before it.
struct TestServer {
  explicit TestServer(Options options = {}, Env& env = Env::real()) {
    Router router;
    const Handler ok = [](const Request&, const std::shared_ptr<Responder>& responder) {
      responder->send(200, {{"Content-Type", "text/plain"}}, "ok");
    };
    const Handler echo = [](const Request& request, const std::shared_ptr<Responder>& responder) {
      responder->send(200, {}, request.body);
    };
    router.add("GET", "/health", ok, {.is_public = true});
    router.add("POST", "/echo", echo);
    router.add("POST", "/small", echo, {.max_body_bytes = 10});
    router.add("GET", "/items/{id}", shelf.handler());
    router.add("DELETE", "/items/{id}", shelf.handler());
    router.add("GET", "/held", shelf.handler());
    router.add("POST", "/held", shelf.handler());
    auto started = Server::start(env, std::move(options), std::move(router));
    EXPECT_OK(started);
    if (started.ok()) server = std::move(*started);
  }

  [[nodiscard]] std::uint16_t port() const { return server->port(); }
  [[nodiscard]] Counters counters() const { return server->counters(); }

  Shelf shelf;
  std::unique_ptr<Server> server;
};

}  // namespace hcache::http::testing
