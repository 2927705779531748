// Streams: their bytes, clients that leave or do not read, many at once, and the end of the server.
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <vector>

#include "http_testing.h"

namespace hcache::http {
namespace {

using testing::Client;
using testing::eventually;
using testing::Held;
using testing::Reply;
using testing::TestServer;

constexpr const char* kAskHeld = "GET /held HTTP/1.1\r\n\r\n";
constexpr const char* kAskHealth = "GET /health HTTP/1.1\r\n\r\n";
constexpr std::int64_t kSecond = 1'000'000'000;

TEST(HttpStreamTest, PiecesArriveAsTheyAreWritten) {
  TestServer test;
  Client client(test.port());
  client.send(kAskHeld);
  const Held held = test.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  EXPECT_FALSE(held.responder->writable());
  EXPECT_FALSE(held.responder->write("too early"));
  ASSERT_TRUE(held.responder->start_stream(200, stream_headers()));
  EXPECT_EQ(test.counters().streams_open, 1U);
  ASSERT_TRUE(client.take_until("text/event-stream\r\n").has_value());
  for (int i = 0; i < 3; ++i) {
    EXPECT_TRUE(held.responder->writable());
    EXPECT_TRUE(held.responder->write(event_text(std::to_string(i))));
    EXPECT_TRUE(client.take_until("data: " + std::to_string(i) + "\n\n").has_value());
  }
  EXPECT_TRUE(held.responder->write(""));  // not the end
  EXPECT_TRUE(held.responder->finish());
  EXPECT_FALSE(held.responder->finish());
  EXPECT_FALSE(held.responder->write("late"));
  EXPECT_TRUE(client.take_until("\r\n0\r\n\r\n").has_value());
  EXPECT_EQ(test.counters().streams_open, 0U);
  EXPECT_EQ(client.ask(kAskHealth).body, "ok");
}

TEST(HttpStreamTest, Http10GetsItToTheEndOfTheConnection) {
  TestServer test;
  Client client(test.port());
  client.send("GET /held HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  const Held held = test.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  held.responder->start_stream(200, {});
  held.responder->write("abc");
  held.responder->write("def");
  held.responder->finish();
  const Reply reply = client.read();
  EXPECT_EQ(reply.header("connection"), "close");
  EXPECT_EQ(reply.body, "abcdef");
}

TEST(HttpStreamTest, HeadGetsNoPieces) {
  TestServer test;
  Client client(test.port());
  client.send("HEAD /held HTTP/1.1\r\n\r\n");
  const Held held = test.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  EXPECT_TRUE(held.responder->start_stream(200, {}));
  EXPECT_TRUE(held.responder->write("abc"));
  EXPECT_TRUE(held.responder->finish());
  EXPECT_EQ(client.read(true).status, 200);
  EXPECT_EQ(client.ask(kAskHealth).body, "ok");
}

TEST(HttpStreamTest, ADroppedStreamIsNotTakenForAWholeOne) {
  TestServer test;
  Client client(test.port());
  client.send(kAskHeld);
  Held held = test.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  held.responder->start_stream(200, {});
  held.responder->write("abc");
  held.responder.reset();
  const Reply reply = client.read();
  EXPECT_FALSE(reply.whole);
}

// How a client may leave, and in what state its request may be then.
enum class Leave { kClose, kReset, kStopSending };

class DisconnectTest : public ::testing::TestWithParam<std::tuple<Leave, bool>> {};

TEST_P(DisconnectTest, TheHandlerIsTold) {
  const auto [leave, streaming] = GetParam();
  TestServer test;
  Client client(test.port());
  client.send(kAskHeld);
  const Held held = test.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  std::atomic<int> told{0};
  held.responder->on_disconnect([&] { ++told; });
  if (streaming) {
    held.responder->start_stream(200, {});
    held.responder->write("abc");
    ASSERT_TRUE(client.take_until("abc\r\n").has_value());
  }
  EXPECT_EQ(told, 0);
  switch (leave) {
    case Leave::kClose: client.close(); break;
    case Leave::kReset: client.reset(); break;
    case Leave::kStopSending: client.stop_sending(); break;
  }
  EXPECT_TRUE(eventually([&] { return told == 1; }));
  EXPECT_TRUE(eventually([&] { return test.counters().disconnects == 1; }));
  EXPECT_FALSE(held.responder->writable());
  EXPECT_FALSE(held.responder->write("more"));
  held.responder->on_disconnect([&] { ++told; });
  EXPECT_EQ(told, 2);  // at once: it has happened
  const bool still_reached = held.responder->send(200, {}, "late");
  if (leave == Leave::kStopSending && !streaming) {
    EXPECT_TRUE(still_reached);
    EXPECT_EQ(client.read().body, "late");
  }
  EXPECT_TRUE(eventually([&] { return test.counters().connections_open == 0; }));
}

INSTANTIATE_TEST_SUITE_P(All, DisconnectTest,
                         ::testing::Combine(::testing::Values(Leave::kClose, Leave::kReset,
                                                              Leave::kStopSending),
                                            ::testing::Bool()));

TEST(HttpStreamTest, AFinishedAnswerIsNoDisconnect) {
  TestServer test;
  std::atomic<int> told{0};
  {
    Client client(test.port());
    client.send(kAskHeld);
    const Held held = test.shelf.take();
    ASSERT_NE(held.responder, nullptr);
    held.responder->on_disconnect([&] { ++told; });
    held.responder->send(200, {}, "x");
    EXPECT_EQ(client.read().body, "x");
  }
  EXPECT_TRUE(eventually([&] { return test.counters().connections_open == 0; }));
  EXPECT_EQ(told, 0);
  EXPECT_EQ(test.counters().disconnects, 0U);
}

TEST(HttpStreamTest, AClientThatDoesNotReadIsCutOff) {
  Options options;
  options.max_unsent_bytes = 200'000;
  TestServer test(std::move(options));
  Client client(test.port(), 4096);
  client.send(kAskHeld);
  const Held held = test.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  std::atomic<int> told{0};
  held.responder->on_disconnect([&] { ++told; });
  held.responder->start_stream(200, {});
  const std::string piece(50'000, 'p');
  std::size_t most = 0;
  // The system's own buffers take some megabytes first.
  ASSERT_TRUE(eventually([&] {
    const bool open = held.responder->write(piece);
    most = std::max(most, held.responder->unsent_bytes());
    return !open;
  }));
  EXPECT_LE(most, 200'000U + piece.size() + 100);
  EXPECT_FALSE(held.responder->writable());
  EXPECT_TRUE(eventually([&] { return told == 1; }));
  EXPECT_EQ(test.counters().slow_clients_cut, 1U);
  EXPECT_EQ(test.counters().disconnects, 0U);
  EXPECT_EQ(test.counters().streams_open, 0U);
  EXPECT_FALSE(client.read().whole);
}

TEST(HttpStreamTest, ALargeAnswerPassesASlowReader) {
  Options options;
  options.max_unsent_bytes = 1000;  // of streams; a whole answer may be larger
  TestServer test(std::move(options));
  Client client(test.port(), 4096);
  client.send(kAskHeld);
  const std::string body(8 << 20, 'b');
  test.shelf.take().responder->send(200, {}, body);
  EXPECT_EQ(client.read().body, body);
}

TEST(HttpStreamTest, OthersAreAnsweredBesideManyOpenStreams) {
  constexpr int kStreams = 256;
  TestServer test;
  std::vector<std::unique_ptr<Client>> clients;
  std::vector<Held> held;
  for (int i = 0; i < kStreams; ++i) {
    clients.push_back(std::make_unique<Client>(test.port()));
    clients.back()->send(kAskHeld);
    held.push_back(test.shelf.take());
    ASSERT_NE(held.back().responder, nullptr);
    ASSERT_TRUE(held.back().responder->start_stream(200, {}));
  }
  EXPECT_EQ(test.counters().streams_open, 256U);
  Client other(test.port());
  for (int round = 0; round < 20; ++round) {
    for (const Held& h : held) ASSERT_TRUE(h.responder->write("tick"));
    ASSERT_EQ(other.ask(kAskHealth).body, "ok");
  }
  for (const Held& h : held) EXPECT_TRUE(h.responder->finish());
  std::string expected;
  for (int round = 0; round < 20; ++round) expected += "tick";
  for (const auto& client : clients) {
    const Reply reply = client->read();
    EXPECT_TRUE(reply.whole);
    EXPECT_EQ(reply.body, expected);
  }
}

// ---- The end

TEST(HttpStopTest, WithGraceExchangesEnd) {
  TestServer test;
  Client idle(test.port());
  EXPECT_EQ(idle.ask(kAskHealth).body, "ok");
  Client streaming(test.port());
  streaming.send(kAskHeld);
  const Held stream = test.shelf.take();
  ASSERT_NE(stream.responder, nullptr);
  stream.responder->start_stream(200, {});
  Client waiting(test.port());
  waiting.send(kAskHeld);
  const Held whole = test.shelf.take();
  ASSERT_NE(whole.responder, nullptr);
  const std::uint16_t port = test.port();

  std::thread stopper([&] { test.server->stop(3600 * kSecond); });
  EXPECT_TRUE(idle.at_end());
  EXPECT_TRUE(eventually([&] { return !Client(port).connected(); }));
  EXPECT_TRUE(stream.responder->write("still"));
  EXPECT_TRUE(stream.responder->finish());
  EXPECT_TRUE(whole.responder->send(200, {}, "whole"));
  EXPECT_EQ(streaming.read().body, "still");
  const Reply last = waiting.read();
  EXPECT_EQ(last.body, "whole");
  EXPECT_EQ(last.header("connection"), "close");
  stopper.join();
  test.server->stop(0);  // once more does nothing
  EXPECT_EQ(test.counters().connections_open, 0U);
}

TEST(HttpStopTest, WithoutGraceTheyAreCut) {
  std::atomic<int> told{0};
  Held stream;
  Held waiting;
  {
    TestServer test;
    Client a(test.port());
    a.send(kAskHeld);
    stream = test.shelf.take();
    ASSERT_NE(stream.responder, nullptr);
    stream.responder->start_stream(200, {});
    stream.responder->on_disconnect([&] { ++told; });
    Client b(test.port());
    b.send(kAskHeld);
    waiting = test.shelf.take();
    ASSERT_NE(waiting.responder, nullptr);
    waiting.responder->on_disconnect([&] { ++told; });
    test.server->stop(0);
    EXPECT_EQ(told, 2);
    EXPECT_FALSE(a.read().whole);
    EXPECT_EQ(b.read().status, 0);
  }
  // The server is gone; responders may outlive it.
  EXPECT_FALSE(stream.responder->write("x"));
  EXPECT_FALSE(stream.responder->finish());
  EXPECT_FALSE(waiting.responder->send(200, {}, "x"));
}

}  // namespace
}  // namespace hcache::http
