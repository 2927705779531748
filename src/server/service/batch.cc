#include "server/batch.h"

#include <utility>

#include "batch_answerer.h"
#include "batch_file.h"
#include "service.h"

namespace hcache::server {

Status run_batch(Env& env, const ServerOptions& server, const BatchOptions& batch,
                 const std::function<bool(const BatchProgress&)>& progress, BatchProgress* last) {
  HCACHE_ASSIGN_OR_RETURN(const auto file, BatchFile::open(env, {.input = batch.input,
                                                                 .output = batch.output,
                                                                 .restart = batch.restart,
                                                                 .in_flight = batch.in_flight}));
  last->total = static_cast<int64_t>(file->input().lines().size());
  last->bad_lines = file->input().bad_lines();
  HCACHE_ASSIGN_OR_RETURN(const auto service, Service::open(env, server));
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
