#include "policy/batching.h"

#include <algorithm>
#include <cmath>
#include <tuple>

namespace hcache::policy {

namespace {

// More steps than one must take less than this part of its time: costs are estimates.
constexpr double kWorthASplit = 0.95;

// What is left of a step while it is filled.
struct StepRoom {
  int64_t tokens;
  int64_t sequences;
  int64_t cells;
};

void add_piece(const ReadyRequest& request, int32_t index, StepRoom& room, StepPlan& plan) {
  const int64_t wanted = std::min(request.pending, room.tokens);
  if (wanted < 1 || room.sequences < 1) return;
  plan.wanted_cells += wanted;
  room.tokens -= wanted;
  --room.sequences;
  const int64_t rows = std::min(wanted, room.cells);
  if (rows < 1) {
    if (request.decoding) ++plan.stalled;
    return;
  }
  room.cells -= rows;
  plan.pieces.push_back({index, static_cast<int32_t>(rows)});
  plan.rows += static_cast<int32_t>(rows);
  if (request.decoding) ++plan.decode_rows;
}

// What a candidate offers now, and how it would be used.
struct Offer {
  int32_t candidate = -1;
  int64_t rows = 0;
  Reuse action = Reuse::kCompute;
};

Offer offer_of(const ReuseSnapshot& snapshot, int32_t index, const ReuseLimits& limits) {
  const ReuseCandidate& candidate = snapshot.candidates[static_cast<size_t>(index)];
  Offer offer{index, std::min({candidate.shared, candidate.held, snapshot.tokens - 1})};
  if (offer.rows < 1) return {};
  const int64_t cut = candidate.held - offer.rows;
  if (candidate.idle && 2 * cut <= offer.rows) {
    offer.action = Reuse::kTakeOver;
  } else if (offer.rows >= limits.min_fork_tokens) {
    const int64_t cells = snapshot.tokens - snapshot.dropped + candidate.held - candidate.dropped;
    const bool both_fit = snapshot.slots >= 2 && cells <= snapshot.room;
    if (candidate.fork_only && !both_fit) return {};
    offer.action = candidate.idle && !both_fit ? Reuse::kTakeOver : Reuse::kFork;
  } else {
    return {};
  }
  return offer;
}

}  // namespace

StepPlan plan_step(const BatchSnapshot& snapshot, const BatchLimits& limits) {
  StepPlan plan;
  plan.wanted_cells = snapshot.reserve_cells;
  StepRoom room{limits.max_step_tokens, limits.max_sequences, snapshot.free_cells};
  for (bool decoding : {true, false}) {
    if (!decoding) room.cells -= snapshot.reserve_cells;
    for (size_t i = 0; i < snapshot.ready.size(); ++i) {
      if (snapshot.ready[i].decoding != decoding) continue;
      add_piece(snapshot.ready[i], static_cast<int32_t>(i), room, plan);
    }
  }
  if (plan.pieces.empty() && !snapshot.ready.empty()) plan.stalled = std::max(plan.stalled, 1);
  return plan;
}

int32_t steps_in_flight(std::span<const CostCurve> stage_s, int64_t sequences) {
  const auto round_s = [&](int64_t steps) {
    const int64_t rows = (sequences + steps - 1) / steps;
    double sum_s = 0;
    double slowest_s = 0;
    for (const CostCurve& stage : stage_s) {
      sum_s += stage.at(rows);
      slowest_s = std::max(slowest_s, stage.at(rows));
    }
    return std::max(static_cast<double>(steps) * slowest_s, sum_s);
  };
  const auto most = std::min(static_cast<int64_t>(stage_s.size()), sequences);
  int64_t best = 1;
  double best_s = kWorthASplit * round_s(1);
  for (int64_t steps = 2; steps <= most; ++steps) {
    if (const double s = round_s(steps); s < best_s) std::tie(best, best_s) = std::tuple(steps, s);
  }
  return static_cast<int32_t>(best);
}

double restore_compute_share(bool decoding, const RestoreLimits& limits) {
  return decoding && !limits.exclusive ? limits.share / (1 + limits.share) : 1;
}

double restore_budget_s(bool decoding, double step_s, double debt_s, const RestoreLimits& limits) {
  return decoding ? limits.share * step_s - debt_s : limits.idle_slice_s;
}

double restore_debt_s(bool decoding, double budget_s, double used_s) {
  return decoding ? std::max(0.0, used_s - budget_s) : 0;
}

ReuseChoice choose_reuse(const ReuseSnapshot& snapshot, const ReuseLimits& limits) {
  Offer best;
  int32_t awaited = -1;
  int64_t soon = 0;
  for (size_t i = 0; i < snapshot.candidates.size(); ++i) {
    const ReuseCandidate& candidate = snapshot.candidates[i];
    const Offer offer = offer_of(snapshot, static_cast<int32_t>(i), limits);
    const bool free_of_charge = offer.action == Reuse::kTakeOver && best.action != Reuse::kTakeOver;
    if (offer.rows > best.rows || (offer.rows == best.rows && free_of_charge)) best = offer;
    const int64_t later = std::min({candidate.shared, candidate.coming, snapshot.tokens - 1});
    if (later > soon && !candidate.fork_only) {
      soon = later;
      awaited = static_cast<int32_t>(i);
    }
  }

  const int64_t saved = std::min(snapshot.saved, snapshot.tokens - 1);
  if (awaited >= 0 && soon >= best.rows + limits.min_fork_tokens &&
      soon + limits.cheap_tokens >= saved) {
    return {Reuse::kWait, awaited, soon};
  }
  if (saved > best.rows + limits.cheap_tokens) return {Reuse::kRestore, -1, saved};
  return {best.action, best.candidate, best.rows};
}

int64_t level(int32_t priority, double waited_s, double aging_s) {
  if (aging_s <= 0 || waited_s <= 0) return priority;
  return priority + static_cast<int64_t>(std::floor(waited_s / aging_s));
}

bool admitted_before(const QueueKey& a, const QueueKey& b) {
  return std::tuple(a.background, !a.preempted, -a.level, a.arrival) <
         std::tuple(b.background, !b.preempted, -b.level, b.arrival);
}

uint64_t queue_ticket(const QueueKey& key) {
  constexpr int64_t kLevels = 1 << 14;
  const auto behind = static_cast<uint64_t>(kLevels - std::clamp(key.level, -kLevels, kLevels));
  const uint64_t arrival = key.arrival & ((uint64_t{1} << 46U) - 1);
  return (key.background ? uint64_t{1} << 63U : 0) | (key.preempted ? 0 : uint64_t{1} << 62U) |
         (behind << 46U) | arrival;
}

int32_t choose_victim(std::span<const ActiveRequest> active) {
  const auto key = [](const ActiveRequest& r) {
    return std::tuple(!r.background, r.level, ~r.arrival);
  };
  int32_t victim = -1;
  for (size_t i = 0; i < active.size(); ++i) {
    if (victim < 0 || key(active[i]) < key(active[static_cast<size_t>(victim)])) {
      victim = static_cast<int32_t>(i);
    }
  }
  return victim;
}

}  // namespace hcache::policy
