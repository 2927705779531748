// llama.cpp's log kept quiet: what it logs as an error is there for our own messages.
#pragma once

#include <string>

namespace hcache::model {

// While one lives, what llama.cpp logs as an error on this thread is collected here instead of
// being printed. Everything else it logs is dropped, always: a library's chatter is not ours.
// Threading: one thread.
class ErrorLog {
 public:
  ErrorLog();
  ~ErrorLog();
  ErrorLog(const ErrorLog&) = delete;
  ErrorLog& operator=(const ErrorLog&) = delete;
  // The collected lines in one, or `fallback` when there are none.
  [[nodiscard]] std::string text(const std::string& fallback) const;

 private:
  std::string lines_;
  std::string* outer_;
};

}  // namespace hcache::model
