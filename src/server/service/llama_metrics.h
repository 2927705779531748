// llama-server's metrics, under its names, beside our own: for dashboards and autoscalers that know
// those.
//
// Threading: any thread.
#pragma once

#include <prometheus/registry.h>

#include <memory>

#include "scheduler/request.h"
#include "scheduler/scheduler.h"

namespace hcache::server {

class LlamaMetrics {
 public:
  // The registry must outlive it.
  explicit LlamaMetrics(prometheus::Registry& registry);
  ~LlamaMetrics();

  // A request has ended.
  void observe(const scheduler::Outcome& outcome);
  // Before the registry is read.
  void set(const scheduler::Snapshot& snapshot);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace hcache::server
