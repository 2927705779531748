// Private to the real Env: what its files and queues know of each other.
#pragma once

#include <memory>
#include <string>

#include "base/env.h"

namespace hcache {

// A File with a descriptor. Threading: as File.
class PosixFile : public File {
 public:
  [[nodiscard]] virtual int fd() const = 0;
};

// "cannot <action> <path>: <reason>" with the code that env.h promises for this errno.
[[nodiscard]] Status errno_status(const char* action, const std::string& path, int error);

// Null where the kernel has no io_uring or forbids it.
[[nodiscard]] std::unique_ptr<IoQueue> new_uring_queue(std::size_t depth);
[[nodiscard]] std::unique_ptr<IoQueue> new_thread_queue(std::size_t depth);

}  // namespace hcache
