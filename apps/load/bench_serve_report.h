// What became of the requests of `hcache bench serve`, and the figures drawn from it.
// Threading: plain values and pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench_serve_stream.h"

namespace hcache::load {

// One request. Times in seconds from the start of the load.
struct Record {
  int64_t session = 0;
  int64_t round = 0;
  bool warmup = false;     // not counted
  bool returning = false;  // as in sim/workload.h
  int64_t max_tokens = 0;  // what was asked for
  double start_s = 0;      // sent for the first time
  double end_s = 0;        // the answer ended, or the error came
  int64_t retries = 0;     // how often it was sent again after a 429
  std::string error;       // its kind; empty: a whole answer came. kInterrupted is no failure
  std::string message;     // of the error
  Answer answer;           // as far as it came
};
inline constexpr const char* kInterrupted = "interrupted";

struct Outcome {
  std::vector<Record> records;
  int64_t not_sent = 0;  // counted rounds that never came: their conversation failed before
};

// The p-th percentile (0 to 100) of sorted values, interpolated between neighbours; 0 of none.
[[nodiscard]] double percentile(const std::vector<double>& sorted, double p);

// {"n", "mean", "p50", "p90", "p95", "p99", "max"} in milliseconds; of none: "n" alone.
[[nodiscard]] Json distribution(std::vector<double> seconds);

// One object of the JSON's "requests".
[[nodiscard]] Json record_json(const Record& record);

// Percentiles, rates, cached shares and errors of the counted records.
[[nodiscard]] Json summarise(const Outcome& outcome);

// The summary's percentiles as rows of a table, the header first, and its counts as a few lines.
[[nodiscard]] std::vector<std::vector<std::string>> summary_table(const Json& summary);
[[nodiscard]] std::string summary_lines(const Json& summary);

}  // namespace hcache::load
