#include "step_plan.h"

#include <fmt/format.h>

#include <algorithm>

namespace hcache::engine {
namespace {

// Cuts rows [first, end) of members into pieces, and puts these into groups.
class PieceCutter {
 public:
  PieceCutter(const StepLimits& limits, StepPlan& plan, bool is_context)
      : limits_(limits), plan_(plan), is_context_(is_context) {}

  void add(int batch, int member, int64_t first, int64_t end) {
    while (first < end) {
      if (room() == 0) open_group();
      if (piece_ < 0 || plan_.pieces[piece_].batch != batch) open_piece(batch);
      Piece& piece = plan_.pieces[piece_];
      const auto n = static_cast<int>(std::min<int64_t>(end - first, room()));
      piece.ranges.push_back(
          {.member = member, .first_pos = first, .n_rows = n, .first_row = piece.n_rows});
      piece.n_rows += n;
      plan_.groups[group_].n_rows += n;
      first += n;
    }
  }

 private:
  [[nodiscard]] int room() const {
    return group_ < 0 ? 0 : limits_.max_batch_rows - plan_.groups[group_].n_rows;
  }
  void open_group() {
    group_ = static_cast<int>(plan_.groups.size());
    plan_.groups.emplace_back().is_context = is_context_;
    piece_ = -1;
  }
  void open_piece(int batch) {
    piece_ = static_cast<int>(plan_.pieces.size());
    RowGroup& group = plan_.groups[group_];
    Piece& piece = plan_.pieces.emplace_back();
    piece.batch = batch;
    piece.group = group_;
    piece.first_row = group.n_rows;
    group.pieces.push_back(piece_);
    MiniBatch& mini_batch = plan_.batches[batch];
    (is_context_ ? mini_batch.context : mini_batch.fresh).push_back(piece_);
  }

  const StepLimits& limits_;
  StepPlan& plan_;
  const bool is_context_;
  int group_ = -1;  // that takes rows
  int piece_ = -1;  // of it
};

// Gives the groups their rows between two layers: first those of the context.
void place_groups(const StepLimits& limits, StepPlan& plan) {
  for (const bool is_context : {true, false}) {
    for (RowGroup& group : plan.groups) {
      if (group.is_context != is_context) continue;
      group.n_padded = std::max(group.n_rows, limits.least_rows);
      group.first_row = plan.n_rows;
      plan.n_rows += group.n_padded;
    }
    if (is_context) plan.n_context_rows = plan.n_rows;
  }
}

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
  PieceCutter context(limits, plan, /*is_context=*/true);
  PieceCutter fresh(limits, plan, /*is_context=*/false);
  for (const std::vector<int>& indices : formed) {
    const auto number = static_cast<int>(plan.batches.size());
    MiniBatch& batch = plan.batches.emplace_back();
    int64_t cell = 0;
    for (const int i : indices) {
      batch.members.push_back(members[i]);
      batch.members.back().first_cell = cell;
      cell += asked[i].cells;
    }
    for (size_t m = 0; m < batch.members.size(); ++m) {
      const StepMember& member = batch.members[m];
      const auto index = static_cast<int>(m);
      context.add(number, index, 0, limits.recompute ? member.n_past : member.n_tokens);
      fresh.add(number, index, member.n_past, member.n_past + member.n_new);
    }
  }
  place_groups(limits, plan);
  return plan;
}

std::vector<AttentionSegment> attention_segments(const MiniBatch& batch, const Piece& piece) {
  std::vector<AttentionSegment> segments;
  for (const RowRange& range : piece.ranges) {
    segments.push_back({.first_row = range.first_row,
                        .n_rows = range.n_rows,
                        .first_cell = batch.members[range.member].first_cell,
                        .n_past = range.first_pos});
  }
  return segments;
}

}  // namespace hcache::engine
