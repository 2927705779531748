// What operators watch, in Prometheus's text format (docs/operations.md lists every metric).
//
// Threading: any thread.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "batches.h"
#include "engine/weight_stream.h"
#include "http/server.h"
#include "scheduler/request.h"
#include "scheduler/scheduler.h"
#include "state/saver.h"
#include "store/store.h"

namespace hcache::server {

// Values that are read when metrics are scraped.
struct MetricsSnapshot {
  scheduler::Snapshot scheduler;
  store::StoreStat store;   // zeros without a store
  state::SaverStats saver;  // zeros without a saver
  http::Counters http;
  uint64_t bytes_read_ahead = 0;
  int64_t media_encoded = 0;
  engine::WeightStats weights;
  std::optional<BatchesStat> batches;  // absent where the server takes none
};

class Metrics {
 public:
  Metrics();
  ~Metrics();
  Metrics(const Metrics&) = delete;
  Metrics& operator=(const Metrics&) = delete;

  // A request has ended.
  void observe(const scheduler::Outcome& outcome);
  // The time between two tokens of a reply.
  void observe_gap(double seconds);
  [[nodiscard]] std::string text(const MetricsSnapshot& snapshot);

 private:
  void observe_restore(const policy::RestoreRecord& restore);
  void observe_bytes(const char* method, const policy::TierBytes& bytes);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::server
