// Comparing rows of logits, for benchmarks and tests.
#pragma once

#include <cstdint>
#include <span>

namespace hcache::model {

// The token that greedy decoding takes: the first of the largest logits. `logits` is not empty.
[[nodiscard]] int32_t argmax(std::span<const float> logits);

// log softmax(logits)[token]. `token` is in range.
[[nodiscard]] double log_prob(std::span<const float> logits, int32_t token);

// KL(softmax(reference) || softmax(other)) of two rows [n_vocab], in nats, at least 0.
[[nodiscard]] double kl_divergence(std::span<const float> reference, std::span<const float> other);

}  // namespace hcache::model
