// Steps and slices: what the Executor computes in one iteration, and what becomes of the tokens.
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"
#include "core.h"

namespace hcache::scheduler {

namespace {

// Steps in a row in which a request may be told kUnavailable.
constexpr int kStepTries = 3;

double fraction_of(int64_t part, int64_t whole) {
  return static_cast<double>(part) / static_cast<double>(std::max<int64_t>(whole, 1));
}

}  // namespace

// ---- Steps

void Core::step() {
  step_s_ = 0;
  policy::StepPlan plan;
  if (!options_.restore.exclusive || oldest_restore() == nullptr) plan = plan_with_room();
  stepped_ = !plan.pieces.empty();
  decoding_ = plan.decode_rows > 0;
  if (!stepped_) return;
  progressed_ = true;
  run(plan.pieces);
}

policy::BatchSnapshot Core::snapshot_batch() {
  policy::BatchSnapshot batch;
  batch.free_cells = executor_.free_cells();
  ready_.clear();
  for (const auto& task : active_) {
    if (!task->ready()) continue;
    ready_.push_back(task.get());
    const bool decoding = task->phase == Phase::kDecoding;
    batch.ready.push_back({task->length() - task->computed, decoding});
    if (decoding) batch.reserve_cells += headroom(*task);
  }
  return batch;
}

policy::StepPlan Core::plan_with_room() {
  for (;;) {
    const policy::BatchSnapshot batch = snapshot_batch();
    policy::StepPlan plan = policy::plan_step(batch, options_.batch);
    if (plan.wanted_cells <= batch.free_cells) return plan;
    if (residents_.free_up(plan.wanted_cells, EvictionReason::kGrowth)) continue;
    // What fits goes on; idle sequences that are being flushed will make room soon.
    if (plan.stalled == 0 || !residents_.empty()) return plan;
    if (preempt_one()) continue;
    end(*active_.front(),
        resource_exhausted(
            fmt::format("no cell is free for a lone sequence of {}", active_.front()->computed)),
        "");
    return {};
  }
}

void Core::run(std::span<const policy::StepPiece> pieces) {
  std::vector<StepItem> items;
  for (const policy::StepPiece& piece : pieces) {
    const Task& task = *ready_[static_cast<size_t>(piece.index)];
    StepItem item;
    item.seq = task.seq;
    item.tokens = std::span(task.chain)
                      .subspan(static_cast<size_t>(task.computed), static_cast<size_t>(piece.rows));
    item.wants_logits = task.computed + piece.rows == task.length() && task.max_new > 0;
    items.push_back(item);
  }
  const Result<StepOutput> output = executor_.step(items);
  if (!output.ok()) {
    ++totals_.failed_steps;
    if (pieces.size() == 1) {
      step_failed(*ready_[static_cast<size_t>(pieces[0].index)], output.status());
      return;
    }
    // Alone, each shows whether it was the cause.
    for (size_t i = 0; i < pieces.size(); ++i) run(pieces.subspan(i, 1));
    return;
  }
  step_s_ += output->seconds;
  if (decoding_) load_timer_.stepped(output->seconds);
  size_t next_logits = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    std::span<const float> logits;
    if (items[i].wants_logits) logits = output->logits[next_logits++];
    deliver(*ready_[static_cast<size_t>(pieces[i].index)], pieces[i].rows, logits);
  }
}

void Core::step_failed(Task& task, const Status& status) {
  log::warn("request {}: a step failed: {}", task.id, status.to_string());
  if (status.code() == Code::kUnavailable && ++task.step_failures < kStepTries) return;
  if (status.code() == Code::kResourceExhausted && make_way_for(task)) return;
  end(task, status, "", /*keep_state=*/false);
}

// The Executor found less room than it said. True if there will be more when the task tries again.
bool Core::make_way_for(Task& task) {
  const auto others = std::count_if(active_.begin(), active_.end(), [&](const auto& other) {
    return other.get() != &task && !other->ended();
  });
  if (others > 0) {
    preempt(task);
    return true;
  }
  if (residents_.empty()) return false;
  residents_.free_up(executor_.free_cells() + 1, EvictionReason::kGrowth);
  return true;
}

void Core::deliver(Task& task, int32_t rows, std::span<const float> logits) {
  task.computed += rows;
  task.step_failures = 0;
  if (task.phase == Phase::kDecoding) {
    totals_.decode_rows += static_cast<uint64_t>(rows);
  } else {
    totals_.prefill_rows += static_cast<uint64_t>(rows);
    enter(task, Phase::kPrefill, fraction_of(task.computed, task.length()));
  }
  if (task.computed < task.length()) return;
  Outcome& outcome = task.outcome;
  if (outcome.generated_tokens == 0) {
    outcome.new_tokens = outcome.prompt_tokens - outcome.resident_tokens - outcome.hidden_tokens -
                         outcome.kv_tokens - outcome.recomputed_tokens;
    const bool saving = executor_.durable_tokens(task.seq) != kNotSaving;
    outcome.saving_tokens = saving ? outcome.new_tokens : 0;
    if (task.request.on_first) task.request.on_first(outcome);
  }
  if (task.max_new == 0) {
    end(task, {}, "length");
  } else {
    sample(task, logits);
  }
}

void Core::sample(Task& task, std::span<const float> logits) {
  Result<NextToken> next = task.request.next(logits);
  if (!next.ok()) {
    end(task, next.status(), "");
    return;
  }
  Outcome& outcome = task.outcome;
  if (++outcome.generated_tokens == 1) outcome.ttft_s = since_submit_s(task);
  if (next->stop || task.remaining_new() == 0) {
    load_timer_.replied(task.request.key, outcome.generated_tokens);
    end(task, {}, next->stop ? std::move(next->finish_reason) : "length");
    return;
  }
  task.chain.push_back(next->token);
  if (task.phase != Phase::kDecoding) enter(task, Phase::kDecoding);
}

// ---- Preemption

bool Core::preempt_one() {
  if (active_.size() < 2) return false;
  const int64_t now_ns = executor_.now_ns();
  std::vector<policy::ActiveRequest> candidates;
  for (const auto& task : active_) candidates.push_back({level_of(*task, now_ns), task->id});
  preempt(*active_[static_cast<size_t>(policy::choose_victim(candidates))]);
  return true;
}

// Its sequence becomes an idle one like any other: it is evicted once its state is durable, or the
// request goes on from it if room comes sooner.
void Core::preempt(Task& task) {
  complete(task);
  leave_sequence(task, /*keep_state=*/true);
  task.preempted = true;
  task.compute_only = false;
  task.saved = -1;
  task.outcome.preempted_at_s.push_back(since_submit_s(task));
  ++totals_.preemptions;
  progressed_ = true;
  inbox_.requeued(task);
  enter(task, Phase::kQueued);
  const auto place = std::find_if(active_.begin(), active_.end(),
                                  [&](const auto& other) { return other.get() == &task; });
  std::unique_ptr<Task> owned = std::move(*place);
  active_.erase(place);
  enqueue(std::move(owned));
}

// ---- Restores

void Core::restore() {
  const double budget_s =
      policy::restore_budget_s(decoding_, step_s_, restore_debt_s_, options_.restore);
  const bool restoring = oldest_restore() != nullptr;
  note_company();
  double used_s = 0;
  while (used_s < budget_s) {
    Task* task = oldest_restore();
    if (task == nullptr) break;
    used_s += advance(*task, budget_s - used_s);
    if (task->in_restore()) break;  // it waits for I/O, or the budget is spent
  }
  restore_debt_s_ = policy::restore_debt_s(decoding_, budget_s, used_s);
  if (used_s > 0) progressed_ = true;
  count_time(restoring, used_s);
}

void Core::note_company() {
  if (!stepped_ && restores_in_flight() < 2) return;
  for (const auto& task : active_) {
    if (task->in_restore()) task->restore_alone = false;
  }
}

Task* Core::oldest_restore() const {
  Task* oldest = nullptr;
  for (const auto& task : active_) {
    if (!task->in_restore()) continue;
    if (oldest == nullptr || task->restore_number < oldest->restore_number) oldest = task.get();
  }
  return oldest;
}

double Core::advance(Task& task, double budget_s) {
  const Result<RestoreStatus> status = executor_.advance_restore(task.seq, budget_s);
  if (!status.ok()) {
    restore_failed(task, status.status());
    return 0;
  }
  task.outcome.restore_busy_s += status->seconds;
  if (status->phase == RestoreStatus::Phase::kDone) {
    restored(task, *status);
    return status->seconds;
  }
  task.reserved = status->reserved;
  if (status->phase == RestoreStatus::Phase::kWorking || status->seconds > 0) {
    enter(task, Phase::kRestoring, status->fraction);
  }
  return status->seconds;
}

void Core::restored(Task& task, const RestoreStatus& status) {
  const RestoreReport& report = status.report;
  Outcome& outcome = task.outcome;
  const double seconds = seconds_between(task.restore_begin_ns, executor_.now_ns());
  outcome.restore_s += seconds;
  load_timer_.loaded(status.tokens, seconds);
  outcome.restores.push_back({.seconds = seconds,
                              .predicted_s = report.predicted_s,
                              .alone = task.restore_alone,
                              .hidden_tokens = report.hidden_tokens,
                              .kv_tokens = report.kv_tokens,
                              .recomputed_tokens = report.recomputed_tokens,
                              .hidden_pages = report.hidden_pages,
                              .kv_pages = report.kv_pages});
  outcome.bytes_dram += report.bytes_dram;
  outcome.bytes_disk += report.bytes_disk;
  outcome.bytes_remote += report.bytes_remote;
  outcome.overlap = report.overlap;
  outcome.schedule = report.schedule;
  outcome.timeline = report.timeline;
  if (outcome.generated_tokens == 0) {
    outcome.hidden_tokens = report.hidden_tokens;
    outcome.kv_tokens = report.kv_tokens;
    outcome.recomputed_tokens = report.recomputed_tokens;
  }
  task.computed = std::min(status.tokens, task.length() - 1);
  task.reserved = 0;
  progressed_ = true;
  enter(task, Phase::kPrefill, fraction_of(task.computed, task.length()));
}

void Core::restore_failed(Task& task, const Status& status) {
  log::warn("request {}: recomputed instead of restored: {}", task.id, status.to_string());
  task.computed = 0;
  task.reserved = 0;
  progressed_ = true;
  enter(task, Phase::kPrefill);
}

void Core::count_time(bool restoring, double slices_s) {
  if (!stepped_) {
    totals_.restore_alone_s += slices_s;
  } else if (restoring) {
    ++totals_.restore_steps;
    totals_.restore_step_s += step_s_ + slices_s;
    totals_.restore_slices_s += slices_s;
    if (!decoding_ || step_s_ <= 0) return;
    totals_.restore_stretch_max = std::max(totals_.restore_stretch_max, 1 + slices_s / step_s_);
  } else {
    ++totals_.steps;
    totals_.step_s += step_s_;
  }
}

}  // namespace hcache::scheduler
