#include "http/server.h"

#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/steady_timer.hpp>
#include <cerrno>
#include <chrono>
#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "base/log.h"
#include "connection.h"

namespace hcache::http {
namespace {

namespace asio = boost::asio;
using asio::ip::tcp;
using boost::system::error_code;
using Acceptor = asio::basic_socket_acceptor<tcp, Context::executor_type>;

constexpr int kMaxThreads = 64;
constexpr std::uint32_t kMinHeaderBytes = 256;
constexpr int kBacklog = 4096;
// Open files that are left to the rest of the process.
constexpr std::uint64_t kSpareFiles = 512;
// How often deadlines are looked at: a fraction of the shortest, within these.
constexpr std::int64_t kMinTickNs = 10'000'000;
constexpr std::int64_t kMaxTickNs = 500'000'000;
constexpr std::int64_t kTicksPerTimeout = 8;
// The pause after the system had no descriptor or memory for another connection.
constexpr std::chrono::milliseconds kAcceptPause{100};

std::string address_text(const std::string& host, std::uint16_t port) {
  const bool v6 = host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", host, port) : fmt::format("{}:{}", host, port);
}

Status check(const Options& options) {
  if (options.io_threads < 1 || options.io_threads > kMaxThreads) {
    return invalid_argument(
        fmt::format("io_threads is {}; it takes 1 to {}", options.io_threads, kMaxThreads));
  }
  const std::int64_t shortest = std::min({options.header_timeout_ns, options.body_timeout_ns,
                                          options.write_timeout_ns, options.idle_timeout_ns});
  if (shortest <= 0) return invalid_argument("timeouts must be positive");
  if (options.max_header_bytes < kMinHeaderBytes) {
    return invalid_argument(fmt::format("max_header_bytes is {}; it takes at least {}",
                                        options.max_header_bytes, kMinHeaderBytes));
  }
  if (std::min({std::uint64_t{options.max_headers}, std::uint64_t{options.max_connections},
                options.body_bytes_per_s}) == 0) {
    return invalid_argument("max_headers, max_connections and body_bytes_per_s must be positive");
  }
  return {};
}

// Makes room for `wanted` connections and returns how many there is room for.
std::uint32_t fit_connections(std::uint32_t wanted) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  const std::uint64_t needed = wanted + kSpareFiles;
  if (limit.rlim_cur < needed) {
    limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, needed);
    if (setrlimit(RLIMIT_NOFILE, &limit) != 0) getrlimit(RLIMIT_NOFILE, &limit);
  }
  if (limit.rlim_cur >= needed) return wanted;
  const auto files = static_cast<std::uint64_t>(limit.rlim_cur);
  const auto room = static_cast<std::uint32_t>(files - std::min(kSpareFiles, files / 2));
  log::warn(
      "the limit of {} open files has room for {} connections instead of {}; raise it with "
      "'ulimit -n {}' or, in a systemd unit, LimitNOFILE={}",
      files, room, wanted, needed, needed);
  return std::max(room, 1U);
}

Status listen_error(const std::string& host, std::uint16_t port, const error_code& error) {
  const std::string what =
      fmt::format("can't listen on {}: {}", address_text(host, port), error.message());
  switch (error.value()) {
    case EADDRINUSE: return unavailable(what + "; stop what listens there or choose another port");
    case EACCES:
    case EPERM:
      return permission_denied(what + "; ports below 1024 need privileges, choose a higher one");
    case EADDRNOTAVAIL:
      return unavailable(what + "; choose an address of this machine, or 0.0.0.0 or :: for all");
    default: return unavailable(what);
  }
}

// `alone`: :: is all addresses, those of IPv4 included.
error_code listen_at(const tcp::endpoint& endpoint, bool alone, Acceptor* acceptor) {
  error_code error;
  acceptor->open(endpoint.protocol(), error);
  if (!error && !alone && endpoint.address().is_v6()) {
    acceptor->set_option(asio::ip::v6_only(true), error);
  }
  if (!error) acceptor->set_option(Acceptor::reuse_address(true), error);
  if (!error) acceptor->bind(endpoint, error);
  if (!error) acceptor->listen(kBacklog, error);
  if (error) {
    error_code ignored;
    acceptor->close(ignored);
  }
  return error;
}

Status listen_on(std::string host, std::uint16_t port, bool alone, Acceptor* acceptor) {
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  error_code error;
  tcp::resolver resolver(acceptor->get_executor());
  const auto found = resolver.resolve(
      host, std::to_string(port), tcp::resolver::passive | tcp::resolver::numeric_service, error);
  if (error) {
    return invalid_argument(
        fmt::format("can't listen on {}: '{}' is no address or name known here ({})",
                    address_text(host, port), host, error.message()));
  }
  for (const auto& entry : found) {
    error = listen_at(entry.endpoint(), alone, acceptor);
    if (!error) return {};
  }
  return listen_error(host, port, error);
}

// ::ffff:127.0.0.1 is 127.0.0.1.
std::string peer_name(const Socket& socket) {
  error_code error;
  const tcp::endpoint endpoint = socket.remote_endpoint(error);
  if (error) return {};
  const asio::ip::address address = endpoint.address();
  if (address.is_v6() && address.to_v6().is_v4_mapped()) {
    return asio::ip::make_address_v4(asio::ip::v4_mapped, address.to_v6()).to_string();
  }
  return address.to_string();
}

class ServerImpl final : public Server {
 public:
  ServerImpl(Env& env, Options options) : core_(std::make_shared<Core>(env, std::move(options))) {
    for (int i = 0; i < core_->options.io_threads; ++i) {
      loops_.push_back(std::make_shared<Loop>());
      tickers_.push_back(std::make_unique<asio::steady_timer>(loops_.back()->context));
    }
  }
  ~ServerImpl() override { stop(0); }

  // All addresses have one port: the first one's, where that may be any.
  Status listen() {
    port_ = core_->options.port;
    const std::vector<std::string> hosts = split_hosts(core_->options.host);
    for (const std::string& host : hosts) {
      if (host.empty()) {
        return invalid_argument(fmt::format("can't listen on '{}': one of its addresses is empty",
                                            core_->options.host));
      }
      auto listener = std::make_unique<Listener>(loops_.front()->context);
      HCACHE_RETURN_IF_ERROR(listen_on(host, port_, hosts.size() == 1, &listener->acceptor));
      port_ = listener->acceptor.local_endpoint().port();
      listeners_.push_back(std::move(listener));
    }
    return {};
  }
  void run();

  void serve(Router router) override { core_->set_router(std::move(router)); }
  void stop(std::int64_t grace_ns) override;
  [[nodiscard]] std::uint16_t port() const override { return port_; }
  [[nodiscard]] Counters counters() const override { return core_->counters(); }

 private:
  // One address.
  struct Listener {
    explicit Listener(asio::io_context& context) : acceptor(context), pause(context) {}
    Acceptor acceptor;
    asio::steady_timer pause;
    bool failed = false;
  };

  static void run_loop(Loop& loop);
  // Calls visit(connection) for all that there are, on each loop's thread.
  template <typename Visit>
  void for_all_connections(Visit visit);
  void tick(std::size_t i);
  void accept(Listener& listener);
  void on_accepted(Listener& listener, const error_code& error, std::size_t loop, Socket socket);
  void admit(const std::shared_ptr<Loop>& loop, Socket socket);

  const std::shared_ptr<Core> core_;
  std::uint16_t port_ = 0;
  std::vector<std::shared_ptr<Loop>> loops_;
  // One per loop; the listeners belong to the first.
  std::vector<std::unique_ptr<asio::steady_timer>> tickers_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::size_t next_loop_ = 0;
  std::atomic<bool> stopping_{false};  // no ticker starts again
  std::vector<std::thread> threads_;
};

void ServerImpl::run() {
  for (const auto& listener : listeners_) accept(*listener);
  for (std::size_t i = 0; i < loops_.size(); ++i) {
    tick(i);
    threads_.emplace_back([loop = loops_[i]] { run_loop(*loop); });
  }
}

void ServerImpl::run_loop(Loop& loop) {
  while (true) {
    try {
      loop.context.run();
      return;
    } catch (const std::exception& e) {  // of a callback, or no memory: others are still served
      log::error("an HTTP thread caught: {}", e.what());
    }
  }
}

template <typename Visit>
void ServerImpl::for_all_connections(Visit visit) {
  for (const std::shared_ptr<Loop>& loop : loops_) {
    asio::post(loop->context, [&loop = *loop, visit] {
      const auto connections = loop.connections;  // visits may close some
      for (const std::shared_ptr<Connection>& connection : connections) visit(*connection);
    });
  }
}

void ServerImpl::tick(std::size_t i) {
  const Options& options = core_->options;
  const std::int64_t shortest = std::min({options.header_timeout_ns, options.body_timeout_ns,
                                          options.write_timeout_ns, options.idle_timeout_ns});
  tickers_[i]->expires_after(
      std::chrono::nanoseconds(std::clamp(shortest / kTicksPerTimeout, kMinTickNs, kMaxTickNs)));
  tickers_[i]->async_wait([this, i](const error_code& error) {
    if (error || stopping_) return;
    const std::int64_t now = core_->env.monotonic_ns();
    std::vector<std::shared_ptr<Connection>> late;
    for (const auto& connection : loops_[i]->connections) {
      if (connection->is_late(now)) late.push_back(connection);
    }
    for (const auto& connection : late) connection->on_deadline();
    tick(i);
  });
}

void ServerImpl::accept(Listener& listener) {
  const std::size_t i = next_loop_;
  next_loop_ = (next_loop_ + 1) % loops_.size();
  listener.acceptor.async_accept(loops_[i]->context,
                                 [this, &listener, i](const error_code& error, Socket socket) {
                                   on_accepted(listener, error, i, std::move(socket));
                                 });
}

void ServerImpl::on_accepted(Listener& listener, const error_code& error, std::size_t loop,
                             Socket socket) {
  if (core_->draining || !listener.acceptor.is_open()) return;
  if (!error) {
    listener.failed = false;
    admit(loops_[loop], std::move(socket));
    return accept(listener);
  }
  if (error == asio::error::connection_aborted) return accept(listener);
  if (!std::exchange(listener.failed, true)) {
    log::warn("can't accept connections for now: {}", error.message());
  }
  if (const auto idle = core_->pop_idle()) idle->post_close_if_idle();
  listener.pause.expires_after(kAcceptPause);
  listener.pause.async_wait([this, &listener](const error_code& stopped) {
    if (!stopped) accept(listener);
  });
}

void ServerImpl::admit(const std::shared_ptr<Loop>& loop, Socket socket) {
  std::string peer = peer_name(socket);
  const Core::EntryResult entry = core_->enter(peer);
  if (entry.evicted) entry.evicted->post_close_if_idle();
  if (entry.entry == Core::Entry::kDrop) return;
  auto connection = std::make_shared<Connection>(core_, loop, std::move(socket), std::move(peer));
  asio::post(loop->context, [connection, refusal = entry.refusal] {
    if (refusal.status == 0) {
      connection->start();
    } else {
      connection->start_refused(refusal);
    }
  });
}

void ServerImpl::stop(std::int64_t grace_ns) {
  if (threads_.empty()) return;
  core_->draining = true;
  asio::post(loops_.front()->context, [this] {
    for (const auto& listener : listeners_) {
      error_code ignored;
      listener->acceptor.close(ignored);
      listener->pause.cancel();
    }
  });
  for_all_connections([](Connection& connection) { connection.close_if_idle(); });
  constexpr std::int64_t kStepNs = 20'000'000;
  const std::int64_t end = core_->env.monotonic_ns() + grace_ns;
  while (core_->env.monotonic_ns() < end && !core_->wait_until_empty(kStepNs)) {
  }
  for_all_connections([](Connection& connection) { connection.close(); });
  stopping_ = true;
  for (std::size_t i = 0; i < loops_.size(); ++i) {
    asio::post(loops_[i]->context, [ticker = tickers_[i].get()] { ticker->cancel(); });
  }
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace

namespace {

Result<std::unique_ptr<Server>> start_server(Env& env, Options options,
                                             std::optional<Router> router) {
  HCACHE_RETURN_IF_ERROR(check(options));
  options.max_connections = fit_connections(options.max_connections);
  try {
    auto server = std::make_unique<ServerImpl>(env, std::move(options));
    if (router) server->serve(std::move(*router));
    HCACHE_RETURN_IF_ERROR(server->listen());
    server->run();
    return std::unique_ptr<Server>(std::move(server));
  } catch (const std::exception& e) {
    return internal_error(fmt::format("the HTTP server does not start: {}", e.what()));
  }
}

}  // namespace

Result<std::unique_ptr<Server>> Server::start(Env& env, Options options, Router router) {
  return start_server(env, std::move(options), std::move(router));
}

Result<std::unique_ptr<Server>> Server::start(Env& env, Options options) {
  return start_server(env, std::move(options), std::nullopt);
}

}  // namespace hcache::http
