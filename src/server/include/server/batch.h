// `hcache batch`: a file of requests through the server's protocols, without a server
// (docs/batches.md).
//
// Threading: one thread.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "base/env.h"
#include "base/status.h"
#include "server/server.h"
#include "serving/serving.h"

namespace hcache::server {

struct BatchOptions {
  std::string input;       // OpenAI's or Anthropic's lines
  std::string output;      // OpenAI's result lines
  bool restart = false;    // give up what the output has
  int64_t in_flight = 64;  // requests that are given to the scheduler at a time
  // Where the server's options leave it open (kWhereStreamed), the batch engine also runs where the
  // state of so many requests of mean length does not fit the ordinary one's KV cache.
  int64_t parallel = 32;
};

struct BatchProgress {
  int64_t total = 0;      // requests, lines that are none included
  int64_t completed = 0;  // answered well
  int64_t failed = 0;     // answered with an error
  int64_t bad_lines = 0;  // of those: no requests
  int64_t found = 0;      // of both: were there when it began
  // Of the requests answered since it began.
  int64_t prompt_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t reply_tokens = 0;
  // Computed since it began.
  int64_t prefill_rows = 0;
  int64_t decode_rows = 0;
  double seconds = 0;  // since the model was there
  // What the batch engine does; nullopt: the ordinary engine runs.
  std::optional<serving::BatchReport> engine;

  [[nodiscard]] int64_t done() const { return completed + failed; }
};

// Answers the input's requests with the options' model, each line written durably as it comes, and
// goes on where an earlier run was interrupted. The HTTP part of `server` is not used. `progress`
// is told several times a second; after false it stops, and kCancelled comes back; what was
// answered until then is kept. `*last` is set also after an error. Errors of the files (nothing is
// loaded then), the model, the store.
Status run_batch(Env& env, const ServerOptions& server, const BatchOptions& batch,
                 const std::function<bool(const BatchProgress&)>& progress, BatchProgress* last);

}  // namespace hcache::server
