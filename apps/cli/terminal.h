// What the program shows while it works, and how it is told to stop.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "base/status.h"

namespace hcache::cli {

using Json = nlohmann::ordered_json;

// From now on Ctrl-C and SIGTERM set interrupted(); a second one ends the process at once.
void catch_interrupts();
// Back to the system's way (the process ends), for a verb that has nothing to save.
void release_interrupts();
// True once the user asked to stop: finish what is in hand, save, return cancelled.
[[nodiscard]] bool interrupted();
// Forgets an interrupt that has been dealt with (a reply cut short in a chat).
void clear_interrupt();

// A line on stderr for a step that takes longer than a second: rewritten in place on a terminal,
// one line every five seconds otherwise. Threading: update() from one thread at a time.
class ProgressLine {
 public:
  ProgressLine();
  ~ProgressLine();
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;
  // fraction in [0, 1]. Returns false when the user asked to stop.
  bool update(const std::string& what, double fraction);
  // Ends the line, so that something else can be printed.
  void finish();

 private:
  bool terminal_;
  bool shown_ = false;
  int64_t started_ns_;
  int64_t printed_ns_ = 0;
  std::string what_;
};

// A line of figures on stderr, where a person is likely to see it: on a terminal only.
void print_stats(const std::string& line);

// Aligned columns for stdout; the first row is the header. Numbers align right.
[[nodiscard]] std::string format_columns(const std::vector<std::vector<std::string>>& rows);

// Writes `json` to stdout (file "-" or empty) or to a file.
[[nodiscard]] Status write_json(const Json& json, const std::string& file);

// Processor, cores and memory of the machine that this process runs on.
[[nodiscard]] Json host_json();

// Says "ready" and waits for a line on stdin, so that a script can let another program take its
// turn. At the end of the input it waits no more.
void wait_for_line();

}  // namespace hcache::cli
