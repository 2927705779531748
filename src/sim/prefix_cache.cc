#include "sim/prefix_cache.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

#include "policy/chain_order.h"

namespace hcache::sim {
namespace {

class PrefixCache {
 public:
  PrefixCache(std::span<const TraceRequest> trace, const PrefixCacheOptions& options)
      : trace_(trace),
        options_(options),
        order_({.evict = options.optimal ? policy::EvictPolicy::kSchedulerAware : options.policy}) {
  }

  PrefixCacheReport run() {
    double free_s = 0;  // when the server takes the next request
    for (size_t i = 0; i < trace_.size(); ++i) {
      const double now_s = std::max(trace_[i].arrival_s, free_s);
      if (options_.service_rate > 0) free_s = now_s + 1 / options_.service_rate;
      see_arrivals(i, now_s);
      report_.max_queue = std::max<uint64_t>(report_.max_queue, seen_ - i - 1);
      serve(i, now_s);
    }
    return report_;
  }

 private:
  void see_arrivals(size_t current, double now_s) {
    while (seen_ < trace_.size() &&
           (options_.optimal || seen_ <= current || trace_[seen_].arrival_s <= now_s)) {
      order_.set_demands(wanted_.add(seen_, trace_[seen_].blocks), wanted_);
      ++seen_;
    }
  }

  void serve(size_t i, double now_s) {
    const std::vector<uint64_t>& chain = trace_[i].blocks;
    report_.accesses += chain.size();
    size_t resident = 0;
    while (resident < chain.size() && order_.contains(chain[resident])) ++resident;
    report_.hits += resident;
    for (size_t b = 0; b < chain.size(); ++b) {
      report_.prefill_s += block_s(b);
      if (b < resident) report_.saved_s += block_s(b);
    }
    order_.set_demands(wanted_.remove(i), wanted_);
    for (size_t b = 0; b < resident; ++b) order_.use(chain[b], now_s);
    for (size_t b = resident; b < chain.size(); ++b) {
      if (put(chain, b, now_s)) continue;
      for (size_t rest = b + 1; rest < chain.size(); ++rest) order_.miss(chain[rest], now_s);
      break;
    }
  }

  [[nodiscard]] double block_s(size_t b) const {
    const std::vector<double>& known = options_.block_s;
    return known.empty() ? 0 : known[std::min(b, known.size() - 1)];
  }

  // False when the block did not stay.
  bool put(const std::vector<uint64_t>& chain, size_t b, double now_s) {
    const uint64_t id = chain[b];
    const auto parent = b > 0 ? std::optional<uint64_t>(chain[b - 1]) : std::nullopt;
    order_.insert(id, parent, now_s, {.miss_s = weighs_ ? block_s(b) : 1});
    const uint64_t entered[] = {id};
    order_.set_demands(entered, wanted_);
    while (order_.size() > options_.capacity_blocks) {
      const std::vector<uint64_t> victims = order_.victims(now_s);
      if (victims.empty()) return true;  // all of it is one chain; its end goes with the next
      order_.erase(victims[0], now_s);
      if (victims[0] == id) return false;
    }
    return true;
  }

  const std::span<const TraceRequest> trace_;
  const PrefixCacheOptions& options_;
  const bool weighs_ = options_.costs_known && !options_.block_s.empty();
  policy::ChainOrder order_;
  policy::Wanted wanted_;
  size_t seen_ = 0;  // requests in sight so far
  PrefixCacheReport report_;
};

}  // namespace

uint64_t unique_blocks(std::span<const TraceRequest> trace) {
  std::unordered_set<uint64_t> blocks;
  for (const TraceRequest& request : trace) {
    blocks.insert(request.blocks.begin(), request.blocks.end());
  }
  return blocks.size();
}

Result<PrefixCacheReport> simulate_prefix_cache(std::span<const TraceRequest> trace,
                                                const PrefixCacheOptions& options) {
  if (options.capacity_blocks == 0) return invalid_argument("a cache needs room for one block");
  if (!(options.service_rate >= 0)) return invalid_argument("a service rate can't be negative");
  return PrefixCache(trace, options).run();
}

}  // namespace hcache::sim
