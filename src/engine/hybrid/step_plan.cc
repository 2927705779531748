#include "step_plan.h"

#include <fmt/format.h>

#include <algorithm>

namespace hcache::engine {
namespace {

// Cuts rows [first, end) of each member into pieces.
class PieceCutter {
 public:
  PieceCutter(const StepLimits& limits, StepPlan& plan, std::vector<Piece>& pieces)
      : limits_(limits), plan_(plan), pieces_(pieces) {}

  void add(int member, int64_t first, int64_t end) {
    while (first < end) {
      if (pieces_.empty() || pieces_.back().n_rows == limits_.max_batch_rows) open();
      Piece& piece = pieces_.back();
      const auto n =
          static_cast<int>(std::min<int64_t>(end - first, limits_.max_batch_rows - piece.n_rows));
      piece.ranges.push_back(
          {.member = member, .first_pos = first, .n_rows = n, .first_row = piece.n_rows});
      piece.n_rows += n;
      first += n;
    }
  }
  void close() {
    for (Piece& piece : pieces_) {
      piece.n_padded = std::max(piece.n_rows, limits_.least_rows);
      piece.row_offset = plan_.n_rows;
      plan_.n_rows += piece.n_padded;
    }
  }

 private:
  void open() {
    pieces_.emplace_back();
    pieces_.back().index = plan_.n_pieces++;
  }

  const StepLimits& limits_;
  StepPlan& plan_;
  std::vector<Piece>& pieces_;
};

Status check_batches(const std::vector<std::vector<int>>& batches,
                     std::span<const BatchMember> members, int64_t max_cells) {
  std::vector<int> seen(members.size(), 0);
  for (const std::vector<int>& batch : batches) {
    int64_t n_cells = 0;
    for (const int member : batch) {
      if (member < 0 || member >= static_cast<int>(members.size()) || ++seen[member] > 1) {
        return internal_error(fmt::format("mini-batches name member {} wrongly", member));
      }
      n_cells += members[member].cells;
    }
    if (batch.empty() || n_cells > max_cells) {
      return internal_error(
          fmt::format("a mini-batch of {} cells for buffers of {}", n_cells, max_cells));
    }
  }
  if (std::count(seen.begin(), seen.end(), 1) != static_cast<std::ptrdiff_t>(members.size())) {
    return internal_error("mini-batches leave a sequence out");
  }
  return {};
}

}  // namespace

std::vector<std::vector<int>> batches_in_order(std::span<const BatchMember> members,
                                               int64_t max_cells) {
  std::vector<std::vector<int>> batches;
  int64_t n_cells = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    if (batches.empty() || n_cells + members[i].cells > max_cells) {
      batches.emplace_back();
      n_cells = 0;
    }
    batches.back().push_back(static_cast<int>(i));
    n_cells += members[i].cells;
  }
  return batches;
}

Result<StepPlan> plan_step(std::span<const StepMember> members, const StepLimits& limits,
                           const HybridDecisions& decisions) {
  std::vector<BatchMember> asked;
  for (const StepMember& m : members) {
    asked.push_back({.act_tokens = m.n_act,
                     .kv_tokens = m.n_past - m.n_act - m.n_tokens,
                     .recomputed_tokens = m.n_tokens,
                     .new_rows = m.n_new,
                     .cells = extent_cells(m.n_past + m.n_new)});
  }
  const auto formed = decisions.form_batches ? decisions.form_batches(asked, limits.buffer_tokens)
                                             : batches_in_order(asked, limits.buffer_tokens);
  HCACHE_RETURN_IF_ERROR(check_batches(formed, asked, limits.buffer_tokens));
  StepPlan plan;
  for (const std::vector<int>& indices : formed) {
    MiniBatch& batch = plan.batches.emplace_back();
    int64_t cell = 0;
    for (const int i : indices) {
      batch.members.push_back(members[i]);
      batch.members.back().first_cell = cell;
      cell += asked[i].cells;
    }
    PieceCutter context(limits, plan, batch.context);
    PieceCutter fresh(limits, plan, batch.fresh);
    for (size_t m = 0; m < batch.members.size(); ++m) {
      const StepMember& member = batch.members[m];
      context.add(static_cast<int>(m), 0, limits.recompute ? member.n_past : member.n_tokens);
      fresh.add(static_cast<int>(m), member.n_past, member.n_past + member.n_new);
    }
    context.close();
    fresh.close();
  }
  return plan;
}

std::vector<AttentionSegment> attention_segments(const MiniBatch& batch, const Piece& piece,
                                                 int64_t pad_cell) {
  std::vector<AttentionSegment> segments;
  for (const RowRange& range : piece.ranges) {
    segments.push_back({.first_row = range.first_row,
                        .n_rows = range.n_rows,
                        .first_cell = batch.members[range.member].first_cell,
                        .n_past = range.first_pos});
  }
  if (piece.n_padded > piece.n_rows) {
    segments.push_back({.first_row = piece.n_rows,
                        .n_rows = piece.n_padded - piece.n_rows,
                        .first_cell = pad_cell,
                        .n_past = 0});
  }
  return segments;
}

}  // namespace hcache::engine
