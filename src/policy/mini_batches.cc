// Eq. 12 and 13: requests packed into mini-batches of even balance.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>

#include "policy/hybrid_cache.h"

namespace hcache::policy {

namespace {

// Below this a difference of imbalance is rounding.
constexpr double kSlack = 1e-9;
// Rounds of exchanges between even mini-batches: mostly the second finds nothing any more.
constexpr int kMostRounds = 8;

int64_t loaded_act(const MiniBatch& b) { return b.act_tokens - b.act_device_tokens; }

bool fits(const MiniBatch& b, const MiniBatchLimits& limits) {
  return b.kv_tokens <= limits.kv_tokens && loaded_act(b) <= limits.act_tokens &&
         b.tokens() <= limits.tokens;
}

void add(MiniBatch& batch, const RequestContext& r, int32_t index) {
  batch.members.push_back(index);
  batch.rows += r.rows;
  batch.kv_tokens += r.kv_tokens;
  batch.act_tokens += r.act_tokens;
  batch.act_device_tokens += r.act_device_tokens;
  (r.new_rows == BlockKind::kAct ? batch.act_rows : batch.kv_rows) += r.rows;
  batch.squared_tokens += static_cast<double>(r.tokens()) * static_cast<double>(r.tokens());
}

// The sums with one more request; the members stay empty, which spares a copy.
MiniBatch with(const MiniBatch& batch, const RequestContext& r) {
  MiniBatch sums{.rows = batch.rows,
                 .kv_tokens = batch.kv_tokens,
                 .act_tokens = batch.act_tokens,
                 .act_device_tokens = batch.act_device_tokens};
  add(sums, r, 0);
  return sums;
}

// Their indices; of equals in their order.
std::vector<int32_t> longest_first(const std::vector<RequestContext>& requests) {
  std::vector<int32_t> order(requests.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return requests[a].tokens() > requests[b].tokens();
  });
  return order;
}

// What a request or a mini-batch takes of the whole batch's loading and of its generating.
struct Load {
  double link = 0;
  double compute = 0;
};
Load operator+(Load a, Load b) { return {a.link + b.link, a.compute + b.compute}; }
Load operator-(Load a, Load b) { return {a.link - b.link, a.compute - b.compute}; }
double squared(Load a) { return a.link * a.link + a.compute * a.compute; }

// Spreads requests over a given number of mini-batches so that each has as much to load and to
// compute as the others: the sum of their squared loads is brought down.
class Leveller {
 public:
  Leveller(const HybridCosts& costs, const std::vector<RequestContext>& requests,
           const MiniBatchLimits& limits)
      : requests_(requests), limits_(limits) {
    Load all;
    for (const RequestContext& r : requests) {
      const auto kv = static_cast<double>(r.kv_tokens);
      const auto act = static_cast<double>(r.act_tokens);
      const auto loaded = static_cast<double>(r.act_tokens - r.act_device_tokens);
      loads_.push_back({.link = costs.load_kv.slope * kv + costs.load_act.slope * loaded,
                        .compute = costs.kv_gen.slope * act + costs.attend.slope * (kv + act)});
      all = all + loads_.back();
    }
    for (Load& load : loads_) {
      load.link = all.link > 0 ? load.link / all.link : 0;
      load.compute = all.compute > 0 ? load.compute / all.compute : 0;
    }
  }

  // Nothing where the largest first leaves no room for one, or nobody in a mini-batch.
  std::optional<std::vector<MiniBatch>> spread(size_t n_batches) {
    batches_.assign(n_batches, {});
    sums_.assign(n_batches, {});
    for (const int32_t r : longest_first(requests_)) {
      size_t best = n_batches;
      double least = 0;
      for (size_t b = 0; b < n_batches; ++b) {
        if (!fits(with(batches_[b], requests_[r]), limits_)) continue;
        const double more = squared(sums_[b] + loads_[r]) - squared(sums_[b]);
        if (best < n_batches && more >= least - kSlack) continue;
        best = b;
        least = more;
      }
      if (best == n_batches) return std::nullopt;
      add(batches_[best], requests_[r], r);
      sums_[best] = sums_[best] + loads_[r];
    }
    for (int round = 0; round < kMostRounds && exchange(); ++round) {
    }
    // Requests that take no time are all in the first.
    for (const MiniBatch& batch : batches_) {
      if (batch.members.empty()) return std::nullopt;
    }
    return std::move(batches_);
  }

 private:
  // One member of a mini-batch for one of another, wherever that makes them more alike. False:
  // nowhere.
  bool exchange() {
    bool any = false;
    for (size_t a = 0; a < batches_.size(); ++a) {
      for (size_t b = a + 1; b < batches_.size(); ++b) {
        for (size_t i = 0; i < batches_[a].members.size(); ++i) {
          for (size_t j = 0; j < batches_[b].members.size(); ++j) any |= level(a, i, b, j);
        }
      }
    }
    return any;
  }

  bool level(size_t a, size_t i, size_t b, size_t j) {
    const Load change = loads_[batches_[b].members[j]] - loads_[batches_[a].members[i]];
    const Load after_a = sums_[a] + change;
    const Load after_b = sums_[b] - change;
    const double before = squared(sums_[a]) + squared(sums_[b]);
    if (squared(after_a) + squared(after_b) >= before - kSlack) return false;
    std::vector<int32_t> in_a = batches_[a].members;
    std::vector<int32_t> in_b = batches_[b].members;
    std::swap(in_a[i], in_b[j]);
    MiniBatch new_a = mini_batch_of(requests_, std::move(in_a));
    MiniBatch new_b = mini_batch_of(requests_, std::move(in_b));
    if (!fits(new_a, limits_) || !fits(new_b, limits_)) return false;
    batches_[a] = std::move(new_a);
    batches_[b] = std::move(new_b);
    sums_[a] = after_a;
    sums_[b] = after_b;
    return true;
  }

  const std::vector<RequestContext>& requests_;
  const MiniBatchLimits limits_;
  std::vector<Load> loads_;
  std::vector<MiniBatch> batches_;
  std::vector<Load> sums_;  // of each
};

class Packer {
 public:
  Packer(const HybridCosts& costs, const std::vector<RequestContext>& requests,
         const MiniBatchLimits& limits)
      : costs_(costs), requests_(requests), limits_(limits) {
    std::vector<int32_t> all(requests.size());
    std::iota(all.begin(), all.end(), 0);
    target_ = balance(costs, mini_batch_of(requests, all));
  }

  std::vector<MiniBatch> by_arrival() {
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (batches_.empty() || !fits(with(batches_.back(), requests_[i]), limits_)) {
        batches_.emplace_back();
      }
      add(batches_.back(), requests_[i], static_cast<int32_t>(i));
    }
    return std::move(batches_);
  }

  std::vector<MiniBatch> by_balance() {
    std::vector<int32_t> left = longest_first(requests_);
    while (!left.empty()) {
      MiniBatch& batch = batches_.emplace_back();
      for (auto next = left.begin(); next != left.end(); next = best_of(batch, left)) {
        add(batch, requests_[*next], *next);
        left.erase(next);
      }
    }
    while (dissolve_smallest()) {
    }
    return std::move(batches_);
  }

 private:
  [[nodiscard]] double imbalance_of(const MiniBatch& batch) const {
    return imbalance(balance(costs_, batch), target_);
  }

  // Of those that fit and don't raise the imbalance, the one that leaves the least; the first of
  // equals. The end if there is none.
  std::vector<int32_t>::iterator best_of(const MiniBatch& batch, std::vector<int32_t>& left) {
    auto best = left.end();
    double least = imbalance_of(batch) * (1 + kSlack);
    for (auto it = left.begin(); it != left.end(); ++it) {
      const MiniBatch sums = with(batch, requests_[*it]);
      if (!fits(sums, limits_)) continue;
      const double after = imbalance_of(sums);
      if (best == left.end() ? after <= least : after < least * (1 - kSlack)) {
        best = it;
        least = after;
      }
    }
    return best;
  }

  // Moves the requests of the mini-batch with the least context into the others. False, and
  // nothing has changed, if they don't fit.
  bool dissolve_smallest() {
    if (batches_.size() < 2) return false;
    const auto smallest = std::min_element(
        batches_.begin(), batches_.end(),
        [](const MiniBatch& a, const MiniBatch& b) { return a.tokens() < b.tokens(); });
    std::vector<MiniBatch> others;
    for (auto it = batches_.begin(); it != batches_.end(); ++it) {
      if (it != smallest) others.push_back(*it);
    }
    for (const int32_t member : smallest->members) {
      MiniBatch* best = nullptr;
      double least = std::numeric_limits<double>::infinity();
      for (MiniBatch& other : others) {
        const MiniBatch sums = with(other, requests_[member]);
        if (!fits(sums, limits_)) continue;
        const double after = imbalance_of(sums);
        if (best == nullptr || after < least * (1 - kSlack)) {
          best = &other;
          least = after;
        }
      }
      if (best == nullptr) return false;
      add(*best, requests_[member], member);
    }
    batches_ = std::move(others);
    return true;
  }

  const HybridCosts& costs_;
  const std::vector<RequestContext>& requests_;
  MiniBatchLimits limits_;
  double target_ = 1;
  std::vector<MiniBatch> batches_;
};

}  // namespace

MiniBatch mini_batch_of(const std::vector<RequestContext>& requests, std::vector<int32_t> members) {
  MiniBatch batch;
  batch.members.reserve(members.size());
  for (const int32_t member : members) add(batch, requests[member], member);
  return batch;
}

double balance(const HybridCosts& costs, const MiniBatch& batch) {
  const double compute_s = costs.kv_gen.at(static_cast<double>(batch.act_tokens));
  const double load_s = costs.load_kv.at(static_cast<double>(batch.kv_tokens)) +
                        costs.load_act.at(static_cast<double>(loaded_act(batch)));
  if (load_s > 0) return compute_s / load_s;
  return compute_s > 0 ? std::numeric_limits<double>::infinity() : 1;
}

double imbalance(double balance, double target) {
  if (balance == target) return 1;
  return std::max(balance / target, target / balance);
}

Result<std::vector<MiniBatch>> form_mini_batches(const HybridCosts& costs,
                                                 const std::vector<RequestContext>& requests,
                                                 const MiniBatchLimits& limits, Packing packing) {
  for (size_t i = 0; i < requests.size(); ++i) {
    const RequestContext& r = requests[i];
    if (fits(mini_batch_of(requests, {static_cast<int32_t>(i)}), limits)) continue;
    return invalid_argument(fmt::format(
        "mini-batches: request {} has {} tokens of KV and {} of activations to load and {} in all; "
        "the device's buffers hold {}, {} and {}: enlarge them or shorten the context",
        i, r.kv_tokens, r.act_tokens - r.act_device_tokens, r.tokens(), limits.kv_tokens,
        limits.act_tokens, limits.tokens));
  }
  Packer packer(costs, requests, limits);
  if (packing == Packing::kArrival) return packer.by_arrival();
  std::vector<MiniBatch> balanced = packer.by_balance();
  if (packing == Packing::kBalance) return balanced;
  auto even = Leveller(costs, requests, limits).spread(balanced.size());
  return even ? *std::move(even) : std::move(balanced);
}

}  // namespace hcache::policy
