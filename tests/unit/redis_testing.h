// Redis servers for tests: single ones and clusters, on the loopback, with nothing on disk.
#pragma once

#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base_testing.h"
#include "child_process.h"
#include "patience.h"

namespace hcache::testing {

// Threading: none of its own.
class RedisServer {
 public:
  // `options` as redis-server takes them: {"--requirepass", "x"}.
  explicit RedisServer(std::vector<std::string> options = {}) : options_(std::move(options)) {
    for (int attempt = 0; attempt < 5 && !process_.running(); ++attempt) {
      port_ = free_port();
      start();
    }
    EXPECT_TRUE(process_.running()) << "redis-server does not start";
  }
  // On the same port again, empty.
  void start() {
    std::vector<std::string> args = {"redis-server", "--bind", "127.0.0.1", "--save",      "",
                                     "--appendonly", "no",     "--dir",     folder_.path()};
    // With TLS the port is that of TLS.
    const bool tls =
        std::find(options_.begin(), options_.end(), "--tls-cert-file") != options_.end();
    args.insert(args.end(), {tls ? "--tls-port" : "--port", std::to_string(port_)});
    if (tls) args.insert(args.end(), {"--port", "0"});
    args.insert(args.end(), options_.begin(), options_.end());
    process_ = ChildProcess(args);
    if (!process_.answers(port_)) process_.stop();
  }
  void stop() { process_.stop(); }
  void signal(int number) { process_.signal(number); }

  [[nodiscard]] int port() const { return port_; }
  [[nodiscard]] std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  [[nodiscard]] std::string url() const { return "redis://" + address(); }

 private:
  TempDir folder_;
  std::vector<std::string> options_;
  ChildProcess process_;
  int port_ = 0;
};

// Three masters with a replica each.
class RedisCluster {
 public:
  RedisCluster() {
    std::vector<std::string> create = {"redis-cli", "--cluster", "create"};
    for (int i = 0; i < 6; ++i) {
      // The bus' port is 10,000 higher unless it is named.
      servers_.push_back(std::make_unique<RedisServer>(std::vector<std::string>{
          "--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--cluster-port",
          std::to_string(free_port()), "--repl-diskless-sync-delay", "0"}));
      create.push_back(servers_.back()->address());
    }
    create.insert(create.end(), {"--cluster-replicas", "1", "--cluster-yes"});
    EXPECT_EQ(ChildProcess(create).wait(), 0);
    // Every node must have heard of it, and the replicas must hold what their masters do.
    for (std::size_t i = 0; i < servers_.size(); ++i) {
      test::Patience patience("node " + std::to_string(i) + " of the cluster");
      const auto is_ready = [&] {
        return ask(i, "cluster info").find("cluster_state:ok") != std::string::npos &&
               ask(i, "info replication").find("link_status:down") == std::string::npos;
      };
      while (!is_ready() && patience.lasts()) {
      }
    }
  }
  // What a node answers.
  [[nodiscard]] std::string ask(std::size_t i, const std::string& command) const {
    FILE* pipe =
        popen(("redis-cli -p " + std::to_string(servers_[i]->port()) + " " + command).c_str(), "r");
    std::string out;
    char piece[512];
    while (pipe != nullptr && fgets(piece, sizeof piece, pipe) != nullptr) out += piece;
    if (pipe != nullptr) pclose(pipe);
    return out;
  }
  // The first three are masters.
  [[nodiscard]] RedisServer& server(std::size_t i) { return *servers_[i]; }
  // Of a node, as the cluster names it.
  [[nodiscard]] std::string id(std::size_t i) const { return ask(i, "cluster myid").substr(0, 40); }
  [[nodiscard]] std::string url() const {
    return "redis://" + servers_[1]->address() + "," + servers_[2]->address();
  }

 private:
  std::vector<std::unique_ptr<RedisServer>> servers_;
};

}  // namespace hcache::testing
