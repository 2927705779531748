// Starts the RPC test server (rpc_server_main.cc) on a free loopback port and ends it.
#pragma once

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>
#include <thread>

#include "base/status.h"

namespace hcache::testing {

// Threading: none of its own.
class RpcServer {
 public:
  // kUnavailable when no server answers on any of a few ports within its time.
  static Result<RpcServer*> shared(int n_threads = 1) {
    // Never destroyed: ggml's client still frees remote buffers from a thread of its own while the
    // test process exits. The server dies with the process.
    static RpcServer* const server = new RpcServer(n_threads);
    if (server->pid_ <= 0) return unavailable("the RPC test server does not start");
    return server;
  }
  RpcServer(const RpcServer&) = delete;
  RpcServer& operator=(const RpcServer&) = delete;

  // As --device takes it.
  [[nodiscard]] std::string device() const { return "rpc:127.0.0.1:" + std::to_string(port_); }

 private:
  static constexpr int kAttempts = 5;  // a port may be taken between choosing and using it
  static constexpr std::chrono::seconds kPatience{30};

  explicit RpcServer(int n_threads) {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      port_ = free_port();
      start(n_threads);
      if (answers()) return;
      stop();
    }
  }

  static sockaddr_in loopback(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }
  static int free_port() {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = loopback(0);
    socklen_t size = sizeof(address);
    const bool ok = fd >= 0 &&
                    bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 &&
                    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
    if (fd >= 0) close(fd);
    return ok ? ntohs(address.sin_port) : 0;
  }

  void start(int n_threads) {
    const std::string endpoint = "127.0.0.1:" + std::to_string(port_);
    const std::string threads = std::to_string(n_threads);
    const pid_t parent = getpid();
    pid_ = fork();
    if (pid_ != 0) return;
    // The child: it must not outlive the test, however the test ends.
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    const int null = open("/dev/null", O_RDWR);
    for (int fd = 0; fd < 3; ++fd) dup2(null, fd);
    execl(HCACHE_TEST_RPC_SERVER, HCACHE_TEST_RPC_SERVER, endpoint.c_str(), threads.c_str(),
          static_cast<char*>(nullptr));
    _exit(127);
  }
  // Waits until a connection is accepted, unless the server has ended.
  [[nodiscard]] bool answers() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
    while (pid_ > 0 && std::chrono::steady_clock::now() < deadline) {
      if (waitpid(pid_, nullptr, WNOHANG) != 0) {
        pid_ = -1;
        return false;
      }
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      sockaddr_in address = loopback(port_);
      const bool connected =
          fd >= 0 && connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0;
      if (fd >= 0) close(fd);
      if (connected) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return false;
  }
  void stop() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  pid_t pid_ = -1;
  int port_ = 0;
};

}  // namespace hcache::testing
