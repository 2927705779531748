// One exchange after the other over loopback: what every HTTP client relies on.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <vector>

#include "http_testing.h"

namespace hcache::http {
namespace {

using testing::Client;
using ::testing::ElementsAre;
using testing::eventually;
using ::testing::HasSubstr;
using testing::Held;
using ::testing::Pair;
using testing::Reply;
using testing::TestServer;

std::string get(const std::string& target, const std::string& headers = "") {
  return "GET " + target + " HTTP/1.1\r\nHost: x\r\n" + headers + "\r\n";
}
std::string post(const std::string& target, const std::string& body,
                 const std::string& headers = "") {
  return fmt::format("POST {} HTTP/1.1\r\nContent-Length: {}\r\n{}\r\n{}", target, body.size(),
                     headers, body);
}

TEST(HttpServerTest, AConnectionServesManyRequests) {
  TestServer test;
  Client client(test.port());
  for (int i = 0; i < 3; ++i) {
    const Reply health = client.ask(get("/health"));
    EXPECT_EQ(health.status, 200);
    EXPECT_EQ(health.body, "ok");
    EXPECT_EQ(health.header("content-type"), "text/plain");
    EXPECT_EQ(health.header("x-content-type-options"), "nosniff");
    EXPECT_EQ(client.ask(post("/echo", "abc")).body, "abc");
  }
  const Counters counters = test.counters();
  EXPECT_EQ(counters.connections_accepted, 1U);
  EXPECT_EQ(counters.requests, 6U);
  EXPECT_EQ(counters.responses[2], 6U);
}

TEST(HttpServerTest, HandlersSeeTheWholeRequest) {
  TestServer test;
  Client client(test.port());
  client.send(
      "POST //held/./?a=%31&b HTTP/1.1\r\nX-One: 1\r\nx-one: 2\r\n"
      "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
  const Held held = test.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  const Request& request = held.request;
  EXPECT_EQ(request.method, "POST");
  EXPECT_EQ(request.path, "/held");
  EXPECT_THAT(request.segments, ElementsAre("held"));
  EXPECT_THAT(request.query, ElementsAre(Pair("a", "1"), Pair("b", "")));
  ASSERT_NE(request.header("x-one"), nullptr);
  EXPECT_EQ(*request.header("x-one"), "1");
  EXPECT_EQ(*request.query_value("a"), "1");
  EXPECT_EQ(request.body, "abcde");
  EXPECT_EQ(request.peer, "127.0.0.1");
  EXPECT_EQ(request.key_index, -1);
  EXPECT_TRUE(held.responder->send(201, {{"X-Two", "2"}}, "made"));
  EXPECT_FALSE(held.responder->send(200, {}, "again"));
  EXPECT_FALSE(held.responder->start_stream(200, {}));
  const Reply reply = client.read();
  EXPECT_EQ(reply.status, 201);
  EXPECT_EQ(reply.header("x-two"), "2");
  EXPECT_EQ(reply.body, "made");

  client.send(get("/items/a%2Fb%20c"));
  const Held item = test.shelf.take();
  ASSERT_NE(item.responder, nullptr);
  ASSERT_NE(item.request.param("id"), nullptr);
  EXPECT_EQ(*item.request.param("id"), "a/b c");
  item.responder->send(204, {}, "");
  EXPECT_EQ(client.read().status, 204);
  EXPECT_EQ(client.ask(get("/health")).body, "ok");
}

TEST(HttpServerTest, PipelinedRequestsAreAnsweredInOrder) {
  TestServer test;
  Client client(test.port());
  client.send(get("/items/1") + post("/echo", "two") + get("/items/3") + get("/health"));
  const Held first = test.shelf.take();
  ASSERT_NE(first.responder, nullptr);
  EXPECT_EQ(test.shelf.size(), 0U);  // the third waits for its turn
  first.responder->send(200, {}, "one");
  EXPECT_EQ(client.read().body, "one");
  EXPECT_EQ(client.read().body, "two");
  test.shelf.take().responder->send(200, {}, "three");
  EXPECT_EQ(client.read().body, "three");
  EXPECT_EQ(client.read().body, "ok");
}

TEST(HttpServerTest, MorePipelinedBytesThanAHeaderWait) {
  Options options;
  options.max_header_bytes = 1024;
  TestServer test(std::move(options));
  Client client(test.port());
  const std::string body(100'000, 'b');
  client.send(get("/items/1") + post("/echo", body) + get("/health"));
  test.shelf.take().responder->send(200, {}, "one");
  EXPECT_EQ(client.read().body, "one");
  EXPECT_EQ(client.read().body, body);
  EXPECT_EQ(client.read().body, "ok");
}

TEST(HttpServerTest, HeadAndOptionsAndUnknownMethods) {
  TestServer test;
  Client client(test.port());
  const Reply head = client.ask("HEAD /health HTTP/1.1\r\n\r\n");
  EXPECT_EQ(head.status, 200);
  EXPECT_EQ(head.header("content-length"), "2");
  const Reply options = client.ask("OPTIONS /items/1 HTTP/1.1\r\n\r\n");
  EXPECT_EQ(options.status, 200);
  EXPECT_EQ(options.header("allow"), "DELETE, GET, HEAD, OPTIONS");
  EXPECT_EQ(options.header("access-control-allow-methods"), "");
  EXPECT_EQ(client.ask("OPTIONS * HTTP/1.1\r\n\r\n").header("allow"),
            "DELETE, GET, HEAD, OPTIONS, POST");
  const Reply wrong = client.ask("PUT /echo HTTP/1.1\r\n\r\n");
  EXPECT_EQ(wrong.status, 405);
  EXPECT_EQ(wrong.header("allow"), "OPTIONS, POST");
  EXPECT_EQ(client.ask(get("/nowhere")).status, 404);
  EXPECT_EQ(client.ask("CONNECT host:80 HTTP/1.1\r\n\r\n").status, 400);
  EXPECT_EQ(client.ask(get("/health")).body, "ok");  // all on one connection
}

TEST(HttpServerTest, Http10ClosesUnlessAsked) {
  TestServer test;
  {
    Client client(test.port());
    const Reply reply = client.ask("GET /health HTTP/1.0\r\n\r\n");
    EXPECT_EQ(reply.body, "ok");
    EXPECT_EQ(reply.header("connection"), "close");
    EXPECT_TRUE(client.at_end());
  }
  Client client(test.port());
  const Reply reply = client.ask("GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n");
  EXPECT_EQ(reply.header("connection"), "keep-alive");
  EXPECT_EQ(client.ask(get("/health", "Connection: close\r\n")).body, "ok");
  EXPECT_TRUE(client.at_end());
}

TEST(HttpServerTest, ExpectContinueAsksForTheBodyOrRefusesIt) {
  TestServer test;
  Client client(test.port());
  const std::string expect = "Expect: 100-continue\r\n";
  EXPECT_EQ(client.ask("POST /echo HTTP/1.1\r\nContent-Length: 3\r\n" + expect + "\r\n").status,
            100);
  EXPECT_EQ(client.ask("abc").body, "abc");
  const Reply refused =
      client.ask("POST /small HTTP/1.1\r\nContent-Length: 11\r\n" + expect + "\r\n");
  EXPECT_EQ(refused.status, 413);
  EXPECT_EQ(refused.header("connection"), "close");
  EXPECT_TRUE(client.at_end());
}

TEST(HttpServerTest, LargeBodiesAreRefusedAndTheClientGetsToKnow) {
  Options options;
  options.max_body_bytes = 1 << 20;
  TestServer test(std::move(options));
  const std::string fits(1 << 20, 'a');
  Client good(test.port());
  EXPECT_EQ(good.ask(post("/echo", fits)).body, fits);
  // The client sends everything before it reads, as many do.
  Client known(test.port());
  EXPECT_EQ(known.ask(post("/echo", fits + "b")).status, 413);
  Client chunked(test.port());
  chunked.send("POST /echo HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n");
  for (int i = 0; i < 3; ++i) chunked.send("80000\r\n" + std::string(0x80000, 'c') + "\r\n");
  EXPECT_EQ(chunked.read().status, 413);
}

TEST(HttpServerTest, MalformedRequestsEndTheConnection) {
  TestServer test;
  const struct {
    const char* bytes;
    int status;
  } cases[] = {
      {"\x16\x03\x01", 400},
      {"GET / HTTP/2.0\r\n\r\n", 505},
      {"GET /health HTTP/1.1\r\nA: b\r\n c\r\n\r\n", 400},
      {"POST /echo HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET "
       "/health HTTP/1.1\r\n\r\n",
       400},
      {"POST /echo HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501},
  };
  for (const auto& c : cases) {
    Client client(test.port());
    const Reply reply = client.ask(c.bytes);
    EXPECT_EQ(reply.status, c.status) << c.bytes;
    EXPECT_TRUE(reply.whole);
    EXPECT_EQ(reply.header("connection"), "close");
    client.stop_sending();
    EXPECT_TRUE(client.at_end());
  }
  Client client(test.port());
  EXPECT_EQ(client.ask(get("/" + std::string(20000, 'a'))).status, 431);
  Client bad_target(test.port());
  EXPECT_EQ(bad_target.ask(get("/../etc/passwd")).status, 400);
  EXPECT_EQ(bad_target.ask(get("/health")).body, "ok");  // this one could be told apart
}

TEST(HttpServerTest, KeysAreWantedWhereARouteIsNotPublic) {
  Options options;
  options.api_keys = {{"anna", hash_api_key("k1")}, {"bert", hash_api_key("k2")}};
  options.error_body = [](int status, std::string_view message, std::string_view path) {
    return ErrorBody{"application/json", fmt::format(R"({{"status":{},"path":"{}","why":"{}"}})",
                                                     status, path, message)};
  };
  TestServer test(std::move(options));
  Client client(test.port());
  EXPECT_EQ(client.ask(get("/health")).status, 200);
  const Reply refused = client.ask(get("/held"));
  EXPECT_EQ(refused.status, 401);
  EXPECT_EQ(refused.header("www-authenticate"), "Bearer");
  EXPECT_EQ(refused.header("content-type"), "application/json");
  EXPECT_THAT(refused.body, HasSubstr(R"({"status":401,"path":"/held",)"));
  EXPECT_EQ(client.ask(get("/held", "Authorization: Bearer k3\r\n")).status, 401);
  EXPECT_EQ(client.ask("OPTIONS /held HTTP/1.1\r\n\r\n").status, 200);
  client.send(get("/held", "x-api-key: k2\r\n"));
  Held held = test.shelf.take();
  ASSERT_NE(held.responder, nullptr);
  EXPECT_EQ(held.request.key_index, 1);
  EXPECT_EQ(held.request.key_name, "bert");
  held.responder->send_error(429, "slow down", {{"Retry-After", "3"}});
  const Reply busy = client.read();
  EXPECT_EQ(busy.status, 429);
  EXPECT_EQ(busy.header("retry-after"), "3");
  EXPECT_THAT(busy.body, HasSubstr("slow down"));
  // The body of a stranger is not received.
  EXPECT_EQ(client.ask("POST /echo HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n").status, 401);
}

TEST(HttpServerTest, CorsIsForListedOrigins) {
  Options options;
  options.cors_origins = {"https://app.example"};
  TestServer test(std::move(options));
  Client client(test.port());
  const std::string origin = "Origin: https://app.example\r\n";
  const Reply allowed = client.ask(get("/health", origin));
  EXPECT_EQ(allowed.header("access-control-allow-origin"), "https://app.example");
  EXPECT_EQ(allowed.header("vary"), "Origin");
  EXPECT_EQ(client.ask(get("/nowhere", origin)).header("access-control-allow-origin"),
            "https://app.example");
  const Reply refused = client.ask(get("/health", "Origin: https://evil.example\r\n"));
  EXPECT_EQ(refused.status, 403);
  EXPECT_EQ(refused.header("access-control-allow-origin"), "");
  EXPECT_THAT(refused.body, HasSubstr("Origin"));
  const Reply preflight =
      client.ask("OPTIONS /echo HTTP/1.1\r\n" + origin +
                 "Access-Control-Request-Method: POST\r\n"
                 "Access-Control-Request-Headers: authorization, content-type\r\n\r\n");
  EXPECT_EQ(preflight.status, 200);
  EXPECT_EQ(preflight.header("access-control-allow-methods"), "GET, POST, DELETE, OPTIONS");
  EXPECT_EQ(preflight.header("access-control-allow-headers"), "authorization, content-type");
}

TEST(HttpServerTest, SeveralAddressesHaveOnePort) {
  Options options;
  options.host = "127.0.0.1,127.0.0.2";
  TestServer test(std::move(options));
  for (const char* host : {"127.0.0.1", "127.0.0.2"}) {
    Client client(test.port(), 0, host);
    EXPECT_EQ(client.ask(get("/health")).status, 200) << host;
  }
}

TEST(HttpServerTest, EveryExchangeIsLogged) {
  Mutex mutex;
  std::vector<AccessRecord> records;
  Options options;
  options.access_log = [&](const AccessRecord& record) {
    MutexLock lock(mutex);
    records.push_back(record);
  };
  options.api_keys = {{"anna", hash_api_key("k1")}};
  TestServer test(std::move(options));
  {
    Client client(test.port());
    client.ask(get("/health?secret=1"));
    client.ask(post("/echo", "abc", "x-api-key: k1\r\n"));
    client.ask("nonsense\r\n\r\n");
  }
  ASSERT_TRUE(eventually([&] {
    MutexLock lock(mutex);
    return records.size() == 3;
  }));
  MutexLock lock(mutex);
  EXPECT_EQ(records[0].path, "/health");
  EXPECT_EQ(records[0].status, 200);
  EXPECT_EQ(records[0].key_name, "");
  EXPECT_EQ(records[1].method, "POST");
  EXPECT_EQ(records[1].key_name, "anna");
  EXPECT_EQ(records[1].peer, "127.0.0.1");
  EXPECT_GT(records[1].bytes, 100U);
  EXPECT_TRUE(records[1].complete);
  EXPECT_EQ(records[2].status, 400);
}

TEST(HttpServerTest, AHandlerThatGivesNoAnswerIsA500) {
  Router router;
  router.add("GET", "/forgets", [](const Request&, const std::shared_ptr<Responder>&) {});
  router.add("GET", "/throws", [](const Request&, const std::shared_ptr<Responder>&) {
    throw std::runtime_error("no");
  });
  auto server = Server::start(Env::real(), {}, std::move(router));
  ASSERT_OK(server);
  Client client((*server)->port());
  EXPECT_EQ(client.ask(get("/forgets")).status, 500);
  EXPECT_EQ(client.ask(get("/throws")).status, 500);
}

TEST(HttpServerTest, WithoutRoutesYetEverythingIsA503) {
  Options options;
  options.error_body = [](int status, std::string_view, std::string_view) {
    return ErrorBody{"text/plain", fmt::format("{} for now", status)};
  };
  auto server = Server::start(Env::real(), std::move(options));
  ASSERT_OK(server);
  Client client((*server)->port());
  for (const std::string& request : {get("/hello"), post("/any/thing", "")}) {
    const auto answer = client.ask(request);
    EXPECT_EQ(answer.status, 503);
  }
  EXPECT_EQ(client.ask(get("/hello")).body, "503 for now");
  Router router;
  router.add("GET", "/hello", [](const Request&, const std::shared_ptr<Responder>& responder) {
    responder->send(200, {}, "there");
  });
  (*server)->serve(std::move(router));
  EXPECT_EQ(client.ask(get("/hello")).body, "there");
  EXPECT_EQ(client.ask(get("/other")).status, 404);
}

TEST(HttpServerTest, SeveralThreadsServe) {
  Options options;
  options.io_threads = 3;
  TestServer test(std::move(options));
  std::vector<std::thread> clients;
  std::atomic<int> good{0};
  for (int i = 0; i < 6; ++i) {
    clients.emplace_back([&, i] {
      Client client(test.port());
      for (int k = 0; k < 50; ++k) {
        const std::string body = fmt::format("{}-{}", i, k);
        if (client.ask(post("/echo", body)).body == body) ++good;
      }
    });
  }
  for (std::thread& thread : clients) thread.join();
  EXPECT_EQ(good, 300);
}

TEST(HttpServerTest, AddressesThatCantBeHadAreExplained) {
  TestServer test;
  const auto start = [](const std::string& host, std::uint16_t port) {
    Options options;
    options.host = host;
    options.port = port;
    return Server::start(Env::real(), std::move(options), Router()).status();
  };
  const Status taken = start("127.0.0.1", test.port());
  EXPECT_EQ(taken.code(), Code::kUnavailable);
  EXPECT_THAT(taken.message(), HasSubstr(fmt::format("127.0.0.1:{}", test.port())));
  EXPECT_THAT(taken.message(), HasSubstr("another port"));
  EXPECT_EQ(start("192.0.2.1", 0).code(), Code::kUnavailable);
  EXPECT_THAT(start("192.0.2.1", 0).message(), HasSubstr("address of this machine"));
  EXPECT_EQ(start(std::string(64, 'a'), 0).code(), Code::kInvalidArgument);
  Options options;
  options.io_threads = 0;
  EXPECT_EQ(Server::start(Env::real(), options, Router()).code(), Code::kInvalidArgument);
  options.io_threads = 1;
  options.idle_timeout_ns = 0;
  EXPECT_EQ(Server::start(Env::real(), options, Router()).code(), Code::kInvalidArgument);
}

TEST(HttpServerTest, Ipv6Works) {
  Options options;
  options.host = "[::1]";
  auto server = Server::start(Env::real(), options, Router());
  if (server.code() == Code::kUnavailable) GTEST_SKIP() << server.status().message();
  ASSERT_OK(server);
  EXPECT_GT((*server)->port(), 0);
}

}  // namespace
}  // namespace hcache::http
