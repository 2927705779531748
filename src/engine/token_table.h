// Layer 0's K before rotation and V depend on the token alone: those of tokens met in restorations
// are computed once and kept on the device.
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "model/graph.h"
#include "stage.h"
#include "step_state.h"
#include "tensor_pool.h"

namespace hcache::engine {

// Threading: the engine's thread.
class TokenTable {
 public:
  // `stages` are layer 0's; all must outlive the table.
  TokenTable(const model::Model& model, std::span<Stage* const> stages)
      : model_(model), tables_(stages.size()) {
    for (size_t i = 0; i < stages.size(); ++i) tables_[i].stage = stages[i];
  }
  // At least max_batch_rows entries.
  Status allocate(int64_t max_batch_rows);

  // Cuts the step's x to the rows of tokens that the table lacks (at least one: no graph is without
  // rows). Not with learned positions, where layer 0 depends on more than the token.
  void keep_unknown_tokens(StepState& step);
  // The step's new tokens have been computed.
  void learn(const StepState& step);
  // For a step of which only unknown tokens are left: `product` for their rows, the table for all.
  // The result is K's (k true) or V's rows before bias and rotation. `stage` is one of layer 0's.
  [[nodiscard]] model::Product through(const Stage& stage, const StepState& step, bool k,
                                       const model::Product& product) const;
  void clear() { entries_.clear(); }
  [[nodiscard]] size_t n_bytes() const;

 private:
  struct Table {  // on one device
    Stage* stage = nullptr;
    TensorPool pool;
    ggml_tensor* k = nullptr;  // F32 [n_embd_kv, entries]
    ggml_tensor* v = nullptr;
  };

  const model::Model& model_;
  std::vector<Table> tables_;
  std::unordered_map<int32_t, int64_t> entries_;  // token -> row
};

}  // namespace hcache::engine
