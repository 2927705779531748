// Which rows a step of the batch engine computes, in which mini-batches and graphs, and where they
// lie in a mini-batch's buffers.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "engine/attention.h"
#include "engine/hybrid_engine.h"

namespace hcache::engine {

// What a sequence brings to a step.
struct StepMember {
  int request = -1;           // whatever the caller numbers them by
  int64_t n_past = 0;         // tokens whose state is kept
  int64_t n_new = 0;          // tokens that the step computes behind them
  int64_t n_act = 0;          // of n_past, in ACT blocks
  int64_t n_tokens = 0;       // the first of n_past, in blocks that hold nothing
  bool wants_logits = false;  // of its last row
  int64_t first_cell = 0;     // of its extent in the KV buffer; a multiple of kBlockTokens
};

// Consecutive rows of one sequence within a piece.
struct RowRange {
  int member = 0;  // of the mini-batch
  int64_t first_pos = 0;
  int n_rows = 0;
  int first_row = 0;  // of the piece
};

// Rows of one mini-batch that attend together.
struct Piece {
  int batch = 0;  // the mini-batch
  std::vector<RowRange> ranges;
  int n_rows = 0;
  int group = 0;
  int first_row = 0;  // of the group
};

// Rows that go through a layer's products together: pieces of one mini-batch or of several that
// follow each other.
struct RowGroup {
  std::vector<int> pieces;
  bool is_context = false;  // of rows whose state is recomputed; else of new rows
  int n_rows = 0;           // without padding
  int n_padded = 0;         // rows that are computed
  int64_t first_row = 0;    // among the step's rows between two layers
};

struct MiniBatch {
  std::vector<StepMember> members;
  std::vector<int> context;  // pieces of rows whose state is recomputed; empty unless some is
  std::vector<int> fresh;    // of new rows
};

struct StepPlan {
  std::vector<MiniBatch> batches;
  std::vector<Piece> pieces;
  std::vector<RowGroup> groups;
  int64_t n_context_rows = 0;  // they come first between two layers
  int64_t n_rows = 0;          // between two layers, padding included

  // Of a piece's first row, among the step's rows between two layers.
  [[nodiscard]] int64_t first_row(const Piece& piece) const {
    return groups[piece.group].first_row + piece.first_row;
  }
};

struct StepLimits {
  int64_t buffer_tokens = 0;
  int max_batch_rows = 0;  // of a group
  int least_rows = 1;
  bool recompute = false;  // whether some layers' context is recomputed
};

// Cells of a sequence's extent.
[[nodiscard]] inline int64_t extent_cells(int64_t n_tokens) {
  return (n_tokens + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
}

// Lays the members' rows out. kInternal when `decisions` forms mini-batches that leave a member
// out, name it twice, or don't fit the buffers. Pure but for what `decisions` does.
Result<StepPlan> plan_step(std::span<const StepMember> members, const StepLimits& limits,
                           const HybridDecisions& decisions);

// The members of mini-batches in order, as many as fit.
[[nodiscard]] std::vector<std::vector<int>> batches_in_order(std::span<const BatchMember> members,
                                                             int64_t max_cells);

// What attention needs of a piece.
[[nodiscard]] std::vector<AttentionSegment> attention_segments(const MiniBatch& batch,
                                                               const Piece& piece);

}  // namespace hcache::engine
