#include "model/logits.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace hcache::model {
namespace {

double log_sum_exp(std::span<const float> x) {
  const double top = *std::max_element(x.begin(), x.end());
  double sum = 0;
  for (const float v : x) sum += std::exp(static_cast<double>(v) - top);
  return top + std::log(sum);
}

}  // namespace

int32_t argmax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

double log_prob(std::span<const float> logits, int32_t token) {
  return static_cast<double>(logits[static_cast<size_t>(token)]) - log_sum_exp(logits);
}

double kl_divergence(std::span<const float> reference, std::span<const float> other) {
  const double p_norm = log_sum_exp(reference);
  const double q_norm = log_sum_exp(other);
  double kl = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double log_p = static_cast<double>(reference[i]) - p_norm;
    kl += std::exp(log_p) * (log_p - (static_cast<double>(other[i]) - q_norm));
  }
  return std::max(kl, 0.0);  // rounding may take it below
}

}  // namespace hcache::model
