// Programs that end with us.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <string>

#include "base/process.h"
#include "patience.h"

namespace hcache {
namespace {

using ::testing::HasSubstr;

// All that comes through a pipe until the other end is closed.
std::string read_all(int fd) {
  std::string text;
  char piece[256];
  for (ssize_t n = 0; (n = read(fd, piece, sizeof(piece))) > 0;) {
    text.append(piece, static_cast<std::size_t>(n));
  }
  close(fd);
  return text;
}

std::unique_ptr<Subprocess> start_shell(const std::string& script,
                                        std::vector<std::string> environment = {}) {
  auto process = Subprocess::start(
      {.program = "/bin/sh", .args = {"-c", script}, .environment = std::move(environment)});
  EXPECT_TRUE(process.ok()) << process.status().to_string();
  return process.ok() ? std::move(*process) : nullptr;
}

ExitStatus wait_for_end(Subprocess& process) {
  EXPECT_TRUE(test::eventually([&] { return process.poll().has_value(); }));
  return process.poll().value_or(ExitStatus{});
}

TEST(Subprocess, WritesIntoTwoPipesAndEndsWithItsCode) {
  const auto process = start_shell("echo out $VALUE; echo err >&2; exit 3", {"VALUE=7"});
  ASSERT_NE(process, nullptr);
  EXPECT_EQ(read_all(process->take_output()), "out 7\n");
  EXPECT_EQ(read_all(process->take_errors()), "err\n");
  EXPECT_EQ(to_text(wait_for_end(*process)), "exit code 3");
}

TEST(Subprocess, IsToldToEnd) {
  const auto process = start_shell("trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done",
                                   {"PATH=/usr/bin:/bin"});
  ASSERT_NE(process, nullptr);
  const int output = process->take_output();
  char letter = 0;
  ASSERT_EQ(read(output, &letter, 1), 1);
  EXPECT_FALSE(process->poll().has_value());
  process->send_signal(SIGTERM);
  EXPECT_EQ(wait_for_end(*process), (ExitStatus{.code = 9, .signal = 0}));
  close(output);
  process->send_signal(SIGKILL);  // is nobody's any more
}

TEST(Subprocess, SaysWhichSignalEndedIt) {
  const auto process = start_shell("kill -9 $$");
  ASSERT_NE(process, nullptr);
  EXPECT_EQ(to_text(wait_for_end(*process)), "signal 9 (Killed)");
}

TEST(Subprocess, GetsNoOpenFiles) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);  // without FD_CLOEXEC, as libraries open them
  const auto process = start_shell("ls /proc/self/fd", {"PATH=/usr/bin:/bin"});
  ASSERT_NE(process, nullptr);
  // Its own three, and the folder that is listed.
  EXPECT_EQ(read_all(process->take_output()), "0\n1\n2\n3\n");
  close(ends[0]);
  close(ends[1]);
}

TEST(Subprocess, GoesWithItsObject) {
  auto process = start_shell("exec sleep 1000", {"PATH=/usr/bin:/bin"});
  ASSERT_NE(process, nullptr);
  const pid_t pid = process->pid();
  EXPECT_EQ(kill(pid, 0), 0);
  process.reset();
  EXPECT_NE(kill(pid, 0), 0);
}

TEST(Subprocess, ProgramsThatCantBeRun) {
  const auto missing = Subprocess::start({.program = "/no/such", .args = {}, .environment = {}});
  EXPECT_EQ(missing.code(), Code::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("/no/such"));
  const auto folder = Subprocess::start({.program = "/tmp", .args = {}, .environment = {}});
  EXPECT_EQ(folder.code(), Code::kPermissionDenied);
}

}  // namespace
}  // namespace hcache
