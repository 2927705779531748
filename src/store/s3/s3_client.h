// Requests to an S3-compatible object store, several at a time, over one background thread.
//
// libcurl signs them (SigV4) and keeps the connections. What fails for a reason that may pass (no
// connection, 5xx, 429) is tried again with growing pauses up to its deadline. Circuit breaker
// (net/breaker.h): after three requests in a row without an answer, everything fails at once,
// and the store is probed in growing intervals (0.2 to 30 s) until it answers.
//
// Threading: any thread. `done` is called exactly once, on the client's thread (at destruction, on
// the destroying one); it must not wait.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "base/env.h"
#include "base/status.h"

namespace hcache::store {

struct S3Url {
  std::string bucket;
  std::string prefix;    // empty, or ends with '/'
  std::string endpoint;  // scheme://host[:port]; empty: Amazon's of the region
  std::string region = "us-east-1";
  [[nodiscard]] std::string display() const;
};

// s3://bucket[/prefix][?endpoint=http[s]://host[:port]&region=NAME]. invalid_argument says what is
// wrong.
[[nodiscard]] Result<S3Url> parse_s3_url(std::string_view url);

struct S3Credentials {
  std::string access_key;  // empty: requests are not signed
  std::string secret_key;
  std::string session_token;
};

struct S3Call {
  // The body. not_found (404), permission_denied (401, 403), unavailable, cancelled.
  using Done = std::function<void(Result<std::string>)>;

  std::string method = "GET";               // GET, PUT, DELETE
  std::string key;                          // below the prefix; letters, digits, '/', '-', '.'
  std::uint64_t offset = 0;                 // of a range
  std::uint64_t bytes = 0;                  // 0: the whole object
  bool at_most = false;                     // of a range: the object may end within it
  std::shared_ptr<const std::string> body;  // of PUT
  std::int64_t deadline_ns = 0;             // monotonic
  bool bulk = false;                        // waits behind what is not
  Done done;
};

class S3Client {
 public:
  [[nodiscard]] static Result<std::unique_ptr<S3Client>> open(Env& env, S3Url url,
                                                              S3Credentials credentials);
  S3Client() = default;
  S3Client(const S3Client&) = delete;
  S3Client& operator=(const S3Client&) = delete;
  virtual ~S3Client() = default;

  virtual void call(S3Call call) = 0;
  [[nodiscard]] virtual bool available() const = 0;
};

}  // namespace hcache::store
