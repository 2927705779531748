// Continuous batching as pure decisions: which rows a step computes (iteration-level batching with
// SplitFuse, HCache §5), how long restores may work beside it, which resident sequence a new
// request continues, and what is evicted when the arena is full.
//
// Everything here is a pure function of its arguments: no clock, no engine. The scheduler and the
// simulator apply the same ones. Units: rows (= tokens = KV cells), seconds.
// Threading: plain values, no shared state.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"
#include "policy/restore_plan.h"

namespace hcache::policy {

// ---- One step

struct BatchLimits {
  int32_t max_step_tokens = 512;  // rows of one step, decode and prefill together
  int32_t max_sequences = 64;     // sequences in one step; <= max_step_tokens
};

// A request that is ready for rows: it decodes (one row) or prefills.
struct ReadyRequest {
  int64_t pending = 0;  // rows that it wants before its next token; >= 1
  bool decoding = false;
};

struct BatchSnapshot {
  std::vector<ReadyRequest> ready;  // in order of arrival
  int64_t free_cells = 0;           // of the arena; every row takes one
  int64_t reserve_cells = 0;        // for later rows of those that decode: not for prefill
};

struct StepPiece {
  int32_t index = 0;  // in BatchSnapshot::ready
  int32_t rows = 0;   // >= 1
};

struct StepPlan {
  std::vector<StepPiece> pieces;  // decode rows first
  int32_t rows = 0;               // of all pieces
  int32_t decode_rows = 0;        // one per decoding sequence
  int64_t wanted_cells = 0;       // what it takes for nothing to be cut short, the reserve included
  // Decode rows left out for want of cells; 1 when nothing at all found room.
  int32_t stalled = 0;
};

// Decode rows first, then prefill chunks in order of arrival fill the budget; a chunk is as long as
// budget and cells allow. With at most max_sequences requests in `ready` and enough cells, every
// decoding one advances, and some prefill too.
[[nodiscard]] StepPlan plan_step(const BatchSnapshot& snapshot, const BatchLimits& limits);

// Where layers are on several devices that compute at the same time: in how many steps, in flight
// at once, so many decoding sequences get their next tokens soonest. stage_s: what the layers of
// each device take for so many rows. With m steps of n rows each device is busy m times in a round,
// and a step still goes through all of them, so a round takes max(m * slowest(n), sum(n)); weights
// are read m times, which is why one step of all rows may be better.
[[nodiscard]] int32_t steps_in_flight(std::span<const CostCurve> stage_s, int64_t sequences);

// ---- Restores beside steps

struct RestoreLimits {
  // While anything decodes, a step may take at most this fraction longer for the sake of restores.
  double share = 0.25;  // > 0
  // With nothing decoding: seconds between looks at new work.
  double idle_slice_s = 0.05;  // > 0
  // A phase of its own, as in HCache §5: while a restore is in flight nothing else is computed,
  // not even while it waits for its bytes. The first token comes earliest, the others stall.
  bool exclusive = false;
};

// Of the device's time, what the arithmetic of a restore gets that begins now: to plan with.
[[nodiscard]] double restore_compute_share(bool decoding, const RestoreLimits& limits);

// Seconds that restores may take in this iteration; not above 0: none. step_s is what the
// step of this iteration took, which held decode rows iff `decoding`. debt_s is what was overdrawn
// before.
[[nodiscard]] double restore_budget_s(bool decoding, double step_s, double debt_s,
                                      const RestoreLimits& limits);
// The debt after slices that took used_s. What a budget leaves over is lost, not saved up, so a
// restore that waited for I/O never makes up for it in one long pause. With nothing decoding no
// debt is made, and an old one is forgotten.
[[nodiscard]] double restore_debt_s(bool decoding, double budget_s, double used_s);

// ---- Reuse of resident sequences

struct ReuseLimits {
  // Fewer shared rows than this are neither worth a fork nor worth waiting for.
  int64_t min_fork_tokens = 64;
  // A restore must bring more rows than this beyond what is resident; up to it, computing is cheap.
  int64_t cheap_tokens = 64;
};

// A sequence in the arena with the request's salt.
struct ReuseCandidate {
  int64_t shared = 0;  // leading tokens in common with the request, those yet to come included
  int64_t held = 0;    // rows that it has now
  int64_t coming = 0;  // rows that it will have when its prefill or restore ends; >= held
  bool idle = false;   // may be taken over; an active one can only be forked
  // Idle, but only to be forked, beside which it stays: it is saved, and the request is not.
  bool fork_only = false;
  int64_t dropped = 0;  // of the rows that it has, that take no cells
};

struct ReuseSnapshot {
  int64_t tokens = 0;  // of the request; its last one is always computed
  int64_t saved = 0;   // longest saved prefix
  // Cells the request could have if every idle sequence gave way; >= tokens - dropped.
  int64_t room = 0;
  int64_t slots = 2;  // likewise sequences, its own included; >= 1
  std::vector<ReuseCandidate> candidates;
  int64_t dropped = 0;  // of tokens, that will take no cells
};

enum class Reuse : uint8_t {
  kCompute,   // nothing worth keeping: a new sequence, prefilled from the first token
  kRestore,   // a new sequence, restored from saved state
  kTakeOver,  // continue the candidate's sequence, cut to `rows`
  kFork,      // copy the candidate's first `rows` rows
  kWait,      // a sequence under way will soon hold the same tokens: fork it then
};

struct ReuseChoice {
  Reuse action = Reuse::kCompute;
  int32_t candidate = -1;  // of kTakeOver, kFork, kWait
  int64_t rows = 0;        // reused or restored
};

// The rule, in order:
//  1. The best candidate is the one that shares most rows; equal ones: the first that can be taken
//     over, else the first. An idle one is taken over when the request goes on where it ends, or
//     when what must be cut off is at most half of what is kept; otherwise it is forked if at least
//     min_fork_tokens are shared, so that the other conversation stays resident. Where the arena
//     can't hold both, it is taken over all the same.
//  2. If an active sequence will soon hold at least min_fork_tokens more of the request than that,
//     and not much less than is saved (cheap_tokens), wait for it.
//  3. If the saved prefix is longer than the best candidate by more than cheap_tokens, restore.
//  4. Reuse the best candidate; without one, compute.
[[nodiscard]] ReuseChoice choose_reuse(const ReuseSnapshot& snapshot, const ReuseLimits& limits);

// ---- Order and victims

// A request's level: its priority (higher is more urgent) raised by one for every aging_s seconds
// since its arrival, so that nothing starves. aging_s <= 0: never raised.
[[nodiscard]] int64_t level(int32_t priority, double waited_s, double aging_s);

struct QueueKey {
  bool preempted = false;  // was running before: goes on before anything new starts
  int64_t level = 0;
  uint64_t arrival = 0;     // a running number
  bool background = false;  // nobody waits for it
};
// True if `a` is admitted before `b`: those that are waited for, of each kind the preempted ones,
// then by level, then by arrival.
[[nodiscard]] bool admitted_before(const QueueKey& a, const QueueKey& b);
// The same order as a number above 0, smaller first, for those that look ahead. Levels beyond
// +-2^14 count as that; arrivals, from 1 on, modulo 2^46.
[[nodiscard]] uint64_t queue_ticket(const QueueKey& key);

struct ActiveRequest {
  int64_t level = 0;
  uint64_t arrival = 0;
  bool background = false;
};
// Which request to preempt: one in the background where there is one; of each kind the latest
// arrival of the lowest level. -1: there is none.
[[nodiscard]] int32_t choose_victim(std::span<const ActiveRequest> active);

}  // namespace hcache::policy
