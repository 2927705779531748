#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "policy/batching.h"
#include "policy_testing.h"

namespace hcache::policy {
namespace {

using testing::Random;

constexpr ReadyRequest kDecode{.pending = 1, .decoding = true};
ReadyRequest prefill(int64_t rows) { return {.pending = rows, .decoding = false}; }

std::vector<std::pair<int32_t, int32_t>> pieces(const StepPlan& plan) {
  std::vector<std::pair<int32_t, int32_t>> result;
  for (const StepPiece& piece : plan.pieces) result.emplace_back(piece.index, piece.rows);
  return result;
}
using Pieces = std::vector<std::pair<int32_t, int32_t>>;

// Seconds of a stage: so much a step, and so much a row.
int32_t steps_of_two(double base_s, double per_row_s, double second, int64_t sequences) {
  const CostCurve first = CostCurve::affine(base_s, per_row_s);
  const std::vector<CostCurve> stages = {first, first.scaled(second)};
  return steps_in_flight(stages, sequences);
}

TEST(StepsInFlight, AreAsManyAsPay) {
  EXPECT_EQ(steps_of_two(0, 1, 1, 4), 2) << "rows cost: both devices work all the time";
  EXPECT_EQ(steps_of_two(1, 0, 1, 4), 1) << "weights cost: each step reads them again";
  EXPECT_EQ(steps_of_two(1, 1, 1, 4), 2) << "6 seconds a round instead of 10";
  EXPECT_EQ(steps_of_two(1, 1, 0.05, 4), 1) << "the second device has next to nothing to do";
  EXPECT_EQ(steps_of_two(0, 1, 1, 1), 1) << "one sequence has one token at a time";
  EXPECT_EQ(steps_in_flight({}, 4), 1);
  const std::vector<CostCurve> three(3, CostCurve::affine(0, 1));
  EXPECT_EQ(steps_in_flight(three, 6), 3);
  EXPECT_EQ(steps_in_flight(three, 2), 2);
}

TEST(PlanStep, DecodesFirstThenFillsTheBudgetInOrderOfArrival) {
  const BatchLimits limits{.max_step_tokens = 16, .max_sequences = 8};
  const StepPlan plan =
      plan_step({{prefill(5), kDecode, prefill(30), kDecode, prefill(7)}, 1000}, limits);
  EXPECT_EQ(pieces(plan), (Pieces{{1, 1}, {3, 1}, {0, 5}, {2, 9}}));
  EXPECT_EQ(plan.rows, 16);
  EXPECT_EQ(plan.decode_rows, 2);
  EXPECT_EQ(plan.wanted_cells, 16);
  EXPECT_EQ(plan.stalled, 0);
}

TEST(PlanStep, TakesNoMoreSequencesThanAllowed) {
  const BatchLimits limits{.max_step_tokens = 16, .max_sequences = 2};
  EXPECT_EQ(pieces(plan_step({{prefill(2), prefill(3), kDecode}, 1000}, limits)),
            (Pieces{{2, 1}, {0, 2}}));
}

TEST(PlanStep, SaysWhatStalledForWantOfCells) {
  const BatchLimits limits{.max_step_tokens = 16, .max_sequences = 8};
  StepPlan plan = plan_step({{kDecode, kDecode, kDecode, prefill(4)}, 2}, limits);
  EXPECT_EQ(pieces(plan), (Pieces{{0, 1}, {1, 1}}));
  EXPECT_EQ(plan.stalled, 1);
  EXPECT_EQ(plan.wanted_cells, 7);
  plan = plan_step({{prefill(4)}, 0}, limits);
  EXPECT_TRUE(plan.pieces.empty());
  EXPECT_EQ(plan.stalled, 1);
  plan = plan_step({{prefill(4)}, 3}, limits);
  EXPECT_EQ(pieces(plan), (Pieces{{0, 3}}));
  EXPECT_EQ(plan.stalled, 0);
  EXPECT_EQ(plan_step({{}, 0}, limits).stalled, 0);
}

TEST(PlanStep, PrefillLeavesTheReserveToThoseThatDecode) {
  const BatchLimits limits{.max_step_tokens = 16, .max_sequences = 8};
  StepPlan plan = plan_step({{kDecode, prefill(9)}, 10, 5}, limits);
  EXPECT_EQ(pieces(plan), (Pieces{{0, 1}, {1, 4}}));
  EXPECT_EQ(plan.wanted_cells, 15);
  plan = plan_step({{kDecode, prefill(9)}, 3, 5}, limits);
  EXPECT_EQ(pieces(plan), (Pieces{{0, 1}}));
  EXPECT_EQ(plan.stalled, 0);
}

TEST(PlanStep, KeepsItsLimitsOnAnyInput) {
  Random random(1);
  for (int i = 0; i < 5000; ++i) {
    BatchLimits limits;
    limits.max_sequences = static_cast<int32_t>(random.integer(1, 12));
    limits.max_step_tokens = static_cast<int32_t>(random.integer(limits.max_sequences, 80));
    BatchSnapshot batch;
    batch.free_cells = random.integer(0, 100);
    batch.reserve_cells = random.coin() ? random.integer(0, 20) : 0;
    const int64_t n = random.integer(0, limits.max_sequences);
    for (int64_t k = 0; k < n; ++k) {
      batch.ready.push_back(random.coin() ? kDecode : prefill(random.integer(1, 60)));
    }
    const StepPlan plan = plan_step(batch, limits);
    int64_t rows = 0;
    int64_t decode_rows = 0;
    bool prefill_seen = false;
    for (const StepPiece& piece : plan.pieces) {
      const ReadyRequest& request = batch.ready[static_cast<size_t>(piece.index)];
      ASSERT_GE(piece.rows, 1);
      ASSERT_LE(piece.rows, request.pending);
      ASSERT_FALSE(request.decoding && prefill_seen);
      prefill_seen = prefill_seen || !request.decoding;
      rows += piece.rows;
      decode_rows += request.decoding ? 1 : 0;
    }
    ASSERT_EQ(rows, plan.rows);
    ASSERT_EQ(decode_rows, plan.decode_rows);
    ASSERT_LE(rows, std::min<int64_t>(limits.max_step_tokens, batch.free_cells));
    ASSERT_LE(plan.pieces.size(), static_cast<size_t>(limits.max_sequences));
    const auto decoders = std::count_if(batch.ready.begin(), batch.ready.end(),
                                        [](const ReadyRequest& r) { return r.decoding; });
    if (plan.wanted_cells <= batch.free_cells) {
      // Nobody who decodes is left out, and somebody's prefill goes on.
      ASSERT_EQ(plan.decode_rows, decoders);
      ASSERT_EQ(plan.stalled, 0);
      ASSERT_TRUE(prefill_seen || decoders == n);
    } else if (plan.rows > plan.decode_rows) {
      ASSERT_LE(plan.rows, batch.free_cells - batch.reserve_cells);
    }
    if (decoders > 0) {
      ASSERT_EQ(plan.decode_rows + plan.stalled, decoders);
    }
  }
}

TEST(RestoreBudget, IsAShareOfTheStepLessTheDebt) {
  const RestoreLimits limits{.share = 0.25, .idle_slice_s = 0.05};
  EXPECT_DOUBLE_EQ(restore_budget_s(true, 0.02, 0, limits), 0.005);
  EXPECT_DOUBLE_EQ(restore_budget_s(true, 0.02, 0.007, limits), -0.002);
  EXPECT_DOUBLE_EQ(restore_budget_s(false, 0.02, 0.007, limits), 0.05);
  EXPECT_DOUBLE_EQ(restore_debt_s(true, 0.005, 0.012), 0.007);
  EXPECT_DOUBLE_EQ(restore_debt_s(true, -0.002, 0), 0.002);
  EXPECT_DOUBLE_EQ(restore_debt_s(true, 0.005, 0.001), 0);
  EXPECT_DOUBLE_EQ(restore_debt_s(false, 0.05, 0.3), 0);
}

TEST(RestoreBudget, SaysWhatPlansMayCountOn) {
  RestoreLimits limits{.share = 0.25};
  EXPECT_DOUBLE_EQ(restore_compute_share(false, limits), 1);
  EXPECT_DOUBLE_EQ(restore_compute_share(true, limits), 0.2);
  limits.exclusive = true;
  EXPECT_DOUBLE_EQ(restore_compute_share(true, limits), 1);
}

// Over any stretch of steps, slices take at most the share and one slice more.
TEST(RestoreBudget, HoldsOverEveryWindow) {
  Random random(2);
  for (int i = 0; i < 500; ++i) {
    const RestoreLimits limits{.share = random.real(0.05, 0.6), .idle_slice_s = 0.05};
    const double slice_s = random.real(0.1, 30);
    double debt_s = 0;
    double excess_s = 0;  // of the worst window that ends here
    for (int k = 0; k < 300; ++k) {
      const double step_s = random.real(0.5, 20);
      const double budget_s = restore_budget_s(true, step_s, debt_s, limits);
      double used_s = 0;
      while (random.coin(0.8) && used_s < budget_s) used_s += random.real(0, slice_s);
      debt_s = restore_debt_s(true, budget_s, used_s);
      excess_s = std::max(0.0, excess_s + used_s - limits.share * step_s);
      ASSERT_LE(excess_s, slice_s * (1 + 1e-9));
    }
  }
}

ReuseCandidate idle(int64_t shared, int64_t held) {
  return {.shared = shared, .held = held, .coming = held, .idle = true};
}
ReuseCandidate active(int64_t shared, int64_t held, int64_t coming) {
  return {.shared = shared, .held = held, .coming = coming, .idle = false};
}

ReuseCandidate fork_only(int64_t shared, int64_t held) {
  return {.shared = shared, .held = held, .coming = held, .idle = false, .fork_only = true};
}

struct ReuseCase {
  const char* what;
  ReuseSnapshot snapshot;
  Reuse action;
  int32_t candidate;
  int64_t rows;
};

TEST(ChooseReuse, FollowsItsRule) {
  const int64_t roomy = 100'000;
  const std::vector<ReuseCase> cases = {
      {"nothing there", {1000, 0, roomy, 9, {}}, Reuse::kCompute, -1, 0},
      {"saved", {1000, 900, roomy, 9, {}}, Reuse::kRestore, -1, 900},
      {"the last token is computed", {1000, 1000, roomy, 9, {}}, Reuse::kRestore, -1, 999},
      {"too little saved", {1000, 64, roomy, 9, {}}, Reuse::kCompute, -1, 0},
      {"the next turn", {1000, 800, roomy, 9, {idle(800, 800)}}, Reuse::kTakeOver, 0, 800},
      {"the same again", {1000, 0, roomy, 9, {idle(1000, 1000)}}, Reuse::kTakeOver, 0, 999},
      {"saved is a little longer",
       {1000, 864, roomy, 9, {idle(800, 800)}},
       Reuse::kTakeOver,
       0,
       800},
      {"saved is much longer", {1000, 865, roomy, 9, {idle(800, 800)}}, Reuse::kRestore, -1, 865},
      {"an edited message", {1000, 0, roomy, 9, {idle(600, 900)}}, Reuse::kTakeOver, 0, 600},
      {"a common beginning", {1000, 0, roomy, 9, {idle(200, 900)}}, Reuse::kFork, 0, 200},
      {"a common beginning, too short",
       {1000, 0, roomy, 9, {idle(63, 900)}},
       Reuse::kCompute,
       -1,
       0},
      {"no room for both", {1000, 0, 1899, 9, {idle(200, 900)}}, Reuse::kTakeOver, 0, 200},
      {"just room for both", {1000, 0, 1900, 9, {idle(200, 900)}}, Reuse::kFork, 0, 200},
      {"no slot for both", {1000, 0, roomy, 1, {idle(200, 900)}}, Reuse::kTakeOver, 0, 200},
      {"beside an active one", {1000, 0, 1000, 1, {active(200, 900, 900)}}, Reuse::kFork, 0, 200},
      {"a short one is never forked",
       {50, 0, roomy, 9, {active(49, 60, 60)}},
       Reuse::kCompute,
       -1,
       0},
      {"the longest wins",
       {1000, 0, roomy, 9, {idle(300, 300), idle(400, 900), idle(350, 350)}},
       Reuse::kFork,
       1,
       400},
      {"taking over beats forking",
       {1000, 0, roomy, 9, {active(300, 900, 900), idle(300, 300)}},
       Reuse::kTakeOver,
       1,
       300},
      {"the same prompt in prefill",
       {1000, 0, roomy, 9, {active(1000, 10, 1000)}},
       Reuse::kWait,
       0,
       999},
      {"in restore, saved for both",
       {1000, 950, roomy, 9, {active(1000, 0, 1000)}},
       Reuse::kWait,
       0,
       999},
      {"the common part is done",
       {1000, 0, roomy, 9, {active(300, 300, 5000)}},
       Reuse::kFork,
       0,
       300},
      {"nearly done", {1000, 0, roomy, 9, {active(300, 240, 5000)}}, Reuse::kFork, 0, 240},
      {"not worth waiting for",
       {1000, 900, roomy, 9, {active(300, 0, 300)}},
       Reuse::kRestore,
       -1,
       900},
      {"fork only: beside it", {1000, 0, roomy, 9, {fork_only(300, 300)}}, Reuse::kFork, 0, 300},
      {"fork only: no room for both",
       {1000, 0, 1200, 9, {fork_only(300, 300)}},
       Reuse::kCompute,
       -1,
       0},
      {"fork only: the last slot",
       {1000, 0, roomy, 1, {fork_only(300, 300)}},
       Reuse::kCompute,
       -1,
       0},
  };
  for (const ReuseCase& c : cases) {
    const ReuseChoice choice = choose_reuse(c.snapshot, {});
    EXPECT_EQ(choice.action, c.action) << c.what;
    EXPECT_EQ(choice.candidate, c.candidate) << c.what;
    EXPECT_EQ(choice.rows, c.rows) << c.what;
  }
}

TEST(ChooseReuse, NeverOffersWhatIsNotThere) {
  Random random(3);
  for (int i = 0; i < 20'000; ++i) {
    ReuseLimits limits{random.integer(1, 20), random.integer(0, 20)};
    ReuseSnapshot snapshot;
    snapshot.tokens = random.integer(1, 60);
    snapshot.saved = random.integer(0, snapshot.tokens);
    snapshot.room = snapshot.tokens + random.integer(0, 60);
    snapshot.slots = random.integer(1, 3);
    const int64_t n = random.integer(0, 5);
    for (int64_t k = 0; k < n; ++k) {
      const int64_t held = random.integer(0, 60);
      const bool is_idle = random.coin() && held > 0;
      const int64_t coming = is_idle ? held : held + random.integer(0, 40);
      snapshot.candidates.push_back(
          {random.integer(0, std::min(coming, snapshot.tokens)), held, coming, is_idle});
    }
    const ReuseChoice choice = choose_reuse(snapshot, limits);
    ASSERT_LT(choice.rows, snapshot.tokens);
    if (choice.action == Reuse::kCompute) {
      ASSERT_EQ(choice.rows, 0);
    } else if (choice.action == Reuse::kRestore) {
      ASSERT_GE(choice.rows, 1);
      ASSERT_LE(choice.rows, snapshot.saved);
    } else {
      const ReuseCandidate& c = snapshot.candidates.at(static_cast<size_t>(choice.candidate));
      ASSERT_GE(choice.rows, 1);
      ASSERT_LE(choice.rows, c.shared);
      ASSERT_LE(choice.rows, choice.action == Reuse::kWait ? c.coming : c.held);
      ASSERT_TRUE(choice.action != Reuse::kTakeOver || c.idle);
      // Otherwise it would wait for ever.
      ASSERT_TRUE(choice.action != Reuse::kWait || c.coming > c.held);
      if (choice.action == Reuse::kFork && c.idle) {
        ASSERT_LE(snapshot.tokens + c.held, snapshot.room);
        ASSERT_GE(snapshot.slots, 2);
      }
    }
  }
}

TEST(Order, LevelsRiseWithWaiting) {
  EXPECT_EQ(level(2, 0, 30), 2);
  EXPECT_EQ(level(2, 29.9, 30), 2);
  EXPECT_EQ(level(2, 30, 30), 3);
  EXPECT_EQ(level(-1, 300, 30), 9);
  EXPECT_EQ(level(2, 1000, 0), 2);
}

TEST(Order, PreemptedThenLevelThenArrival) {
  EXPECT_TRUE(admitted_before({true, 0, 9}, {false, 5, 1}));
  EXPECT_TRUE(admitted_before({false, 5, 9}, {false, 4, 1}));
  EXPECT_TRUE(admitted_before({false, 5, 1}, {false, 5, 2}));
  EXPECT_FALSE(admitted_before({false, 5, 1}, {false, 5, 1}));
  Random random(3);
  const auto key = [&] {
    return QueueKey{random.coin(), random.integer(-3, 3),
                    static_cast<uint64_t>(random.integer(1, 5)), random.coin(0.3)};
  };
  for (int i = 0; i < 500; ++i) {
    const QueueKey a = key();
    const QueueKey b = key();
    ASSERT_EQ(queue_ticket(a) < queue_ticket(b), admitted_before(a, b));
  }
}

TEST(Victims, TheLowestLevelAndThereTheYoungest) {
  EXPECT_EQ(choose_victim({}), -1);
  const std::vector<ActiveRequest> active = {{1, 1}, {0, 2}, {0, 5}, {0, 4}, {1, 6}};
  EXPECT_EQ(choose_victim(active), 2);
  const std::vector<ActiveRequest> mixed = {{0, 2}, {5, 3, true}, {4, 4, true}, {0, 5}};
  EXPECT_EQ(choose_victim(mixed), 2);  // whatever their levels, those in the background first
}

}  // namespace
}  // namespace hcache::policy
