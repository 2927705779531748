#include "sim/prefix_cache.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>

namespace hcache::sim {
namespace {

class PrefixCache {
 public:
  PrefixCache(std::span<const TraceRequest> trace, const PrefixCacheOptions& options)
      : trace_(trace),
        options_(options),
        order_(options.optimal ? policy::EvictPolicy::kSchedulerAware : options.policy) {}

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
      order_.set_wishes(wanted_.add(seen_, trace_[seen_].blocks), wanted_);
      ++seen_;
    }
  }

  void serve(size_t i, double now_s) {
    const std::vector<uint64_t>& chain = trace_[i].blocks;
    report_.accesses += chain.size();
    size_t resident = 0;
    while (resident < chain.size() && order_.contains(chain[resident])) ++resident;
    report_.hits += resident;
    order_.set_wishes(wanted_.remove(i), wanted_);
    for (size_t b = 0; b < resident; ++b) order_.use(chain[b], now_s);
    for (size_t b = resident; b < chain.size(); ++b) {
      const std::optional<uint64_t> parent =
          b > 0 ? std::optional<uint64_t>(chain[b - 1]) : std::nullopt;
      if (put(chain[b], parent, now_s)) continue;
      for (size_t rest = b + 1; rest < chain.size(); ++rest) order_.miss(chain[rest], now_s);
      break;
    }
  }

  // False when the block did not stay.
  bool put(uint64_t id, std::optional<uint64_t> parent, double now_s) {
    if (parent) order_.hold(*parent);
    parents_[id] = parent;
    order_.insert(id, now_s, 1, 1);
    order_.set_wish(id, wanted_.wish(id));
    while (order_.size() > options_.capacity_blocks) {
      const auto victim = order_.victim(now_s);
      if (!victim) return true;  // all of it is one chain; its end goes with the next request
      order_.erase(*victim, now_s);
      if (const auto above = parents_[*victim]) order_.let_go(*above);
      if (*victim == id) return false;
    }
    return true;
  }

  const std::span<const TraceRequest> trace_;
  const PrefixCacheOptions& options_;
  policy::EvictionOrder order_;
  policy::Wanted wanted_;
  std::unordered_map<uint64_t, std::optional<uint64_t>> parents_;
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
