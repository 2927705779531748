// Programs that this process starts and that end with it.
//
// Threading: an object belongs to one thread at a time. That which calls start() must live as long
// as the program is wanted: the program is told to end (SIGTERM) when that thread does.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace hcache {

struct SubprocessOptions {
  std::string program;                   // a path; $PATH is not searched
  std::vector<std::string> args;         // without the program's name
  std::vector<std::string> environment;  // NAME=VALUE, all of it
};

// How a program ended.
struct ExitStatus {
  int code = 0;    // its exit code, where it ended by itself
  int signal = 0;  // what ended it otherwise; 0: nothing
  bool operator==(const ExitStatus&) const = default;
};
// "exit code 3", "signal 9 (Killed)".
[[nodiscard]] std::string to_text(const ExitStatus& status);

// A running program in a process group of its own, so that a terminal's Ctrl-C does not reach it.
// Of this process's open files it gets none: it reads nothing, and what it writes comes through two
// pipes.
class Subprocess {
 public:
  // not_found, permission_denied: the program can't be run. unavailable: no process or pipe is to
  // be had.
  [[nodiscard]] static Result<std::unique_ptr<Subprocess>> start(const SubprocessOptions& options);
  // Kills it if it still runs, and waits for its end.
  ~Subprocess();
  Subprocess(const Subprocess&) = delete;
  Subprocess& operator=(const Subprocess&) = delete;

  [[nodiscard]] pid_t pid() const { return pid_; }
  // The reading ends of what it writes to stdout and stderr, for the caller to close. Once each.
  [[nodiscard]] int take_output();
  [[nodiscard]] int take_errors();
  // How it ended, from then on; nothing while it runs. Never blocks.
  [[nodiscard]] std::optional<ExitStatus> poll();
  // Sends a signal, if it still runs.
  void send_signal(int signal);

 private:
  Subprocess(pid_t pid, int output, int errors) : pid_(pid), output_(output), errors_(errors) {}

  const pid_t pid_;
  int output_;
  int errors_;
  std::optional<ExitStatus> ended_;
};

}  // namespace hcache
