// A cache of prefix blocks under a trace: how much of what comes again is still there.
//
// Blocks of equal size; a request's block is hit when it and all before it are in the cache, since
// a prefix can be restored only without gaps. What was not there is computed and put in, block by
// block; for each one that the cache can't hold another is evicted, or the new one itself if it is
// the least worth keeping. Blocks with children in the cache stay: chains shrink from their ends.
// The policies are production's (policy/eviction.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "policy/eviction.h"
#include "sim/trace.h"

namespace hcache::sim {

struct PrefixCacheOptions {
  uint64_t capacity_blocks = 0;  // > 0
  policy::EvictPolicy policy = policy::EvictPolicy::kLru;
  // Requests are taken in order of arrival, one every 1 / service_rate seconds at most; those that
  // have arrived and wait are the queue that policies see. 0: no request ever waits.
  double service_rate = 0;  // requests per second
  // Seconds of prefill that a hit saves, by the block's place in its chain from 0 on; the last one
  // also of those behind it. Empty: blocks cost all the same, and nothing is said of seconds.
  std::vector<double> block_s = {};
  // Whether the policy knows block_s; otherwise it takes all blocks to cost the same.
  bool costs_known = true;
  // Belady's (1966): the policy sees the whole trace. Takes the place of `policy`.
  bool optimal = false;
};

struct PrefixCacheReport {
  uint64_t accesses = 0;
  uint64_t hits = 0;
  uint64_t max_queue = 0;  // most requests that waited
  double prefill_s = 0;    // of all blocks that were asked for, by block_s
  double saved_s = 0;      // of those that were hit
  [[nodiscard]] double hit_rate() const {
    return accesses > 0 ? static_cast<double>(hits) / static_cast<double>(accesses) : 0;
  }
};

// Unique blocks of a trace: a capacity is told as a share of them.
[[nodiscard]] uint64_t unique_blocks(std::span<const TraceRequest> trace);

// Deterministic. kInvalidArgument: no capacity, a rate below zero.
[[nodiscard]] Result<PrefixCacheReport> simulate_prefix_cache(std::span<const TraceRequest> trace,
                                                              const PrefixCacheOptions& options);

}  // namespace hcache::sim
