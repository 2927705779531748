// Fuzz target for what a client may send. The first byte chooses: mostly the parser, which must
// come to the same result however its input is cut; sometimes a whole server over loopback, which
// must answer or close. The second byte seeds how the bytes are cut.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <string_view>

#include "admission.h"
#include "fuzz.h"
#include "http/server.h"
#include "request_parser.h"
#include "target.h"

namespace hcache::http {
namespace {

using Event = RequestParser::Event;

constexpr std::uint32_t kHeaderBytes = 300;
constexpr std::uint32_t kHeaders = 6;
constexpr std::uint64_t kBodyBytes = 200;

void require(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "violated: %s\n", what);
  std::abort();
}

struct Outcome {
  Event event = Event::kNeedMore;
  int status = 0;
  Request request;
  std::string rest;
};

bool operator==(const Outcome& a, const Outcome& b) {
  if (a.event != b.event || a.status != b.status) return false;
  if (a.event != Event::kDone) return true;
  return a.request.method == b.request.method && a.request.target == b.request.target &&
         a.request.headers == b.request.headers && a.request.body == b.request.body &&
         a.rest == b.rest;
}

// Parses one request out of pieces of 1 to `largest` bytes.
Outcome parse(std::string_view bytes, std::size_t largest, std::mt19937& random) {
  RequestParser parser({.header_bytes = kHeaderBytes, .headers = kHeaders});
  Outcome out;
  std::string input;
  while (out.event == Event::kNeedMore && !bytes.empty()) {
    const std::size_t n = std::min<std::size_t>(1 + random() % largest, bytes.size());
    input.append(bytes.substr(0, n));
    bytes.remove_prefix(n);
    out.event = parser.feed(&input);
    if (out.event == Event::kHead) {
      require(parser.request().headers.size() <= kHeaders, "no more headers than allowed");
      parser.set_body_limit(kBodyBytes);
      if (parser.content_length() > kBodyBytes) break;  // the server refuses it here
      out.event = parser.feed(&input);
    }
    require(out.event != Event::kNeedMore || input.size() <= kHeaderBytes,
            "what waits to be parsed is bounded");
  }
  require(parser.request().body.size() <= kBodyBytes, "no more of a body than allowed");
  require((out.event == Event::kFailed) == (parser.error().status != 0), "failures have a status");
  out.status = parser.error().status;
  out.request = parser.request();
  out.rest = input + std::string(bytes);
  return out;
}

void check_target(const std::string& text) {
  const auto target = parse_target(text);
  if (!target.ok()) return;
  require(target->path == "*" || target->path.starts_with('/'), "paths begin with a slash");
  for (const std::string& segment : target->segments) {
    require(!segment.empty() && segment != "." && segment != "..", "paths are normalised");
    require(std::all_of(segment.begin(), segment.end(),
                        [](char c) { return static_cast<unsigned char>(c) >= 0x20 && c != 0x7f; }),
            "paths have no control characters");
  }
}

void fuzz_parser(std::string_view bytes, std::mt19937& random) {
  const Outcome whole = parse(bytes, std::max<std::size_t>(bytes.size(), 1), random);
  const Outcome pieces = parse(bytes, 1 + random() % 40, random);
  require(whole == pieces, "how the bytes are cut does not matter");
  check_target(whole.request.target);
}

std::uint16_t server_port() {
  static const std::unique_ptr<Server> server = [] {
    Options options;
    options.max_header_bytes = kHeaderBytes;
    options.max_body_bytes = kBodyBytes;
    options.max_connections = 100;
    options.api_keys = {{"key", hash_api_key("k")}};
    Router router;
    router.add("POST", "/echo", [](const Request& request, const std::shared_ptr<Responder>& to) {
      to->send(200, {}, request.body);
    });
    router.add("GET", "/items/{id}",
               [](const Request&, const std::shared_ptr<Responder>& to) {
                 if (to->start_stream(200, {}) && to->write("abc")) to->finish();
               },
               {.is_public = true});
    auto started = Server::start(Env::real(), options, std::move(router));
    require(started.ok(), "the server starts");
    return std::move(*started);
  }();
  return server->port();
}

void fuzz_server(std::string_view bytes, std::mt19937& random) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(server_port());
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  require(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0,
          "the server accepts connections");
  const timeval patience = {.tv_sec = 120, .tv_usec = 0};
  setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  while (!bytes.empty()) {
    const std::size_t n = std::min<std::size_t>(1 + random() % 200, bytes.size());
    if (send(fd, bytes.data(), n, MSG_NOSIGNAL) <= 0) break;
    bytes.remove_prefix(n);
  }
  shutdown(fd, SHUT_WR);
  std::string answer;
  char buffer[4096];
  ssize_t n = 0;
  while ((n = recv(fd, buffer, sizeof(buffer), 0)) > 0) {
    answer.append(buffer, static_cast<std::size_t>(n));
  }
  require(n == 0 || (errno != EAGAIN && errno != EWOULDBLOCK), "the server answers or closes");
  require(answer.empty() || answer.starts_with("HTTP/1.1 "), "answers are HTTP");
  close(fd);
}

}  // namespace
}  // namespace hcache::http

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 2) return 0;
  std::mt19937 random(data[1]);
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 2, size - 2);
  if (data[0] == 0xff) {
    hcache::http::fuzz_server(bytes, random);
  } else {
    hcache::http::fuzz_parser(bytes, random);
  }
  return 0;
}

std::vector<std::string> hcache::fuzz::seeds() {
  const std::string post = "POST /echo HTTP/1.1\r\nx-api-key: k\r\n";
  const std::string chunked = "Transfer-Encoding: chunked\r\n\r\n";
  const std::string requests[] = {
      "GET /items/1?a=%20b&c HTTP/1.1\r\nHost: x\r\n\r\n",
      post +
          "Content-Length: 5\r\n\r\nhelloGET /items/2 HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
      post + chunked + "5;a=\"b\"\r\nhello\r\n1\r\n!\r\n0\r\nA: b\r\n\r\n",
      post + chunked + "0\r\n\r\n",
      post + "Expect: 100-continue\r\nContent-Length: 3\r\n\r\nabc",
      "OPTIONS * HTTP/1.1\r\nOrigin: http://a\r\n\r\nHEAD //./items/%2F/../x HTTP/1.1\r\n\r\n",
      "GET /a HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
  };
  std::vector<std::string> seeds;
  for (const std::string& request : requests) {
    for (char kind = 'a'; kind < 't'; ++kind) {
      seeds.push_back(std::string(1, kind) + kind + request);
    }
    seeds.push_back(std::string("\xff") + 's' + request);
  }
  return seeds;
}
