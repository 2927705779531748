// Private to what uses the operating system itself: the real Env, its queues, mapped memory.
#pragma once

#include <unistd.h>

#include <memory>
#include <string>
#include <utility>

#include "base/env.h"

namespace hcache {

// Closes its descriptor; below 0: there is none.
class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  UniqueFd& operator=(UniqueFd&&) = delete;
  ~UniqueFd() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool ok() const { return fd_ >= 0; }

 private:
  int fd_;
};

// A File with a descriptor. Threading: as File.
class PosixFile : public File {
 public:
  [[nodiscard]] virtual int fd() const = 0;
};

// "cannot <action> <path>: <reason>" with the code that env.h promises for this errno.
[[nodiscard]] Status errno_status(const char* action, const std::string& path, int error);

// Null where the kernel has no io_uring or forbids it.
[[nodiscard]] std::unique_ptr<IoQueue> new_uring_queue(std::size_t depth);

}  // namespace hcache
