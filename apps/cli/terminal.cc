#include "terminal.h"

#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <thread>

#include "base/env.h"

namespace hcache::cli {
namespace {

constexpr int64_t kNsPerSecond = 1000000000;

std::atomic<bool> stop_requested{false};

void on_signal(int signal_number) {
  if (stop_requested.exchange(true)) _exit(128 + signal_number);
}

bool is_number(const std::string& cell) {
  return !cell.empty() && (std::isdigit(static_cast<unsigned char>(cell[0])) != 0 ||
                           (cell[0] == '-' && cell.size() > 1));
}

}  // namespace

void catch_interrupts() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  // No SA_RESTART: a read of the keyboard must return.
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  struct sigaction ignore {};
  ignore.sa_handler = SIG_IGN;
  sigaction(SIGPIPE, &ignore, nullptr);
}

void release_interrupts() {
  signal(SIGINT, SIG_DFL);
  signal(SIGTERM, SIG_DFL);
}

bool interrupted() { return stop_requested.load(); }
void clear_interrupt() { stop_requested.store(false); }

ProgressLine::ProgressLine()
    : terminal_(isatty(STDERR_FILENO) == 1), started_ns_(Env::real().monotonic_ns()) {}

ProgressLine::~ProgressLine() { finish(); }

bool ProgressLine::update(const std::string& what, double fraction) {
  const int64_t now = Env::real().monotonic_ns();
  if (what != what_) {
    finish();
    what_ = what;
    started_ns_ = now;
    printed_ns_ = 0;
  }
  const int64_t pause = terminal_ ? kNsPerSecond / 10 : 5 * kNsPerSecond;
  if (now - started_ns_ > kNsPerSecond && now - printed_ns_ > pause) {
    printed_ns_ = now;
    const std::string line =
        fmt::format("{}: {:.0f} % ({:.0f} s)", what, 100 * std::clamp(fraction, 0.0, 1.0),
                    static_cast<double>(now - started_ns_) / kNsPerSecond);
    std::fputs((terminal_ ? "\r" + line + "\033[K" : line + "\n").c_str(), stderr);
    std::fflush(stderr);
    shown_ = true;
  }
  return !interrupted();
}

void ProgressLine::finish() {
  if (shown_ && terminal_) {
    fmt::print(stderr, "\r\033[K");
    std::fflush(stderr);
  }
  shown_ = false;
}

void print_stats(const std::string& line) {
  if (isatty(STDERR_FILENO) == 1) fmt::print(stderr, "[{}]\n", line);
}

std::string format_columns(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); i++) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string out;
  for (size_t r = 0; r < rows.size(); r++) {
    std::string line;
    for (size_t i = 0; i < rows[r].size(); i++) {
      // A header stands over its column the way the first value does.
      const std::string& sample =
          r == 0 && rows.size() > 1 && i < rows[1].size() ? rows[1][i] : rows[r][i];
      if (i > 0) line += "  ";
      line += is_number(sample) ? fmt::format("{:>{}}", rows[r][i], widths[i])
                                : fmt::format("{:<{}}", rows[r][i], widths[i]);
    }
    while (!line.empty() && line.back() == ' ') line.pop_back();
    out += line + "\n";
  }
  return out;
}

Status write_json(const Json& json, const std::string& file) {
  // A reply may hold bytes that are no UTF-8 when it was cut inside a character.
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  if (file.empty() || file == "-") {
    fmt::print("{}", text);
    std::fflush(stdout);
    return {};
  }
  return write_whole_file(Env::real(), file, text);
}

Json host_json() {
  std::string cpu = "unknown";
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (line.rfind("model name", 0) == 0) {
      cpu = line.substr(line.find(':') + 2);
      break;
    }
  }
  const auto memory = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                      static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
  return {{"cpu", cpu}, {"cores", std::thread::hardware_concurrency()}, {"memory_bytes", memory}};
}

void wait_for_line() {
  fmt::print("ready\n");
  std::fflush(stdout);
  std::string line;
  std::getline(std::cin, line);
}

}  // namespace hcache::cli
