#include <gtest/gtest.h>

#include <map>
#include <random>

#include "sim/prefix_cache.h"

namespace hcache::sim {
namespace {

using policy::EvictPolicy;

// Conversations that grow by a block or two a turn and share a first block.
std::vector<TraceRequest> conversations(int n_requests, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<uint64_t>> chains(40, {0});
  uint64_t next = 1;
  std::vector<TraceRequest> trace;
  for (int i = 0; i < n_requests; ++i) {
    auto& chain = chains[random() % chains.size()];
    if (random() % 10 == 0) chain = {0};
    for (size_t n = 1 + random() % 2; n > 0; --n) chain.push_back(next++);
    trace.push_back({.arrival_s = static_cast<double>(i), .blocks = chain});
  }
  return trace;
}

double hit_rate(std::span<const TraceRequest> trace, PrefixCacheOptions options) {
  const auto report = simulate_prefix_cache(trace, options);
  EXPECT_TRUE(report.ok()) << report.status().to_string();
  return report.ok() ? report->hit_rate() : -1;
}

// LRU with leaves first, written down once more without any index.
double plain_lru(std::span<const TraceRequest> trace, size_t capacity) {
  struct Entry {
    double last_use_s;
    int64_t parent;
    int children;
  };
  std::map<uint64_t, Entry> cache;
  double hits = 0;
  double accesses = 0;
  for (const TraceRequest& request : trace) {
    accesses += static_cast<double>(request.blocks.size());
    bool unbroken = true;
    int64_t parent = -1;
    for (const uint64_t id : request.blocks) {
      unbroken = unbroken && cache.contains(id);
      if (unbroken) {
        ++hits;
        cache[id].last_use_s = request.arrival_s;
        parent = static_cast<int64_t>(id);
        continue;
      }
      cache[id] = {request.arrival_s, parent, 0};
      if (parent >= 0) ++cache[static_cast<uint64_t>(parent)].children;
      if (cache.size() > capacity) {
        auto victim = cache.end();
        for (auto it = cache.begin(); it != cache.end(); ++it) {
          if (it->second.children > 0) continue;
          if (victim == cache.end() || it->second.last_use_s < victim->second.last_use_s) {
            victim = it;
          }
        }
        const bool own = victim->first == id;
        if (victim->second.parent >= 0) {
          --cache[static_cast<uint64_t>(victim->second.parent)].children;
        }
        cache.erase(victim);
        if (own) break;
      }
      parent = static_cast<int64_t>(id);
    }
  }
  return hits / accesses;
}

TEST(PrefixCache, AgreesWithAPlainOne) {
  const auto trace = conversations(3000, 1);
  for (const uint64_t capacity : {20U, 200U, 1000U}) {
    EXPECT_DOUBLE_EQ(hit_rate(trace, {.capacity_blocks = capacity}), plain_lru(trace, capacity))
        << capacity;
  }
}

TEST(PrefixCache, EverythingHitsWhereEverythingFits) {
  const auto trace = conversations(2000, 2);
  uint64_t accesses = 0;
  for (const TraceRequest& request : trace) accesses += request.blocks.size();
  const uint64_t unique = unique_blocks(trace);
  const double best = 1 - static_cast<double>(unique) / static_cast<double>(accesses);
  for (const EvictPolicy policy :
       {EvictPolicy::kLru, EvictPolicy::kFifo, EvictPolicy::kLfu, EvictPolicy::kSchedulerAware,
        EvictPolicy::kCarScore, EvictPolicy::kCostAware}) {
    EXPECT_DOUBLE_EQ(hit_rate(trace, {.capacity_blocks = unique, .policy = policy}), best)
        << policy::evict_policy_name(policy);
  }
}

TEST(PrefixCache, NothingBeatsTheOptimum) {
  const auto trace = conversations(3000, 3);
  for (const uint64_t capacity : {30U, 100U, 300U}) {
    const double optimum = hit_rate(trace, {.capacity_blocks = capacity, .optimal = true});
    for (const EvictPolicy policy :
         {EvictPolicy::kLru, EvictPolicy::kFifo, EvictPolicy::kLfu, EvictPolicy::kSchedulerAware,
          EvictPolicy::kCarScore, EvictPolicy::kCostAware}) {
      for (const double rate : {0.0, 0.98}) {
        EXPECT_LE(
            hit_rate(trace, {.capacity_blocks = capacity, .policy = policy, .service_rate = rate}),
            optimum + 1e-9)
            << policy::evict_policy_name(policy);
      }
    }
  }
}

TEST(PrefixCache, AQueueHelpsThoseThatLookAtIt) {
  auto trace = conversations(3000, 4);
  const PrefixCacheOptions options = {.capacity_blocks = 100, .service_rate = 0.98};
  const auto report = simulate_prefix_cache(trace, options);
  ASSERT_TRUE(report.ok());
  EXPECT_GT(report->max_queue, 20);
  PrefixCacheOptions aware = options;
  aware.policy = EvictPolicy::kSchedulerAware;
  EXPECT_GT(hit_rate(trace, aware), report->hit_rate());
  EXPECT_DOUBLE_EQ(report->hit_rate(), hit_rate(trace, {.capacity_blocks = 100}));
}

TEST(PrefixCache, BadOptionsAreRefused) {
  EXPECT_EQ(simulate_prefix_cache({}, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(simulate_prefix_cache({}, {.capacity_blocks = 1, .service_rate = -1}).code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace hcache::sim
