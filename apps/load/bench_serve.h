// hcache bench serve: a load for any server that speaks OpenAI's chat API.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "bench_serve_clients.h"
#include "sim/workload.h"

namespace hcache::cli {

struct ServeArgs {
  std::string url;
  std::string api_key;
  std::string trace;  // "sharegpt" or a file
  std::string text;   // file; empty: the built-in essay
  double bytes_per_token = 0;
  int64_t think_ns = 0;
  std::string think_spread;
  int64_t timeout_ns = 0;
  std::string extra;  // JSON object; empty: none
  std::string answers_file;
  std::string json_file;
  bool dry_run = false;
  sim::LoadOptions load;
  load::ClientOptions client;  // extra is filled in from the text above
};

// Holds the conversations, reports, and writes the files asked for; also after an interrupt, which
// is then the status. kUnavailable when all requests failed.
[[nodiscard]] Status bench_serve(ServeArgs args);

}  // namespace hcache::cli
