// Requests and answers as handlers see them. Nothing of sockets, nothing of models.
//
// Threading: Request is a plain value; Responder may be used from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hcache::http {

// Names and values in the order received or to be sent. Of what is sent, control characters become
// spaces, so that no value can add a header.
using Headers = std::vector<std::pair<std::string, std::string>>;
using Pairs = std::vector<std::pair<std::string, std::string>>;

struct Request {
  std::string method;  // as sent; methods are case-sensitive
  std::string target;  // as sent: visible ASCII, query included
  // Percent-decoded and normalised: begins with '/', no empty, "." or ".." segment. Control
  // characters are refused; otherwise any bytes, not necessarily UTF-8.
  std::string path;
  std::vector<std::string> segments;  // of the path; may contain '/' that was sent as %2F
  Pairs query;                        // decoded, '+' is a space
  Pairs params;                       // the route's {name} segments
  Headers headers;                    // names in lower case
  std::string body;                   // chunked or not, decoded
  std::string peer;                   // the client's address, without the port
  // Of the API key that was presented: its index in Options::api_keys and its name. A public route
  // gets them too when a valid key comes along. -1 and empty: none.
  int key_index = -1;
  std::string key_name;

  // The first value of that name (headers: in lower case); null where there is none.
  [[nodiscard]] const std::string* header(std::string_view name) const;
  [[nodiscard]] const std::string* query_value(std::string_view name) const;
  [[nodiscard]] const std::string* param(std::string_view name) const;
};

// Answers one request: either one send(), or start_stream(), write()s and finish(). Calls never
// block; those that come too late (the answer is given, the client gone) do nothing and return
// false. A handler that drops its last reference without an answer has the client told 500,
// or, in the middle of a stream, cut off, so that it can't take a torn answer for a whole one.
class Responder {
 public:
  Responder() = default;
  Responder(const Responder&) = delete;
  Responder& operator=(const Responder&) = delete;
  virtual ~Responder() = default;

  // A whole answer; the status is 200 to 599. Content-Length, Date, Connection and the security
  // headers (response.h) are added; a header of the same name in `headers` replaces a security
  // header.
  virtual bool send(int status, const Headers& headers, std::string body) = 0;
  // As send(), with the body that Options::error_body gives for this status and message.
  virtual bool send_error(int status, std::string_view message, const Headers& headers) = 0;

  // An answer of unknown length: chunked for HTTP/1.1, until the end of the connection
  // for HTTP/1.0.
  virtual bool start_stream(int status, const Headers& headers) = 0;
  // Queues bytes. A client that does not read is cut off when a write finds more than
  // Options::max_unsent_bytes queued, so memory stays below that and one piece.
  virtual bool write(std::string_view bytes) = 0;
  virtual bool finish() = 0;

  // Whether a write() now would be queued: the stream is open and not too much of it is unsent.
  [[nodiscard]] virtual bool writable() const = 0;
  // Bytes queued and not yet taken by the operating system.
  [[nodiscard]] virtual std::size_t unsent_bytes() const = 0;
  // Called at most once, when the client goes away (or is cut off, or the server stops) before the
  // answer is given in full: on an I/O thread, or at once if it has happened. Must not block.
  // Setting one replaces the one before. A client that only closed its sending side counts as gone,
  // though a send() still reaches it.
  virtual void on_disconnect(std::function<void()> callback) = 0;
};

// Headers of a stream whose pieces count when they come; proxies are asked not to buffer it.
[[nodiscard]] Headers stream_headers(std::string_view content_type = "text/event-stream");
// One server-sent event: "event: NAME\n" where a name is given, a "data: " line for every line of
// `data`, and the empty line that ends it.
[[nodiscard]] std::string event_text(std::string_view data, std::string_view name = {});

// "Not Found"; "Unknown" for a number without a name here.
[[nodiscard]] std::string_view reason_phrase(int status);

}  // namespace hcache::http
