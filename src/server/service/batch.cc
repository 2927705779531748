#include "server/batch.h"

#include <algorithm>
#include <utility>

#include "batch_answerer.h"
#include "batch_file.h"
#include "service.h"

namespace hcache::server {
namespace {

constexpr double kBytesPerToken = 4;  // of a request's line, about
constexpr int64_t kReplyTokens = 256;

// Tokens of so many requests of mean length, by the bytes of their lines.
int64_t estimate_tokens(const BatchInput& input, int64_t parallel, int64_t max_new_tokens) {
  double bytes = 0;
  for (const BatchLine& line : input.lines()) bytes += static_cast<double>(line.bytes);
  const auto n_lines = static_cast<int64_t>(input.lines().size());
  const double prompt = bytes / kBytesPerToken / static_cast<double>(std::max<int64_t>(n_lines, 1));
  const int64_t reply = max_new_tokens >= 0 ? max_new_tokens : kReplyTokens;
  return std::min(parallel, n_lines) * (static_cast<int64_t>(prompt) + reply);
}

}  // namespace

Status run_batch(Env& env, const ServerOptions& server, const BatchOptions& batch,
                 const std::function<bool(const BatchProgress&)>& progress, BatchProgress* last) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, BatchFile::open(env, {.input = batch.input,
                                                                 .output = batch.output,
                                                                 .restart = batch.restart,
                                                                 .in_flight = batch.in_flight}));
  last->total = static_cast<int64_t>(file->input().lines().size());
  last->bad_lines = file->input().bad_lines();
  ServerOptions options = server;
  options.runtime.batch.sequences =
      static_cast<int32_t>(std::clamp<int64_t>(last->total, 1, batch.parallel));
  if (options.runtime.batch.use == state::BatchEngineUse::kWhereStreamed &&
      estimate_tokens(file->input(), batch.parallel, options.max_new_tokens) >
          options.runtime.engine.arena_tokens) {
    options.runtime.batch.use = state::BatchEngineUse::kWherePossible;
  }
  HCACHE_ASSIGN_OR_RETURN(const auto service, Service::open(env, options));
  const int64_t begin_ns = env.monotonic_ns();
  const auto take = [&](const BatchFileProgress& now) {
    const scheduler::Snapshot stats = service->scheduler().stats();
    last->completed = now.counts.completed;
    last->failed = now.counts.failed;
    last->found = now.found;
    last->prompt_tokens = now.tokens.prompt;
    last->cached_tokens = now.tokens.cached;
    last->reply_tokens = now.tokens.reply;
    last->prefill_rows = static_cast<int64_t>(stats.prefill_rows);
    last->decode_rows = static_cast<int64_t>(stats.decode_rows);
    last->engine = service->batch_report();
    last->seconds = static_cast<double>(env.monotonic_ns() - begin_ns) * 1e-9;
  };
  ServiceAnswerer answerer(*service);
  BatchFileProgress ended;
  const Status ran = file->run(
      answerer, to_hex(service->runtime().fingerprint()),
      [&](const BatchFileProgress& now) {
        take(now);
        return !progress || progress(*last);
      },
      &ended);
  take(ended);
  const Status closed = service->stop(0);
  return ran.ok() ? closed : ran;
}

}  // namespace hcache::server
