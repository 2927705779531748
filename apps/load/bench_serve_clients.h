// The clients of `hcache bench serve`: they hold the conversations of a schedule with a server.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/status.h"
#include "bench_serve_http.h"
#include "bench_serve_report.h"
#include "bench_serve_text.h"
#include "sim/workload.h"

namespace hcache::load {

struct ClientOptions {
  std::string model;  // as the server calls it
  double temperature = 0;
  bool exact_length = false;    // ask the server to go on past the end of an answer
  Json extra = Json::object();  // more members of every request
  // 0: sessions start when the schedule says. Otherwise so many clients take one session after the
  // other and wait neither for arrivals nor between rounds.
  int64_t concurrency = 0;
  int64_t retries = 0;  // of one request, after a 429, as late as its Retry-After says
  // Conversations rest after so many rounds until all that go on have come so far; then `pause` is
  // called, once. When it returns they come back at the intervals at which they came first. Its
  // time does not count. 0: no rest.
  int64_t pause_after = 0;
  std::function<void()> pause;
};

// Called a few times per second with the share of the work that is done; false ends it.
using Proceed = std::function<bool(double fraction)>;

// The first model that /v1/models names. kUnavailable, kNotFound, kCancelled.
[[nodiscard]] Result<std::string> first_model(HttpLoop& loop, const Proceed& proceed);

// Holds the conversations; a round that fails ends its conversation. Where `proceed` ends the load,
// requests under way are recorded as kInterrupted. Records are in the order of their end.
// Threading: the caller's thread does all of it.
[[nodiscard]] Outcome run_clients(HttpLoop& loop, const sim::Schedule& schedule,
                                  const TextSource& text, const ClientOptions& options,
                                  const Proceed& proceed);

// The text of a message, as it is sent.
[[nodiscard]] std::string message_text(const TextSource& text, const sim::Round& round);

}  // namespace hcache::load
