// By how much each of the model's adapters counts for requests: what POST /lora-adapters has set,
// unless a request says otherwise.
//
// Threading: any thread.
#pragma once

#include <span>
#include <vector>

#include "api/json.h"
#include "api/request.h"
#include "base/status.h"
#include "base/sync.h"
#include "state/adapters.h"

namespace hcache::server {

class AdapterScales {
 public:
  // `adapters` must outlive it.
  explicit AdapterScales(std::span<const state::Adapter> adapters)
      : adapters_(adapters), scales_(state::default_scales(adapters)) {}

  [[nodiscard]] std::span<const state::Adapter> adapters() const { return adapters_; }
  [[nodiscard]] std::vector<float> current() const HCACHE_EXCLUDES(mutex_);
  // As the list says, 0 for those that it leaves out. kInvalidArgument: there is no such adapter.
  [[nodiscard]] Result<std::vector<float>> of(std::span<const api::AdapterScale> list) const;
  Status set(std::span<const api::AdapterScale> list) HCACHE_EXCLUDES(mutex_);
  // As GET /lora-adapters answers.
  [[nodiscard]] api::Json answer() const;

 private:
  const std::span<const state::Adapter> adapters_;
  mutable Mutex mutex_;
  std::vector<float> scales_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::server
