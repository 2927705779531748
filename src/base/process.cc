#include "base/process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

namespace hcache {
namespace {

constexpr int kCannotRun = 127;  // the exit code of a child that could not start the program

// Closes both ends when it goes, unless they were taken.
class Pipe {
 public:
  Pipe() = default;
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    for (const int end : ends_) {
      if (end >= 0) close(end);
    }
  }
  [[nodiscard]] Status open() {
    if (pipe2(ends_.data(), O_CLOEXEC) == 0) return {};
    return unavailable(fmt::format("no pipe is to be had: {}", std::strerror(errno)));
  }
  [[nodiscard]] int reading() const { return ends_[0]; }
  [[nodiscard]] int writing() const { return ends_[1]; }
  int take_reading() { return std::exchange(ends_[0], -1); }
  void close_writing() { close(std::exchange(ends_[1], -1)); }

 private:
  std::array<int, 2> ends_ = {-1, -1};
};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  out.reserve(texts.size() + 1);
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

// What the child does between fork and exec, prepared before: nothing here may take a lock, since
// other threads of the parent may have held some.
struct Launch {
  const char* program;
  char* const* argv;
  char* const* envp;
  pid_t parent;
  int output;
  int errors;
  int failure;  // where the error number of a failed start goes
};

void close_from(int first, int kept) {
#ifdef SYS_close_range
  const auto close_range = [](int from, int to) {
    return from > to || syscall(SYS_close_range, static_cast<unsigned>(from),
                                static_cast<unsigned>(to), 0U) == 0;
  };
  if (close_range(first, kept - 1) &&
      syscall(SYS_close_range, static_cast<unsigned>(kept) + 1, ~0U, 0U) == 0) {
    return;
  }
#endif
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  for (int fd = first; fd < static_cast<int>(limit.rlim_cur); ++fd) {
    if (fd != kept) close(fd);
  }
}

[[noreturn]] void run_child(const Launch& launch) {
  setpgid(0, 0);
  // The parent may have ended before this was asked for.
  if (prctl(PR_SET_PDEATHSIG, SIGTERM) != 0 || getppid() != launch.parent) _exit(kCannotRun);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  const int null = open("/dev/null", O_RDWR);
  dup2(null, STDIN_FILENO);
  dup2(launch.output, STDOUT_FILENO);
  dup2(launch.errors, STDERR_FILENO);
  close_from(STDERR_FILENO + 1, launch.failure);  // that one closes itself when exec succeeds
  execve(launch.program, launch.argv, launch.envp);
  const int error = errno;
  const ssize_t written = write(launch.failure, &error, sizeof(error));
  _exit(written == sizeof(error) ? kCannotRun : 1);
}

Status start_error(const std::string& program, int error) {
  const std::string message = fmt::format("{} can't be run: {}", program, std::strerror(error));
  if (error == ENOENT) return not_found(message);
  if (error == EACCES || error == EPERM) return permission_denied(message);
  return unavailable(message);
}

}  // namespace

std::string to_text(const ExitStatus& status) {
  if (status.signal == 0) return fmt::format("exit code {}", status.code);
  return fmt::format("signal {} ({})", status.signal, strsignal(status.signal));
}

Result<std::unique_ptr<Subprocess>> Subprocess::start(const SubprocessOptions& options) {
  Pipe output;
  Pipe errors;
  Pipe failure;
  for (Pipe* pipe : {&output, &errors, &failure}) HCACHE_RETURN_IF_ERROR(pipe->open());
  std::vector<std::string> args = {options.program};
  args.insert(args.end(), options.args.begin(), options.args.end());
  const std::vector<char*> argv = pointers(args);
  const std::vector<char*> envp = pointers(options.environment);
  const Launch launch = {.program = options.program.c_str(),
                         .argv = argv.data(),
                         .envp = envp.data(),
                         .parent = getpid(),
                         .output = output.writing(),
                         .errors = errors.writing(),
                         .failure = failure.writing()};
  const pid_t pid = fork();
  if (pid < 0) return unavailable(fmt::format("no process is to be had: {}", std::strerror(errno)));
  if (pid == 0) run_child(launch);
  failure.close_writing();
  int error = 0;
  ssize_t got = 0;
  do {
    got = read(failure.reading(), &error, sizeof(error));
  } while (got < 0 && errno == EINTR);
  if (got == sizeof(error)) {
    waitpid(pid, nullptr, 0);
    return start_error(options.program, error);
  }
  return std::unique_ptr<Subprocess>(
      new Subprocess(pid, output.take_reading(), errors.take_reading()));
}

Subprocess::~Subprocess() {
  if (!ended_) {
    kill(pid_, SIGKILL);
    while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
  }
  for (const int end : {output_, errors_}) {
    if (end >= 0) close(end);
  }
}

int Subprocess::take_output() { return std::exchange(output_, -1); }
int Subprocess::take_errors() { return std::exchange(errors_, -1); }

std::optional<ExitStatus> Subprocess::poll() {
  if (ended_) return ended_;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  ExitStatus ended;
  if (WIFSIGNALED(status)) {
    ended.signal = WTERMSIG(status);
  } else {
    ended.code = WEXITSTATUS(status);
  }
  ended_ = ended;
  return ended_;
}

void Subprocess::send_signal(int signal) {
  if (!ended_) kill(pid_, signal);
}

}  // namespace hcache
