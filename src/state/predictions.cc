#include "predictions.h"

#include <algorithm>

#include "model/logits.h"

namespace hcache::state {

Result<Predictions> predict(engine::Engine& engine, engine::SeqId seq,
                            std::span<const int32_t> tokens) {
  Predictions logits;
  const auto most = static_cast<size_t>(engine.options().max_batch_rows);
  while (!tokens.empty()) {
    const auto piece = tokens.first(std::min(most, tokens.size()));
    const engine::BatchItem item{
        .seq = seq, .tokens = piece, .output = engine::BatchItem::Output::kAll};
    HCACHE_ASSIGN_OR_RETURN(const engine::Logits step, engine.decode({&item, 1}));
    for (const std::span<const float> row : step.rows) logits.emplace_back(row.begin(), row.end());
    tokens = tokens.subspan(piece.size());
  }
  return logits;
}

double mean_kl(const Predictions& expected, const Predictions& predicted) {
  double sum = 0;
  for (size_t i = 0; i < predicted.size(); ++i) {
    sum += model::kl_divergence(expected[i], predicted[i]);
  }
  return sum / static_cast<double>(predicted.size());
}

}  // namespace hcache::state
