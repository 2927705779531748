// Starts the RPC test server (rpc_server_main.cc) on a free loopback port and ends it.
#pragma once

#include <string>

#include "base/status.h"
#include "child_process.h"

namespace hcache::testing {

// Threading: none of its own.
class RpcServer {
 public:
  // kUnavailable when no server answers on any of a few ports within its time.
  static Result<RpcServer*> shared() {
    static RpcServer* const server = new RpcServer(1);
    return running(server);
  }
  // Another one.
  static Result<RpcServer*> second() {
    static RpcServer* const server = new RpcServer(1);
    return running(server);
  }
  RpcServer(const RpcServer&) = delete;
  RpcServer& operator=(const RpcServer&) = delete;

  // As --device takes it.
  [[nodiscard]] std::string device() const { return "rpc:127.0.0.1:" + std::to_string(port_); }

 private:
  static constexpr int kAttempts = 5;  // a port may be taken between choosing and using it

  // Never destroyed: ggml's client still frees remote buffers from a thread of its own while the
  // test process exits. The server dies with the process.
  static Result<RpcServer*> running(RpcServer* server) {
    if (!server->process_.running()) return unavailable("the RPC test server does not start");
    return server;
  }

  explicit RpcServer(int n_threads) {
    for (int attempt = 0; attempt < kAttempts; ++attempt) {
      port_ = free_port();
      process_ = ChildProcess({HCACHE_TEST_RPC_SERVER, "127.0.0.1:" + std::to_string(port_),
                               std::to_string(n_threads)});
      if (process_.answers(port_)) return;
      process_.stop();
    }
  }

  ChildProcess process_;
  int port_ = 0;
};

}  // namespace hcache::testing
