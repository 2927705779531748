#include "base/status.h"

#include <cstdio>
#include <cstdlib>

namespace hcache {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kCancelled: return "cancelled";
    case Code::kInvalidArgument: return "invalid-argument";
    case Code::kNotFound: return "not-found";
    case Code::kAlreadyExists: return "already-exists";
    case Code::kPermissionDenied: return "permission-denied";
    case Code::kResourceExhausted: return "resource-exhausted";
    case Code::kFailedPrecondition: return "failed-precondition";
    case Code::kOutOfRange: return "out-of-range";
    case Code::kUnimplemented: return "unimplemented";
    case Code::kUnavailable: return "unavailable";
    case Code::kDataLoss: return "data-loss";
    case Code::kInternal: return "internal";
  }
  return "unknown";
}

int exit_code(Code code) {
  switch (code) {
    case Code::kOk: return 0;
    case Code::kInvalidArgument:
    case Code::kOutOfRange: return 2;
    case Code::kNotFound: return 3;
    case Code::kAlreadyExists:
    case Code::kPermissionDenied:
    case Code::kFailedPrecondition: return 4;
    case Code::kResourceExhausted: return 5;
    case Code::kDataLoss: return 6;
    case Code::kUnavailable: return 7;
    case Code::kUnimplemented: return 8;
    case Code::kCancelled: return 130;
    case Code::kInternal: return 1;
  }
  return 1;
}

std::string Status::to_string() const {
  if (ok()) return "ok";
  return std::string(code_name(code_)) + ": " + message_;
}

Status Status::with_context(std::string_view context) const {
  if (ok()) return *this;
  return {code_, std::string(context) + ": " + message_};
}

void die(std::string_view message) {
  std::fprintf(stderr, "hcache: internal error: %.*s\n", static_cast<int>(message.size()),
               message.data());
  std::abort();
}

}  // namespace hcache
