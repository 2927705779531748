#include <algorithm>
#include <cmath>
#include <limits>

#include "model/sampler.h"

namespace hcache::model {

Logprobs logprobs(std::span<const float> logits, int32_t token, int top) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  const auto at = [&](size_t i) { return std::isnan(logits[i]) ? kNever : logits[i]; };
  const auto size = logits.size();
  const size_t wanted = std::min(size, static_cast<size_t>(std::max(top, 0)));
  float best = kNever;
  for (size_t i = 0; i < size; i++) best = std::max(best, at(i));
  double sum = 0;
  for (size_t i = 0; i < size; i++) sum += std::exp(static_cast<double>(at(i)) - best);
  const double norm = static_cast<double>(best) + std::log(sum);
  const auto logprob = [&](size_t i) {
    return std::isfinite(norm) ? static_cast<float>(static_cast<double>(at(i)) - norm) : kNever;
  };

  Logprobs out;
  out.chosen = logprob(static_cast<size_t>(token));
  std::vector<int32_t> order(size);
  for (size_t i = 0; i < size; i++) order[i] = static_cast<int32_t>(i);
  std::partial_sort(order.begin(), order.begin() + static_cast<ptrdiff_t>(wanted), order.end(),
                    [&](int32_t a, int32_t b) {
                      const float x = at(static_cast<size_t>(a));
                      const float y = at(static_cast<size_t>(b));
                      return x != y ? x > y : a < b;
                    });
  for (size_t i = 0; i < wanted; i++) {
    out.top.push_back({order[i], logprob(static_cast<size_t>(order[i]))});
  }
  return out;
}

}  // namespace hcache::model
