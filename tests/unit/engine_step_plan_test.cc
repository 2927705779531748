// Which rows of a batch's step go through a layer's products together.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

#include "hybrid/step_plan.h"

namespace hcache::engine {
namespace {

// Every new row and every recomputed one is in one piece of its mini-batch; groups lie side by
// side, context first, and a mini-batch's pieces are in the order in which its rows attend.
void check(const StepPlan& plan, std::span<const StepMember> members, const StepLimits& limits) {
  std::vector<int64_t> fresh(members.size(), 0);
  std::vector<int64_t> context(members.size(), 0);
  int64_t next_row = 0;
  for (const bool is_context : {true, false}) {
    for (const RowGroup& group : plan.groups) {
      if (group.is_context != is_context) continue;
      EXPECT_EQ(group.first_row, next_row);
      EXPECT_EQ(group.n_padded, std::max(group.n_rows, limits.least_rows));
      EXPECT_LE(group.n_rows, limits.max_batch_rows);
      next_row += group.n_padded;
      int row = 0;
      for (const int index : group.pieces) {
        EXPECT_EQ(plan.pieces[index].first_row, row);
        row += plan.pieces[index].n_rows;
      }
      EXPECT_EQ(group.n_rows, row);
    }
    EXPECT_EQ(is_context ? plan.n_context_rows : plan.n_rows, next_row);
  }
  size_t n_pieces = 0;
  for (size_t b = 0; b < plan.batches.size(); ++b) {
    const MiniBatch& batch = plan.batches[b];
    n_pieces += batch.context.size() + batch.fresh.size();
    for (const bool is_context : {true, false}) {
      for (const int index : is_context ? batch.context : batch.fresh) {
        const Piece& piece = plan.pieces[index];
        EXPECT_EQ(piece.batch, static_cast<int>(b));
        EXPECT_EQ(plan.groups[piece.group].is_context, is_context);
        int row = 0;
        for (const RowRange& range : piece.ranges) {
          const StepMember& member = batch.members[range.member];
          int64_t& done = (is_context ? context : fresh)[member.request];
          EXPECT_EQ(range.first_pos, done + (is_context ? 0 : member.n_past));
          EXPECT_EQ(range.first_row, row);
          row += range.n_rows;
          done += range.n_rows;
        }
        EXPECT_EQ(piece.n_rows, row);
      }
    }
  }
  EXPECT_EQ(n_pieces, plan.pieces.size());
  for (const StepMember& member : members) {
    EXPECT_EQ(fresh[member.request], member.n_new);
    EXPECT_EQ(context[member.request], limits.recompute ? member.n_past : member.n_tokens);
  }
}

TEST(BatchStepPlan, RowsOfMiniBatchesShareTheProducts) {
  std::vector<StepMember> members;
  for (int i = 0; i < 20; ++i) members.push_back({.request = i, .n_past = 100, .n_new = 1});
  const StepLimits limits{.buffer_tokens = 192, .max_batch_rows = 16, .least_rows = 8};
  const StepPlan plan = plan_step(members, limits, {}).value();
  EXPECT_EQ(plan.batches.size(), 20U);  // a buffer holds no two of them
  ASSERT_EQ(plan.groups.size(), 2U);
  EXPECT_EQ(plan.groups[0].n_rows, 16);
  EXPECT_EQ(plan.groups[1].n_rows, 4);
  EXPECT_EQ(plan.n_rows, 24) << "the second one padded";
  check(plan, members, limits);
}

TEST(BatchStepPlan, APromptFillsWhatIsLeftOfAGroup) {
  const std::vector<StepMember> members = {{.request = 0, .n_past = 70, .n_new = 1},
                                           {.request = 1, .n_new = 150}};
  const StepLimits limits{.buffer_tokens = 256, .max_batch_rows = 64};
  const StepPlan plan = plan_step(members, limits, {}).value();
  EXPECT_EQ(plan.batches.size(), 2U);
  EXPECT_EQ(plan.groups.size(), 3U);
  EXPECT_EQ(plan.batches[1].fresh.size(), 3U);
  EXPECT_EQ(plan.pieces[plan.batches[1].fresh[0]].n_rows, 63);
  check(plan, members, limits);
}

TEST(BatchStepPlan, EveryRowIsComputedOnce) {
  std::mt19937 random(1);
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  for (int round = 0; round < 500; ++round) {
    std::vector<StepMember> members;
    for (int i = below(12); i >= 0; --i) {
      StepMember member{.request = static_cast<int>(members.size())};
      member.n_past = below(300);
      member.n_new = 1 + (below(2) == 0 ? 0 : below(200));
      member.n_tokens = std::min<int64_t>(64 * below(3), member.n_past / 64 * 64);
      members.push_back(member);
    }
    const StepLimits limits{.buffer_tokens = 512 + below(1024),
                            .max_batch_rows = 8 + below(200),
                            .least_rows = 1 + below(8),
                            .recompute = below(4) == 0};
    const auto plan = plan_step(members, limits, {});
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    check(*plan, members, limits);
    if (HasFailure()) FAIL() << "round " << round;
  }
}

}  // namespace
}  // namespace hcache::engine
