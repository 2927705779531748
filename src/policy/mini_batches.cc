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
    std::vector<int32_t> left(requests_.size());
    std::iota(left.begin(), left.end(), 0);
    std::stable_sort(left.begin(), left.end(), [&](int32_t a, int32_t b) {
      return requests_[a].tokens() > requests_[b].tokens();
    });
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
  return packing == Packing::kArrival ? packer.by_arrival() : packer.by_balance();
}

}  // namespace hcache::policy
