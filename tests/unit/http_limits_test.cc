// Limits of time and number. Time is a clock that the tests move; nothing here measures speed.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <memory>
#include <vector>

#include "base/fault_env.h"
#include "http_testing.h"

namespace hcache::http {
namespace {

using testing::Client;
using testing::eventually;
using testing::Held;
using testing::Reply;
using testing::TestServer;

constexpr const char* kAskHealth = "GET /health HTTP/1.1\r\n\r\n";
constexpr const char* kAskHeld = "GET /held HTTP/1.1\r\n\r\n";

// A server on a clock that stands still unless a test moves it. Its timeouts are the defaults.
class TimeoutTest : public ::testing::Test {
 protected:
  [[nodiscard]] bool received(std::uint64_t bytes) {
    return eventually([&] { return test_.counters().bytes_received >= bytes; });
  }
  void pass(double seconds) { env_.sleep_ns(static_cast<std::int64_t>(seconds * 1e9)); }

  FaultEnv env_;
  TestServer test_{Options(), env_};
};

TEST_F(TimeoutTest, ATricklingHeaderIsCutByTheTotalTime) {
  Client slow(test_.port());
  const std::string header = "GET /health HTTP/1.1\r\nX: y\r\n";
  for (std::size_t i = 0; i < header.size(); ++i) {
    slow.send(header.substr(i, 1));
    ASSERT_TRUE(received(i + 1));
    pass(0.25);  // 7 s in all
  }
  Client quick(test_.port());
  EXPECT_EQ(quick.ask(kAskHealth).body, "ok");
  pass(4);
  const Reply reply = slow.read();
  EXPECT_EQ(reply.status, 408);
  EXPECT_EQ(reply.header("connection"), "close");
  EXPECT_EQ(test_.counters().timeouts, 1U);
  EXPECT_EQ(quick.ask(kAskHealth).body, "ok");  // idle, not slow
}

TEST_F(TimeoutTest, ABodyMustComeAtSomeSpeed) {
  Client client(test_.port());
  const std::string head =
      "POST /echo HTTP/1.1\r\nContent-Length: 2000000\r\nExpect: 100-continue\r\n\r\n";
  ASSERT_EQ(client.ask(head).status, 100);  // the body's time has begun
  pass(59);
  // 1,638,400 bytes earn another 100 s.
  client.send(std::string(1'638'400, 'a'));
  ASSERT_TRUE(received(head.size() + 1'638'400));
  pass(100);
  client.send("b");
  ASSERT_TRUE(received(head.size() + 1'638'401));
  EXPECT_EQ(test_.counters().timeouts, 0U);
  pass(2);
  EXPECT_EQ(client.read().status, 408);
}

TEST_F(TimeoutTest, IdleConnectionsAreClosed) {
  Client silent(test_.port());
  Client idle(test_.port());
  EXPECT_EQ(idle.ask(kAskHealth).body, "ok");
  ASSERT_TRUE(eventually([&] { return test_.counters().connections_idle == 2; }));
  silent.send("\r\n");  // no request yet
  ASSERT_TRUE(received(std::string_view(kAskHealth).size() + 2));
  pass(61);
  EXPECT_TRUE(silent.at_end());
  EXPECT_TRUE(idle.at_end());
  EXPECT_EQ(test_.counters().timeouts, 0U);
}

TEST_F(TimeoutTest, AHandlerMayTakeItsTime) {
  Client client(test_.port());
  client.send(kAskHeld);
  const Held held = test_.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  pass(3600);
  Client other(test_.port());  // a tick has passed when this one is closed
  ASSERT_TRUE(eventually([&] { return test_.counters().connections_idle == 1; }));
  pass(61);
  EXPECT_TRUE(other.at_end());
  held.responder->send(200, {}, "thought");
  EXPECT_EQ(client.read().body, "thought");
}

TEST_F(TimeoutTest, AnAnswerThatIsNotReadEnds) {
  Client client(test_.port(), 4096);
  client.send(kAskHeld);
  const Held held = test_.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  held.responder->send(200, {}, std::string(32 << 20, 'x'));
  // Once nothing moves any more.
  std::uint64_t sent = 0;
  ASSERT_TRUE(eventually([&] {
    const std::uint64_t before = std::exchange(sent, test_.counters().bytes_sent);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    return sent > 0 && sent == before;
  }));
  EXPECT_TRUE(eventually([&] {
    pass(61);
    return test_.counters().connections_open == 0;
  }));
  EXPECT_EQ(test_.counters().timeouts, 1U);
  EXPECT_FALSE(client.read().whole);
}

TEST_F(TimeoutTest, AHalfClosedClientIsNotWaitedForForEver) {
  Client client(test_.port());
  client.send(kAskHeld);
  const Held held = test_.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  client.stop_sending();
  ASSERT_TRUE(eventually([&] { return test_.counters().disconnects == 1; }));
  EXPECT_TRUE(eventually([&] {
    pass(61);
    return test_.counters().connections_open == 0;
  }));
}

// ---- Numbers

TEST(HttpLimitsTest, TheOldestIdleConnectionMakesRoom) {
  Options options;
  options.max_connections = 3;
  TestServer test(std::move(options));
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 3; ++i) {
    clients.push_back(std::make_unique<Client>(test.port()));
    ASSERT_EQ(clients.back()->ask(kAskHealth).body, "ok");
  }
  ASSERT_EQ(clients[0]->ask(kAskHealth).body, "ok");  // so 1 is the oldest
  ASSERT_TRUE(eventually([&] { return test.counters().connections_idle == 3; }));
  Client fourth(test.port());
  EXPECT_EQ(fourth.ask(kAskHealth).body, "ok");
  EXPECT_TRUE(clients[1]->at_end());
  EXPECT_EQ(clients[0]->ask(kAskHealth).body, "ok");
  EXPECT_EQ(clients[2]->ask(kAskHealth).body, "ok");
  EXPECT_EQ(test.counters().connections_evicted, 1U);
}

TEST(HttpLimitsTest, WhenNoneIsIdleTheNewOneIsRefused) {
  Options options;
  options.max_connections = 2;
  TestServer test(std::move(options));
  Client a(test.port());
  Client b(test.port());
  a.send(kAskHeld);
  b.send(kAskHeld);
  const Held held_a = test.shelf.take();
  const Held held_b = test.shelf.take();
  ASSERT_NE(held_b.responder, nullptr);
  Client refused(test.port());
  EXPECT_EQ(refused.ask(kAskHealth).status, 503);
  EXPECT_EQ(test.counters().connections_refused, 1U);
  held_a.responder->send(200, {}, "a");
  held_b.responder->send(200, {}, "b");
  EXPECT_EQ(a.read().body, "a");
  EXPECT_EQ(b.read().body, "b");
  refused.close();
  EXPECT_EQ(Client(test.port()).ask(kAskHealth).body, "ok");
}

// Lowers this process's limit of open files for a scope, so that exactly one more can be opened.
class OneMoreFile {
 public:
  OneMoreFile() {
    getrlimit(RLIMIT_NOFILE, &before_);
    const int lowest_free = dup(STDERR_FILENO);
    close(lowest_free);
    rlimit limit = before_;
    limit.rlim_cur = static_cast<rlim_t>(lowest_free) + 1;
    set_ = lowest_free >= 0 && setrlimit(RLIMIT_NOFILE, &limit) == 0;
  }
  OneMoreFile(const OneMoreFile&) = delete;
  OneMoreFile& operator=(const OneMoreFile&) = delete;
  ~OneMoreFile() { setrlimit(RLIMIT_NOFILE, &before_); }
  [[nodiscard]] bool set() const { return set_; }

 private:
  rlimit before_{};
  bool set_ = false;
};

TEST(HttpLimitsTest, WithoutDescriptorsIdleConnectionsMakeRoom) {
#ifdef __SANITIZE_ADDRESS__
  GTEST_SKIP() << "the sanitizer opens files to look at objects' types";
#endif
  TestServer test;
  Client idle(test.port());
  ASSERT_EQ(idle.ask(kAskHealth).body, "ok");
  ASSERT_TRUE(eventually([&] { return test.counters().connections_idle == 1; }));
  const OneMoreFile one_more;
  ASSERT_TRUE(one_more.set());
  Client client(test.port());  // takes it, so the server has none to accept it with
  ASSERT_TRUE(client.connected());
  EXPECT_EQ(client.ask(kAskHealth).body, "ok");
  EXPECT_TRUE(idle.at_end());
}

TEST(HttpLimitsTest, OneAddressMayHaveItsShare) {
  Options options;
  options.max_connections_per_peer = 2;
  TestServer test(std::move(options));
  auto a = std::make_unique<Client>(test.port());
  Client b(test.port());
  ASSERT_EQ(a->ask(kAskHealth).body, "ok");
  ASSERT_EQ(b.ask(kAskHealth).body, "ok");
  {
    Client c(test.port());
    EXPECT_EQ(c.ask(kAskHealth).status, 429);
  }
  a.reset();
  ASSERT_TRUE(eventually([&] { return test.counters().connections_open == 1; }));
  EXPECT_EQ(Client(test.port()).ask(kAskHealth).body, "ok");
}

TEST(HttpLimitsTest, AllBodiesTogetherHaveALimit) {
  Options options;
  options.max_bodies_bytes = 1'000'000;
  TestServer test(std::move(options));
  Client first(test.port());
  const std::string head = "POST /echo HTTP/1.1\r\nContent-Length: 700000\r\n\r\n";
  const std::string most(600'000, 'a');
  first.send(head + most);
  ASSERT_TRUE(
      eventually([&] { return test.counters().bytes_received == head.size() + most.size(); }));
  Client second(test.port());
  second.send(head + most);
  EXPECT_EQ(second.read().status, 503);
  first.send(std::string(100'000, 'b'));
  EXPECT_EQ(first.read().body, most + std::string(100'000, 'b'));
  EXPECT_EQ(Client(test.port()).ask(head + most + std::string(100'000, 'b')).status, 200);
}

TEST(HttpLimitsTest, AThousandIdleConnections) {
  TestServer test;
  std::vector<std::unique_ptr<Client>> clients;
  for (int i = 0; i < 1000; ++i) {
    clients.push_back(std::make_unique<Client>(test.port()));
    ASSERT_TRUE(clients.back()->connected()) << i;
    if (i % 2 == 0) {
      ASSERT_EQ(clients.back()->ask(kAskHealth).body, "ok") << i;
    }
  }
  EXPECT_TRUE(eventually([&] { return test.counters().connections_idle == 1000; }));
  for (const auto& client : clients) ASSERT_EQ(client->ask(kAskHealth).body, "ok");
  clients.clear();
  EXPECT_TRUE(eventually([&] { return test.counters().connections_open == 0; }));
}

// Whatever comes: an answer or the end of the connection, and the server goes on.
TEST(HttpLimitsTest, HostileBytes) {
  TestServer test;
  std::uint64_t random = 88172645463325252ULL;
  const auto next = [&] {
    random ^= random << 13;
    random ^= random >> 7;
    random ^= random << 17;
    return random;
  };
  for (int round = 0; round < 300; ++round) {
    Client client(test.port());
    std::string bytes =
        round % 3 == 0 ? "" : "POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n";
    if (round % 3 == 2) bytes += "\r\n";
    for (std::uint64_t n = next() % 3000; n > 0; --n) bytes.push_back(static_cast<char>(next()));
    client.send(bytes);
    client.stop_sending();
    const Reply reply = client.read();
    EXPECT_TRUE(reply.status == 0 || reply.status >= 400) << round;
  }
  EXPECT_EQ(Client(test.port()).ask(kAskHealth).body, "ok");
  EXPECT_TRUE(eventually([&] { return test.counters().connections_open == 0; }));
}

}  // namespace
}  // namespace hcache::http
