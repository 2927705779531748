// Ten thousand idle connections: no thread and about a KiB for each. The clients live in a process
// of their own, so that each side needs no more descriptors than connections.
#include <malloc.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <csignal>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <vector>

#include "http_testing.h"

namespace hcache::http {
namespace {

using testing::Client;
using testing::eventually;
using testing::TestServer;

constexpr int kConnections = 10'000;
constexpr rlim_t kFiles = kConnections + 600;
constexpr std::size_t kMaxBytesEach = 4096;
constexpr const char* kAskHealth = "GET /health HTTP/1.1\r\n\r\n";

// Raises this process's limit of open files; false where the system does not allow it.
bool raise_file_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  if (limit.rlim_cur < kFiles) limit.rlim_cur = std::min(limit.rlim_max, kFiles);
  return setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= kFiles;
}

// The client process: learns the port, opens its connections, says so, and stays until its input
// ends.
[[noreturn]] void run_clients(int input, int output) {
  std::uint16_t port = 0;
  char done = 'y';
  if (::read(input, &port, sizeof(port)) != sizeof(port)) _exit(1);
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < kConnections; ++i) {
    clients.push_back(std::make_unique<Client>(port));
    // All have been used, so that what a connection keeps after a request counts too.
    if (clients.back()->ask(kAskHealth).body != "ok") done = 'n';
  }
  if (::write(output, &done, 1) != 1) _exit(1);
  while (::read(input, &done, 1) > 0) {
  }
  _exit(0);
}

std::size_t thread_count() {
  return static_cast<std::size_t>(
      std::distance(std::filesystem::directory_iterator("/proc/self/task"),
                    std::filesystem::directory_iterator()));
}

TEST(HttpManyTest, TenThousandIdleConnectionsCostLittle) {
  if (!raise_file_limit()) {
    GTEST_SKIP() << "the limit of open files is below " << kFiles << " (ulimit -Hn)";
  }
  int to_clients[2];
  int from_clients[2];
  ASSERT_EQ(pipe(to_clients), 0);
  ASSERT_EQ(pipe(from_clients), 0);
  const pid_t pid = fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(to_clients[1]);
    ::close(from_clients[0]);
    run_clients(to_clients[0], from_clients[1]);
  }
  ::close(to_clients[0]);
  ::close(from_clients[1]);

  TestServer test;
  ASSERT_EQ(Client(test.port()).ask(kAskHealth).body, "ok");
  ASSERT_TRUE(eventually([&] { return test.counters().connections_open == 0; }));
  const std::size_t threads = thread_count();
  const std::size_t before = mallinfo2().uordblks;
  const std::uint16_t port = test.port();
  ASSERT_EQ(::write(to_clients[1], &port, sizeof(port)), static_cast<ssize_t>(sizeof(port)));
  char done = 0;
  ASSERT_EQ(::read(from_clients[0], &done, 1), 1);
  EXPECT_EQ(done, 'y');
  ASSERT_TRUE(eventually([&] { return test.counters().connections_idle == kConnections; }));
  const std::size_t each = (mallinfo2().uordblks - before) / kConnections;
  std::cout << each << " bytes of heap per idle connection\n";
  EXPECT_LT(each, kMaxBytesEach);
  EXPECT_EQ(thread_count(), threads);
  EXPECT_EQ(Client(test.port()).ask(kAskHealth).body, "ok");

  ::close(to_clients[1]);
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  EXPECT_EQ(status, 0);
  EXPECT_TRUE(eventually([&] { return test.counters().connections_open == 0; }));
  ::close(from_clients[0]);
}

}  // namespace
}  // namespace hcache::http
