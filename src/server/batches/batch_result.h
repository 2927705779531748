// What a request of a batch was answered, and the line that says so.
//
// A line has the form of OpenAI's batch output: id, custom_id, response {status_code, request_id,
// body}, error. Exactly one of response and error is not null. Its id follows from the input and
// the line, so that a line can be found again, whatever its custom_id.
//
// Threading: pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "api/json.h"
#include "base/status.h"

namespace hcache::server {

struct BatchAnswer {
  enum class Kind : uint8_t {
    kAnswered,   // with status and body, be it an error
    kRefused,    // there was no room for it; ask again later
    kCancelled,  // it was ended early, and has no answer
  };
  Kind kind = Kind::kCancelled;
  int http_status = 0;
  std::string request_id;  // of the answer
  api::Json body;
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;  // of those: neither computed nor recomputed
  int64_t reply_tokens = 0;

  [[nodiscard]] bool ok() const { return http_status >= 200 && http_status < 300; }
};

// Why a request has no answer.
struct BatchError {
  std::string code;  // "invalid_line", "batch_expired", "batch_cancelled"
  std::string message;
};

// "batch_req_" and 32 hex digits.
[[nodiscard]] std::string result_id(std::string_view input_hash, int64_t line);
// Each with its newline. An empty custom_id, of a line that has none, becomes null.
[[nodiscard]] std::string answer_line(std::string_view id, std::string_view custom_id,
                                      const BatchAnswer& answer);
[[nodiscard]] std::string error_line(std::string_view id, std::string_view custom_id,
                                     const BatchError& error);

// A line as it is found again.
struct BatchResult {
  std::string id;
  std::string custom_id;  // empty: null
  int http_status = 0;    // 0: no answer, see error_code
  std::string error_code;

  [[nodiscard]] bool ok() const { return http_status >= 200 && http_status < 300; }
};
// kDataLoss: it is none of the above.
[[nodiscard]] Result<BatchResult> parse_result_line(std::string_view line);

// The same line as Anthropic's results have it: {"custom_id", "result": {"type": "succeeded",
// "message"}}, or "errored" with an error, "canceled", "expired". With its newline. kDataLoss.
[[nodiscard]] Result<std::string> anthropic_result_line(std::string_view line);

inline constexpr std::string_view kInvalidLineCode = "invalid_line";
inline constexpr std::string_view kExpiredCode = "batch_expired";
inline constexpr std::string_view kCancelledCode = "batch_cancelled";

}  // namespace hcache::server
