#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "model/compute_threads.h"
#include "model/device.h"

namespace hcache::model {
namespace {

TEST(Device, CpuIsListedAndOpens) {
  const auto devices = Device::list();
  ASSERT_FALSE(devices.empty());
  EXPECT_EQ(devices[0].name, "cpu");
  EXPECT_GT(devices[0].memory_total, 0U);

  auto device = Device::open("cpu", 3);
  ASSERT_TRUE(device.ok()) << device.status().to_string();
  const Device& d = **device;
  EXPECT_TRUE(d.is_cpu());
  EXPECT_TRUE(d.host_visible());
  EXPECT_EQ(d.n_threads(), 3);
  EXPECT_NE(d.compute(), d.copy());
  EXPECT_EQ(d.host_buffer_type(), ggml_backend_cpu_buffer_type());
  EXPECT_NE(d.kernel_identity().find("ggml"), std::string::npos);
}

TEST(Device, ThreadsDefaultToTheUsableCores) {
  auto device = Device::open("cpu", 0);
  ASSERT_TRUE(device.ok());
  EXPECT_GE((*device)->n_threads(), 1);
  (*device)->set_n_threads(2);
  EXPECT_EQ((*device)->n_threads(), 2);
  (*device)->set_n_threads(0);  // no change
  EXPECT_EQ((*device)->n_threads(), 2);
}

TEST(Device, TakesEveryCoreUnlessTheThreadsAreFewer) {
  const auto device = Device::open("cpu", 0).value();
  const int all = device->n_threads();
  EXPECT_TRUE(device->takes_every_core());
  if (all > 1) {
    device->set_n_threads(all - 1);
    EXPECT_FALSE(device->takes_every_core());
  }
  device->set_n_threads(all + 1);
  EXPECT_TRUE(device->takes_every_core());
}

TEST(ComputeThreads, ShareEveryPieceOnce) {
  for (const int n_threads : {1, 2, 5}) {
    const auto device = Device::open("cpu", n_threads).value();
    ComputeThreads threads(*device);
    for (const size_t n : {0, 1, 2, 3, 1000}) {
      std::vector<std::atomic<int>> calls(n);
      threads.run(n, [&](size_t i) { ++calls[i]; });
      for (size_t i = 0; i < n; ++i) EXPECT_EQ(calls[i], 1) << i << " of " << n;
    }
  }
}

// Each waits for the other: one thread alone would not come back.
TEST(ComputeThreads, ShareAtOnce) {
  const auto device = Device::open("cpu", 2).value();
  ComputeThreads threads(*device);
  std::barrier both(2);
  threads.run(2, [&](size_t /*i*/) { both.arrive_and_wait(); });
}

TEST(Device, UnknownNamesTellWhatExists) {
  for (const char* name : {"", "gpu", "cuda:99", "CPU"}) {
    const auto device = Device::open(name, 0);
    EXPECT_EQ(device.code(), Code::kNotFound) << name;
    EXPECT_NE(device.status().message().find("cpu"), std::string::npos);
  }
  EXPECT_EQ(Device::open("cpu", -1).code(), Code::kInvalidArgument);
}

TEST(Device, BadRpcEndpointsAreRefusedWithoutAborting) {
  for (const char* name :
       {"rpc:", "rpc:host", "rpc::1", "rpc:host:0", "rpc:host:70000", "rpc:host:1x"}) {
    EXPECT_EQ(Device::open(name, 0).code(), Code::kInvalidArgument) << name;
  }
  EXPECT_EQ(Device::open("rpc:127.0.0.1:1", 0).code(), Code::kUnavailable);
  EXPECT_EQ(Device::open("rpc:no-such-host.invalid:5000", 0).code(), Code::kNotFound);
}

// Listens on loopback and answers one client with `answer`.
class FakeServer {
 public:
  explicit FakeServer(std::string answer) {
    fd_ = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(bind(fd_, generic, size), 0);
    EXPECT_EQ(listen(fd_, 1), 0);
    EXPECT_EQ(getsockname(fd_, generic, &size), 0);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this, answer = std::move(answer)] {
      const int client = accept(fd_, nullptr, nullptr);
      char request[33];
      if (recv(client, request, sizeof(request), MSG_WAITALL) > 0) {
        EXPECT_EQ(send(client, answer.data(), answer.size(), MSG_NOSIGNAL),
                  static_cast<ssize_t>(answer.size()));
      }
      close(client);
    });
  }
  ~FakeServer() {
    thread_.join();
    close(fd_);
  }
  FakeServer(const FakeServer&) = delete;
  FakeServer& operator=(const FakeServer&) = delete;
  [[nodiscard]] std::string device() const { return "rpc:127.0.0.1:" + std::to_string(port_); }

 private:
  int fd_ = -1;
  int port_ = 0;
  std::thread thread_;
};

TEST(Device, StrangersOnTheRpcPortAreRefusedWithoutAborting) {
  const FakeServer web("HTTP/1.1 400 Bad Request\r\n\r\n");
  EXPECT_EQ(Device::open(web.device(), 0).code(), Code::kUnavailable);

  std::string old(36, '\0');
  old[0] = 28;  // size of the answer
  old[8] = 1;   // protocol 1.0
  const FakeServer server(old);
  const auto device = Device::open(server.device(), 0);
  EXPECT_EQ(device.code(), Code::kFailedPrecondition);
  EXPECT_NE(device.status().message().find("1.0"), std::string::npos);
}

}  // namespace
}  // namespace hcache::model
