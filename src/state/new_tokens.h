// The prefill of new tokens behind a restore, one layer at a time.
//
// Threading: the engine's thread.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"
#include "state/restorer.h"

namespace hcache::state {

// New tokens on their way through the layers behind the restored rows.
class NewTokens {
 public:
  // Prepares the first n of them. kResourceExhausted: the arena has no room, and nothing has
  // changed.
  static Result<NewTokens> begin(engine::Engine& engine, const RestoreRun& run, int64_t first,
                                 int64_t n) {
    const auto tokens = run.tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(n));
    const bool last = first + n == static_cast<int64_t>(run.tokens.size());
    const engine::BatchItem item{
        .seq = run.seq,
        .tokens = tokens,
        .first_pos = first,
        .output = last ? engine::BatchItem::Output::kLast : engine::BatchItem::Output::kNone};
    HCACHE_ASSIGN_OR_RETURN(engine::Step step, engine.prepare({&item, 1}));
    if (run.before_step) run.before_step(first, tokens);
    return NewTokens(engine, std::move(step), n);
  }
  Status run_layer() {
    ++layers_;
    return engine_->run_layers(step_, layers_ - 1, layers_);
  }
  [[nodiscard]] int64_t rows() const { return rows_; }
  [[nodiscard]] int layers() const { return layers_; }  // that they have run through
  // The logits of the last token, if it was among them.
  Result<std::vector<float>> finish() {
    HCACHE_ASSIGN_OR_RETURN(const engine::Logits logits, engine_->finish(step_));
    if (logits.rows.empty()) return std::vector<float>();
    return std::vector<float>(logits.rows[0].begin(), logits.rows[0].end());
  }

 private:
  NewTokens(engine::Engine& engine, engine::Step step, int64_t rows)
      : engine_(&engine), step_(std::move(step)), rows_(rows) {}

  engine::Engine* engine_;
  engine::Step step_;
  int64_t rows_ = 0;
  int layers_ = 0;
};

}  // namespace hcache::state
