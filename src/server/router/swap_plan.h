// Which models are loaded and which are unloaded: a value function of how things stand.
//
// Threading: pure functions of plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

namespace hcache::router {

enum class ModelState : std::uint8_t { kUnloaded, kLoading, kLoaded, kUnloading };

// One model as the plan sees it. Times are nanoseconds of one clock.
struct ModelView {
  ModelState state = ModelState::kUnloaded;
  std::int64_t running = 0;         // requests that it is answering
  std::int64_t waiting = 0;         // requests that wait for it
  std::int64_t waits_since_ns = 0;  // when the first of those came
  std::int64_t loaded_ns = 0;       // when it was loaded
  std::int64_t used_ns = 0;         // when it was last loaded, asked or ready with an answer
  std::uint64_t bytes = 0;          // of memory that it takes when it is loaded
  // It did not fit beside one model more than these.
  std::int64_t most_beside = std::numeric_limits<std::int64_t>::max();
  bool unload_asked = false;  // it leaves as soon as it answers nothing
};

struct SwapLimits {
  std::int64_t max_loaded = 4;     // models in memory at a time; 0: no limit
  std::int64_t idle_ns = 0;        // a model that nobody asked for so long leaves; 0: never
  std::uint64_t memory_bytes = 0;  // of all models in memory together; 0: no limit
  // Beside what is free, see SwapSnapshot.
  std::uint64_t reserve_bytes = 256ULL << 20;
  // See ModelRouterOptions.
  std::int64_t patience_ns = 10'000'000'000;
};

struct SwapSnapshot {
  std::vector<ModelView> models;
  std::int64_t now_ns = 0;
  std::optional<std::uint64_t> free_bytes;  // memory that can be had; absent: not to be looked at
};

// Indices of SwapSnapshot::models.
struct SwapPlan {
  std::vector<std::size_t> load;
  std::vector<std::size_t> unload;
  std::optional<std::size_t> hold;  // a loaded model that takes no further requests for now
};

// Models are loaded in the order in which their first requests came. One that answers is never
// unloaded; where room is wanted, the idle one that was used least recently goes, one at a time.
[[nodiscard]] SwapPlan plan_swap(const SwapSnapshot& snapshot, const SwapLimits& limits);

}  // namespace hcache::router
