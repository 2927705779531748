// The pieces of http that need no socket: targets, routes, keys, answers' bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "admission.h"
#include "base_testing.h"
#include "http/message.h"
#include "http/router.h"
#include "response.h"
#include "target.h"

namespace hcache::http {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pair;

// ---- Targets

TEST(TargetTest, PathsAreDecodedAndNormalised) {
  const struct {
    const char* target;
    const char* path;
  } cases[] = {
      {"/", "/"},
      {"/v1/models", "/v1/models"},
      {"//v1///models/", "/v1/models"},
      {"/a/./b/../c", "/a/c"},
      {"/a/%2e%2E/b", "/b"},
      {"/a%20b/%C3%A9", "/a b/\xC3\xA9"},
      {"/a+b", "/a+b"},
      {"/a%2Fb", "/a/b"},
      {"http://host:80/x?y=1", "/x"},
      {"https://host", "/"},
      {"http://host?y=1", "/"},
      {"*", "*"},
  };
  for (const auto& c : cases) {
    auto target = parse_target(c.target);
    SCOPED_TRACE(c.target);
    ASSERT_OK(target);
    EXPECT_EQ(target->path, c.path);
  }
  EXPECT_THAT(parse_target("/a%2Fb/c")->segments, ElementsAre("a/b", "c"));
}

TEST(TargetTest, MalformedOnesAreRefused) {
  for (const char* target :
       {"",     "a",       "?a=b", "/%",       "/%1",         "/%zz",       "/%00",
        "/%0a", "/a%7f",   "/..",  "/a/../..", "/%2e%2e/etc", "/a#b",       "/\x80",
        "/a b", "host:80", "/?%",  "/?a=%g0",  "/?a=%00",     "ftp://host/"}) {
    EXPECT_EQ(parse_target(target).code(), Code::kInvalidArgument) << target;
  }
}

TEST(TargetTest, QueriesAreTakenApart) {
  EXPECT_THAT(parse_target("/?a=1&b&c=x=y&&d+e=%2B+%0A&a=2")->query,
              ElementsAre(Pair("a", "1"), Pair("b", ""), Pair("c", "x=y"), Pair("d e", "+ \n"),
                          Pair("a", "2")));
  EXPECT_TRUE(parse_target("/a?")->query.empty());
}

// ---- Routes

Handler nothing() {
  return [](Request, std::shared_ptr<Responder>) {};
}

TEST(RouterTest, LiteralSegmentsArePreferredFromTheLeft) {
  Router router;
  router.add("GET", "/a/{x}/{y}", nothing());
  router.add("GET", "/a/{x}/list", nothing());
  router.add("GET", "/a/b/{z}", nothing());
  router.add("DELETE", "/a/b/list", nothing());
  const auto match = [&](std::vector<std::string> path) { return router.match("GET", path); };
  EXPECT_THAT(match({"a", "1", "2"}).params, ElementsAre(Pair("x", "1"), Pair("y", "2")));
  EXPECT_THAT(match({"a", "1", "list"}).params, ElementsAre(Pair("x", "1")));
  EXPECT_THAT(match({"a", "b", "list"}).params, ElementsAre(Pair("z", "list")));
  EXPECT_THAT(match({"a", "b", "list"}).methods, ElementsAre("DELETE", "GET", "HEAD", "OPTIONS"));
  EXPECT_TRUE(match({"a", "1"}).methods.empty());
  EXPECT_TRUE(match({"a", "1", "2", "3"}).methods.empty());
  EXPECT_TRUE(match({}).methods.empty());
}

TEST(RouterTest, MethodsDecide) {
  Router router;
  router.add("GET", "/", nothing());
  router.add("POST", "/x", nothing());
  const std::vector<std::string> root;
  const std::vector<std::string> x = {"x"};
  EXPECT_NE(router.match("HEAD", root).route, nullptr);
  EXPECT_EQ(router.match("POST", root).route, nullptr);
  EXPECT_EQ(router.match("get", root).route, nullptr);
  EXPECT_EQ(router.match("HEAD", x).route, nullptr);
  EXPECT_THAT(router.match("GET", x).methods, ElementsAre("OPTIONS", "POST"));
  EXPECT_THAT(router.methods(), ElementsAre("GET", "HEAD", "OPTIONS", "POST"));
}

TEST(RouterDeathTest, BadRoutesAreBugs) {
  Router router;
  router.add("GET", "/a/{b}", nothing());
  EXPECT_DEATH(router.add("GET", "/a/{c}", nothing()), "there twice");
  EXPECT_DEATH(router.add("GET", "a", nothing()), "does not begin");
  EXPECT_DEATH(router.add("GET", "/a//b", nothing()), "malformed");
  EXPECT_DEATH(router.add("GET", "/a{b}", nothing()), "malformed");
}

// ---- Keys

TEST(KeyTest, EitherHeaderNamesTheKey) {
  Options options;
  for (const char* name : {"one", "two", "three"}) {
    options.api_keys.push_back({name, hash_api_key(std::string("secret-") + name)});
  }
  const auto find = [&](Headers headers) {
    Request request;
    request.headers = std::move(headers);
    return find_key(options, request);
  };
  EXPECT_EQ(find({{"authorization", "Bearer secret-one"}}), 0);
  EXPECT_EQ(find({{"authorization", "bearer  secret-two"}}), 1);
  EXPECT_EQ(find({{"x-api-key", "secret-three"}}), 2);
  EXPECT_EQ(find({{"authorization", "Basic abc"}, {"x-api-key", "secret-three"}}), 2);
  // The better known header wins, right or wrong.
  EXPECT_EQ(find({{"authorization", "Bearer no"}, {"x-api-key", "secret-three"}}), -1);
  EXPECT_EQ(find({}), -1);
  EXPECT_EQ(find({{"authorization", "Bearer "}}), -1);
  EXPECT_EQ(find({{"authorization", "secret-one"}}), -1);
  EXPECT_EQ(find({{"x-api-key", "secret-on"}}), -1);
  EXPECT_EQ(find({{"x-api-key", ""}}), -1);
}

// ---- Browsers

TEST(LoopbackTest, NamesOfThisMachineAlone) {
  for (const char* host :
       {"localhost", "LocalHost", "app.localhost", "127.0.0.1", "127.9.9.9", "::1"}) {
    EXPECT_TRUE(is_loopback_host(host)) << host;
  }
  for (const char* host : {"", ".localhost", "localhost.example", "notlocalhost", "127.example.org",
                           "128.0.0.1", "0.0.0.0", "::", "::2", "192.168.1.2"}) {
    EXPECT_FALSE(is_loopback_host(host)) << host;
  }
}

TEST(LoopbackTest, ListsOfHosts) {
  EXPECT_EQ(split_hosts("a, b,::1"), (std::vector<std::string>{"a", "b", "::1"}));
  EXPECT_EQ(split_hosts("a"), (std::vector<std::string>{"a"}));
  EXPECT_TRUE(are_loopback_hosts("127.0.0.1,[::1], localhost"));
  EXPECT_FALSE(are_loopback_hosts("127.0.0.1,0.0.0.0"));
  EXPECT_FALSE(are_loopback_hosts("127.0.0.1,"));
}

class AdmissionTest : public ::testing::Test {
 protected:
  AdmissionTest() {
    router_.add("GET", "/", nothing(), {.is_public = true});
    router_.add("POST", "/x", nothing());
  }
  // 200: it would be handled; 204: it is answered at once.
  int ask(const std::string& method, const std::string& target, Headers headers) {
    Request request;
    request.method = method;
    request.target = target;
    request.headers = std::move(headers);
    admission_ = admit(options_, router_, 0, &request);
    if (admission_.refusal) return admission_.refusal->status;
    return admission_.route == nullptr ? 204 : 200;
  }
  int post(Headers headers) { return ask("POST", "/x", std::move(headers)); }

  Options options_;
  Router router_;
  Admission admission_;
};

TEST_F(AdmissionTest, PagesOfOtherOriginsAreRefused) {
  EXPECT_EQ(post({{"host", "localhost:80"}}), 200);
  EXPECT_EQ(post({{"host", "localhost:80"}, {"origin", "http://localhost:80"}}), 200);
  EXPECT_EQ(post({{"host", "Chat.Example"}, {"origin", "https://chat.example"}}), 200);
  EXPECT_EQ(post({{"host", "[::1]:80"}, {"origin", "http://[::1]:80"}}), 200);
  for (const char* origin : {"http://localhost:81", "http://localhost", "https://evil.example",
                             "http://localhost:80.evil.example", "null", "", "://"}) {
    EXPECT_EQ(post({{"host", "localhost:80"}, {"origin", origin}}), 403) << origin;
    EXPECT_EQ(ask("GET", "/", {{"host", "localhost:80"}, {"origin", origin}}), 403) << origin;
    // Told which methods there are, and nothing that lets its page call them.
    EXPECT_EQ(ask("OPTIONS", "/x", {{"host", "localhost:80"}, {"origin", origin}}), 204) << origin;
    EXPECT_EQ(admission_.headers, (Headers{{"Allow", "OPTIONS, POST"}})) << origin;
  }
  EXPECT_EQ(post({{"origin", "http://localhost:80"}}), 403);
  EXPECT_EQ(post({{"host", ""}, {"origin", "null"}}), 403);
}

TEST_F(AdmissionTest, AllowedOriginsMayCall) {
  options_.cors_origins = {"https://app.example"};
  EXPECT_EQ(post({{"host", "localhost"}, {"origin", "https://app.example"}}), 200);
  EXPECT_EQ(post({{"host", "localhost"}, {"origin", "http://app.example"}}), 403);
  EXPECT_EQ(ask("OPTIONS", "/x", {{"origin", "https://app.example"}}), 204);
  options_.cors_origins = {"*"};
  EXPECT_EQ(post({{"host", "localhost"}, {"origin", "https://evil.example"}}), 200);
  options_.cors_origins = {"localhost"};
  for (const char* origin : {"http://localhost:81", "https://127.0.0.1", "http://[::1]:3000"}) {
    EXPECT_EQ(post({{"host", "chat.example"}, {"origin", origin}}), 200) << origin;
  }
  options_.loopback_hosts_only = true;
  EXPECT_EQ(post({{"host", ""}}), 403) << "the word names no host";
  options_.loopback_hosts_only = false;
  for (const char* origin : {"http://notlocalhost", "http://localhost.evil.example"}) {
    EXPECT_EQ(post({{"host", "chat.example"}, {"origin", origin}}), 403) << origin;
  }
}

TEST_F(AdmissionTest, OtherNamesOfALoopbackServerAreRefused) {
  const Headers rebound = {{"host", "evil.example:80"}, {"origin", "http://evil.example:80"}};
  EXPECT_EQ(post(rebound), 200) << "without the option any name will do";
  options_.loopback_hosts_only = true;
  EXPECT_EQ(post(rebound), 403);
  EXPECT_EQ(ask("GET", "/", {{"host", "evil.example"}}), 403);
  EXPECT_EQ(ask("GET", "/nothing", {{"host", "127.evil.example"}}), 403);
  EXPECT_EQ(post({{"host", "localhost:9000"}}), 200);
  EXPECT_EQ(post({{"host", "127.0.0.1"}}), 200);
  EXPECT_EQ(post({{"host", "[::1]:9000"}}), 200);
  EXPECT_EQ(post({}), 200) << "no browser leaves it out";
  options_.cors_origins = {"https://chat.example"};
  EXPECT_EQ(post({{"host", "chat.example"}}), 200) << "a proxy that passes the name on";
  EXPECT_EQ(post({{"host", "[::2"}}), 403);
  EXPECT_EQ(post({{"host", ""}}), 403);
  options_.cors_origins = {"*"};
  EXPECT_EQ(post({{"host", "evil.example"}}), 200);
}

// ---- Answers' bytes

TEST(ResponseTest, HeadersAreAddedReplacedAndCleaned) {
  Head head;
  head.status = 404;
  head.content_length = 12;
  head.keep_alive = true;
  head.wall_ns = 784111777LL * 1'000'000'000;
  const std::string plain = head_text(head, {{"X-A", "b\r\nX-Evil: 1"}});
  EXPECT_TRUE(plain.starts_with("HTTP/1.1 404 Not Found\r\n"));
  EXPECT_TRUE(plain.ends_with("\r\n\r\n"));
  EXPECT_THAT(plain, HasSubstr("Date: Sun, 06 Nov 1994 08:49:37 GMT\r\n"));
  EXPECT_THAT(plain, HasSubstr("X-A: b  X-Evil: 1\r\n"));
  EXPECT_THAT(plain, HasSubstr("Content-Length: 12\r\n"));
  EXPECT_THAT(plain, HasSubstr("X-Content-Type-Options: nosniff\r\n"));
  EXPECT_THAT(plain, HasSubstr("Content-Security-Policy: default-src 'none'; "));
  EXPECT_THAT(plain, Not(HasSubstr("Connection:")));
  EXPECT_THAT(plain, Not(HasSubstr("Access-Control")));

  head.keep_alive = false;
  head.framing = Framing::kChunked;
  head.allowed_origin = "https://a.example";
  const std::string page = head_text(head, {{"content-security-policy", "default-src 'self'"}});
  EXPECT_THAT(page, HasSubstr("content-security-policy: default-src 'self'\r\n"));
  EXPECT_THAT(page, Not(HasSubstr("'none'")));
  EXPECT_THAT(page, HasSubstr("Transfer-Encoding: chunked\r\n"));
  EXPECT_THAT(page, HasSubstr("Connection: close\r\n"));
  EXPECT_THAT(page, HasSubstr("Access-Control-Allow-Origin: https://a.example\r\n"));
  EXPECT_THAT(page, Not(HasSubstr("Content-Length")));
}

TEST(ResponseTest, EventsKeepTheirLines) {
  EXPECT_EQ(event_text("[DONE]"), "data: [DONE]\n\n");
  EXPECT_EQ(event_text("a\nb\n", "delta"), "event: delta\ndata: a\ndata: b\ndata: \n\n");
}

}  // namespace
}  // namespace hcache::http
