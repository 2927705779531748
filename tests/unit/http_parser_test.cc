// RequestParser: what is accepted, what is refused and why, and that pieces don't matter.
#include <gtest/gtest.h>

#include <algorithm>

#include "request_parser.h"

namespace hcache::http {
namespace {

using Event = RequestParser::Event;

struct Outcome {
  Event event = Event::kNeedMore;
  int status = 0;
  std::string message;
  Request request;
  std::string rest;
  bool keep_alive = false;
};

// Feeds `bytes` in pieces of `step`.
Outcome parse(std::string_view bytes, std::size_t step, std::uint64_t body_limit = 100) {
  RequestParser parser({.header_bytes = 400, .headers = 8});
  Outcome out;
  std::string input;
  while (!bytes.empty() && (out.event == Event::kNeedMore || out.event == Event::kHead)) {
    input.append(bytes.substr(0, step));
    bytes.remove_prefix(std::min(step, bytes.size()));
    out.event = parser.feed(&input);
    if (out.event == Event::kHead) {
      parser.set_body_limit(body_limit);
      out.keep_alive = parser.keep_alive();
      out.event = parser.feed(&input);
    }
  }
  out.status = parser.error().status;
  out.message = parser.error().message;
  out.request = std::move(parser.request());
  out.rest = input + std::string(bytes);
  return out;
}

constexpr std::size_t kSteps[] = {1, 2, 3, 7, 10000};

TEST(RequestParserTest, RequestsComeInAnyPieces) {
  const std::string chunked =
      "POST /a?b=c HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked\r\nX-A:  b c \r\n\r\n"
      "5\r\nhello\r\n6;ext=\"1\"\r\n world\r\n0\r\nTrailer: t\r\n\r\nGET /next";
  const std::string plain =
      "POST /a?b=c HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\nX-A: b c\r\n\r\nhello worldGET "
      "/next";
  for (const std::string& text : {chunked, plain}) {
    for (const std::size_t step : kSteps) {
      const Outcome out = parse(text, step);
      ASSERT_EQ(out.event, Event::kDone) << "pieces of " << step << ": " << out.message;
      EXPECT_EQ(out.request.method, "POST");
      EXPECT_EQ(out.request.target, "/a?b=c");
      EXPECT_EQ(out.request.body, "hello world");
      ASSERT_NE(out.request.header("x-a"), nullptr);
      EXPECT_EQ(*out.request.header("x-a"), "b c");
      EXPECT_EQ(out.request.header("trailer"), nullptr);
      EXPECT_EQ(out.rest, "GET /next");
      EXPECT_TRUE(out.keep_alive);
    }
  }
}

TEST(RequestParserTest, KeepAliveFollowsTheVersion) {
  const auto keeps = [](const char* head) { return parse(head, 10000).keep_alive; };
  EXPECT_TRUE(keeps("GET / HTTP/1.1\r\n\r\n"));
  EXPECT_FALSE(keeps("GET / HTTP/1.1\r\nConnection: Close\r\n\r\n"));
  EXPECT_FALSE(keeps("GET / HTTP/1.0\r\n\r\n"));
  EXPECT_TRUE(keeps("GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"));
}

TEST(RequestParserTest, WhatIsWrongIsRefused) {
  std::string headers;
  for (int i = 0; i < 9; ++i) headers += "H" + std::to_string(i) + ": v\r\n";
  const struct {
    const char* what;
    std::string bytes;
    int status;
  } cases[] = {
      {"TLS", "\x16\x03\x01\x02", 400},
      {"white space first", " GET / HTTP/1.1\r\n\r\n", 400},
      {"no target", "GET HTTP/1.1\r\n\r\n", 400},
      {"no version", "GET /\r\n\r\n", 400},
      {"a space in the target", "GET /a b HTTP/1.1\r\n\r\n", 400},
      {"lower-case protocol", "GET / http/1.1\r\n\r\n", 400},
      {"HTTP/2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505},
      {"HTTP/0.9", "GET / HTTP/0.9\r\n\r\n", 505},
      {"HTTP/1.2", "GET / HTTP/1.2\r\n\r\n", 505},
      {"bare line feeds", "GET / HTTP/1.1\nHost: x\n\r\n\r\n", 400},
      {"no colon", "GET / HTTP/1.1\r\nHost\r\n\r\n", 400},
      {"space before the colon", "GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400},
      {"no name", "GET / HTTP/1.1\r\n: x\r\n\r\n", 400},
      {"a NUL", std::string("GET / HTTP/1.1\r\nA: b\0c\r\n\r\n", 26), 400},
      {"a folded header", "GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", 400},
      {"a folded header, tab", "GET / HTTP/1.1\r\nA: b\r\n\tc\r\n\r\n", 400},
      {"folded from the start", "GET / HTTP/1.1\r\n A: b\r\n\r\n", 400},
      {"both lengths",
       "POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400},
      {"both lengths, other order",
       "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400},
      {"two lengths", "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400},
      {"the same twice", "POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\na", 400},
      {"a list of lengths", "POST / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\na", 400},
      {"a signed length", "POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\na", 400},
      {"a hexadecimal length", "POST / HTTP/1.1\r\nContent-Length: 0x1\r\n\r\na", 400},
      {"no length", "POST / HTTP/1.1\r\nContent-Length: \r\n\r\na", 400},
      {"a huge length", "POST / HTTP/1.1\r\nContent-Length: 99999999999999999999\r\n\r\na", 400},
      {"two codings",
       "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
      {"another coding", "POST / HTTP/1.1\r\nTransfer-Encoding: gzip\r\n\r\n", 501},
      {"a list of codings", "POST / HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", 501},
      {"chunked, chunked", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 501},
      {"a vertical tab in the coding",
       "POST / HTTP/1.1\r\nTransfer-Encoding:\x0b"
       "chunked\r\n\r\n",
       400},
      {"chunks in HTTP/1.0", "POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400},
      {"another expectation", "POST / HTTP/1.1\r\nExpect: miracles\r\n\r\n", 417},
      {"too many headers", "GET / HTTP/1.1\r\n" + headers + "\r\n", 431},
      {"a large header", "GET / HTTP/1.1\r\nA: " + std::string(400, 'a') + "\r\n\r\n", 431},
      {"a line without end", "GET /" + std::string(1000, 'a'), 431},
      {"no chunk size", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", 400},
      {"a negative chunk size", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n-10\r\n",
       400},
      {"a huge chunk size",
       "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400},
      {"a large chunk", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n", 413},
      {"too much in chunks",
       "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3c\r\n" + std::string(60, 'a') +
           "\r\n3c\r\n",
       413},
      {"a chunk longer than its size",
       "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n", 400},
      {"an endless chunk extension",
       "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + std::string(1000, 'a'), 400},
      {"endless trailers",
       "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nA: " + std::string(1000, 'a'),
       400},
  };
  for (const auto& c : cases) {
    for (const std::size_t step : kSteps) {
      const Outcome out = parse(c.bytes, step);
      EXPECT_EQ(out.event, Event::kFailed) << c.what << ", pieces of " << step;
      EXPECT_EQ(out.status, c.status) << c.what << ", pieces of " << step;
    }
  }
}

TEST(RequestParserTest, AnEmptyChunkedBodyComesInAnyPieces) {
  for (const std::size_t step : kSteps) {
    const Outcome out =
        parse("POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET", step);
    EXPECT_EQ(out.event, Event::kDone) << step;
    EXPECT_EQ(out.request.body, "");
    EXPECT_EQ(out.rest, "GET");
  }
}

TEST(RequestParserTest, AHeaderAtTheLimitPasses) {
  const std::string start = "GET / HTTP/1.1\r\nA: ";
  const std::string end = "\r\n\r\n";
  const auto of_size = [&](std::size_t size) {
    return start + std::string(size - start.size() - end.size(), 'a') + end;
  };
  EXPECT_EQ(parse(of_size(400), 7).event, Event::kDone);
  EXPECT_EQ(parse(of_size(401), 7).status, 431);
}

}  // namespace
}  // namespace hcache::http
