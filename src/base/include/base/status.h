// Status and Result<T>: how every fallible function of HCache reports.
//
// Canonical codes are mapped once to process exit codes (here) and once to HTTP (server).
// Exceptions stop at module edges; a Status may only be dropped through ignore(reason).
// Threading: plain values, no shared state.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace hcache {

enum class Code {
  kOk = 0,
  kCancelled,           // the caller asked to stop
  kInvalidArgument,     // bad input, whatever the state of the system
  kNotFound,            // the named thing does not exist
  kAlreadyExists,       // the thing to create exists
  kPermissionDenied,    // the operating system or a policy refuses
  kResourceExhausted,   // no space: disk, arena, quota, queue
  kFailedPrecondition,  // the system is in the wrong state (second writer, closed store)
  kOutOfRange,          // beyond a limit of the model or file
  kUnimplemented,       // known but not supported by this build, device or model
  kUnavailable,         // try again later (busy, gone for a while)
  kDataLoss,            // failed verification: checksum, truncation, version
  kInternal,            // a bug or an error of a library
};

// The code's name in lower case with dashes, for logs and JSON.
[[nodiscard]] std::string_view code_name(Code code);

// The process exit code: 0 ok, 2 bad input, 3 not found, 4 refused or wrong state, 5 exhausted,
// 6 data loss, 7 unavailable, 8 unsupported, 130 cancelled, 1 anything else.
[[nodiscard]] int exit_code(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status ok_status() { return {}; }

  [[nodiscard]] bool ok() const { return code_ == Code::kOk; }
  [[nodiscard]] Code code() const { return code_; }
  // Names the thing, the place and, where there is one, the remedy.
  [[nodiscard]] const std::string& message() const { return message_; }
  // "data-loss: message", or "ok".
  [[nodiscard]] std::string to_string() const;

  // The same code with `context: ` put before the message.
  [[nodiscard]] Status with_context(std::string_view context) const;

  // Drops the status on purpose; the reason is for the reader.
  void ignore(std::string_view /*reason*/) const {}

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// Shorthands; message parts are formatted by the caller (fmt::format).
inline Status invalid_argument(std::string m) { return {Code::kInvalidArgument, std::move(m)}; }
inline Status not_found(std::string m) { return {Code::kNotFound, std::move(m)}; }
inline Status already_exists(std::string m) { return {Code::kAlreadyExists, std::move(m)}; }
inline Status permission_denied(std::string m) { return {Code::kPermissionDenied, std::move(m)}; }
inline Status resource_exhausted(std::string m) { return {Code::kResourceExhausted, std::move(m)}; }
inline Status failed_precondition(std::string m) {
  return {Code::kFailedPrecondition, std::move(m)};
}
inline Status out_of_range(std::string m) { return {Code::kOutOfRange, std::move(m)}; }
inline Status unimplemented(std::string m) { return {Code::kUnimplemented, std::move(m)}; }
inline Status unavailable(std::string m) { return {Code::kUnavailable, std::move(m)}; }
inline Status data_loss(std::string m) { return {Code::kDataLoss, std::move(m)}; }
inline Status internal_error(std::string m) { return {Code::kInternal, std::move(m)}; }
inline Status cancelled(std::string m) { return {Code::kCancelled, std::move(m)}; }

// Either a value or a non-ok Status. Reading the value of a failed Result aborts with the message.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) {}  // NOLINT(google-explicit-constructor)

  [[nodiscard]] bool ok() const { return value_.has_value(); }
  [[nodiscard]] const Status& status() const { return status_; }
  [[nodiscard]] Code code() const { return status_.code(); }

  T& value() & { return check(), *value_; }
  const T& value() const& { return check(), *value_; }
  T&& value() && { return check(), std::move(*value_); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T value_or(T fallback) const& { return ok() ? *value_ : std::move(fallback); }

 private:
  void check() const;
  std::optional<T> value_;
  Status status_;
};

// Prints the message to stderr and aborts: a broken invariant, never bad input.
[[noreturn]] void die(std::string_view message);

template <typename T>
void Result<T>::check() const {
  if (!value_.has_value()) die("value() of a failed Result: " + status_.to_string());
}

}  // namespace hcache

// Returns the Status from the enclosing function when it is not ok.
#define HCACHE_RETURN_IF_ERROR(expr)                                                           \
  do {                                                                                         \
    if (::hcache::Status hcache_status_ = (expr); !hcache_status_.ok()) return hcache_status_; \
  } while (false)

#define HCACHE_CONCAT_INNER(a, b) a##b
#define HCACHE_CONCAT(a, b) HCACHE_CONCAT_INNER(a, b)

// HCACHE_ASSIGN_OR_RETURN(auto x, f()): declares x from the Result's value or returns its Status.
#define HCACHE_ASSIGN_OR_RETURN(lhs, expr)                   \
  auto HCACHE_CONCAT(hcache_result_, __LINE__) = (expr);     \
  if (!HCACHE_CONCAT(hcache_result_, __LINE__).ok())         \
    return HCACHE_CONCAT(hcache_result_, __LINE__).status(); \
  lhs = std::move(HCACHE_CONCAT(hcache_result_, __LINE__)).value()
