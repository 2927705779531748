#include "state/second_reading.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

namespace hcache::state {

void SecondReading::resize(int64_t n_rows) {
  if (n_rows == scores_.n_rows) return;
  const auto n_heads =
      static_cast<size_t>(scores_.n_layer) * static_cast<size_t>(scores_.n_head_kv);
  const auto from = static_cast<size_t>(scores_.n_rows);
  const auto to = static_cast<size_t>(n_rows);
  std::vector<float> top(n_heads * to);
  for (size_t head = 0; head < n_heads; ++head) {
    std::copy_n(scores_.top.begin() + static_cast<std::ptrdiff_t>(head * from), std::min(from, to),
                top.begin() + static_cast<std::ptrdiff_t>(head * to));
  }
  scores_.top = std::move(top);
  scores_.n_rows = n_rows;
}

void SecondReading::forget_from(int64_t n_tokens) {
  if (n_tokens < scores_.n_rows) resize(n_tokens);
  read_ = std::min(read_, n_tokens);
}

Status SecondReading::read_part(engine::Engine& engine, engine::SeqId seq,
                                std::span<const int32_t> text) {
  const auto n_rows = static_cast<int64_t>(text.size());
  const model::HParams& hp = engine.model().hparams();
  scores_.n_layer = hp.n_layer;
  scores_.n_head_kv = hp.n_head_kv;
  resize(n_rows);
  const int64_t most = std::min<int64_t>(kPart, engine.options().max_batch_rows - kLead);
  const int64_t end = std::min(n_rows, read_ + most);
  const int64_t begin = std::max<int64_t>(0, read_ - kLead);
  const int64_t length = engine.length(seq);
  engine::AttentionScores told;
  HCACHE_RETURN_IF_ERROR(
      engine.observe({.seq = seq, .first_pos = length, .n_keys = n_rows}, &told));
  const engine::BatchItem item{
      .seq = seq,
      .tokens = text.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin)),
      .output = engine::BatchItem::Output::kLast,
      .captured = false};
  const Status read = engine.decode({&item, 1}).status();
  HCACHE_RETURN_IF_ERROR(engine.observe({}, nullptr));
  HCACHE_RETURN_IF_ERROR(read);
  HCACHE_RETURN_IF_ERROR(engine.trim_sequence(seq, length));
  auto top = scores_.top.begin();
  for (const engine::AttentionTally& tally : told.tallies) {
    for (int64_t row = 0; row < n_rows; ++row, ++top) {
      *top = std::max(*top, tally.top[static_cast<size_t>(row)]);
    }
  }
  read_ = end;
  return {};
}

Result<policy::RowScores> SecondReading::all_of(engine::Engine& engine, engine::SeqId seq,
                                                std::span<const int32_t> text) {
  SecondReading reading;
  while (reading.unread(static_cast<int64_t>(text.size())) > 0) {
    HCACHE_RETURN_IF_ERROR(reading.read_part(engine, seq, text));
  }
  return std::move(reading.scores_);
}

}  // namespace hcache::state
