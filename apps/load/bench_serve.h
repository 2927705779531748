// hcache bench serve: a load for any server that speaks OpenAI's chat API.
#pragma once

#include <cstdint>
#include <string>

#include "base/status.h"
#include "bench_serve_clients.h"
#include "options.h"
#include "sim/workload.h"

namespace hcache::cli {

struct ServeArgs : Options {
  ServeArgs();

  std::string url = text(&url, "--url", "URL", "",
                         "server to load, http://HOST:PORT; it speaks OpenAI's chat API");
  std::string api_key = text(&api_key, "--api-key", "KEY", "", "sent as a bearer token");
  std::string trace =
      text(&trace, "--trace", "sharegpt|FILE", "sharegpt",
           "conversations like ShareGPT4's, or a trace: Mooncake's JSON lines or Azure's CSV");
  std::string text_file = text(&text_file, "--text", "FILE", "",
                               "text to take messages from; default: an essay that is built in");
  double bytes_per_token = number(&bytes_per_token, "--token-bytes", "X", 4.5, {0.1, 1000},
                                  "bytes of that text per token");
  int64_t think_ns = duration(&think_ns, "--think", 30 * kSecond,
                              "mean pause between an answer and the next message");
  std::string think_spread = choice(&think_spread, "--think-spread", "fixed", "fixed|exponential",
                                    "whether pauses are all alike or random");
  int64_t timeout_ns =
      duration(&timeout_ns, "--timeout", 0, "give a request up after this long; 0: never");
  std::string extra =
      text(&extra, "--extra", "JSON", "", "object whose members are added to every request");
  std::string answers_file = text(&answers_file, "--answers", "FILE", "",
                                  "write every answer's text, so that two runs can be compared");
  bool dry_run = flag(&dry_run, "--dry-run", "send nothing; print the load as JSON");
  std::string json_file =
      text(&json_file, "--json", "FILE", "",
           "also write the figures as JSON; - prints them instead of the table");
  sim::LoadOptions load;
  load::ClientOptions client;  // extra is filled in from the text above
};

// Holds the conversations, reports, and writes the files asked for; also after an interrupt, which
// is then the status. kUnavailable when all requests failed.
[[nodiscard]] Status bench_serve(const ServeArgs& asked);

}  // namespace hcache::cli
