// Steps and slices: what the Executor computes in one iteration, and what becomes of the tokens.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "base/log.h"
#include "core.h"

namespace hcache::scheduler {

namespace {

// Steps in a row in which a request may be told kUnavailable.
constexpr int kStepTries = 3;
// A restore that has the device to itself is told of in steps of this.
constexpr double kShownFraction = 0.02;

}  // namespace

// ---- Steps

void Core::step() {
  step_s_ = 0;
  stepped_ = false;
  decoding_ = false;
  if (options_.restore.exclusive && restores_in_flight() > 0) return finish_steps();
  const auto n = static_cast<size_t>(std::count_if(active_.begin(), active_.end(),
                                                   [](const auto& task) { return task->steps(); }));
  const auto most =
      static_cast<size_t>(std::max<int32_t>(executor_.steps_in_flight(static_cast<int64_t>(n)), 1));
  if (most == 1 && !in_flight_.empty()) return finish_steps();
  while (in_flight_.size() < most) {
    cut_full();
    std::vector<StepRows> parts = plan_with_room((n + most - 1) / most);
    if (parts.empty()) break;
    stepped_ = progressed_ = true;
    if (most == 1) {
      note_decoding(parts);
      return run(parts);
    }
    if (!begin_step(std::move(parts))) break;
  }
  if (!in_flight_.empty()) finish_step();
}

bool Core::is_full(const Task& task) const {
  return task.steps() && task.stepping == 0 && task.computed < task.length() &&
         task.computed == policy::next_cut(task.held, task.limits);
}

void Core::cut_full() {
  const auto full = [&] {
    return std::find_if(active_.begin(), active_.end(),
                        [&](const auto& task) { return !task->ended() && is_full(*task); });
  };
  // Steps in flight may be in others' rows, and what ends with them needs no cut.
  if (full() != active_.end()) finish_steps();
  for (auto at = full(); at != active_.end(); at = full()) {
    Task& task = **at;
    const auto chain = std::span(task.chain).first(static_cast<size_t>(task.computed));
    const policy::HeldRows held =
        policy::cut(task.held, chain, task.limits, task.request.next_message);
    if (const Status status = executor_.cut(task.seq, chain, held); !status.ok()) {
      end(task, status, "", /*keep_state=*/false);
      continue;
    }
    task.held = held;
    task.outcome.dropped_tokens = held.dropped();
    progressed_ = true;
  }
}

policy::BatchSnapshot Core::snapshot_batch(size_t most_requests) {
  policy::BatchSnapshot batch;
  batch.free_cells = executor_.free_cells();
  ready_.clear();
  const auto decoding = std::count_if(active_.begin(), active_.end(), [](const auto& task) {
    return task->phase == Phase::kDecoding;
  });
  for (const bool background : {false, true}) {
    for (const auto& task : active_) {
      if (!task->steps() || task->request.background != background) continue;
      if (task->phase == Phase::kDecoding) batch.reserve_cells += headroom(*task);
      if (task->stepping == 0 && ready_.size() < most_requests) ready_.push_back(task.get());
    }
  }
  draft(decoding, batch.free_cells);
  for (const Task* task : ready_) {
    const auto drafted = static_cast<int64_t>(task->draft.size());
    batch.ready.push_back(
        {task->end_of_run() - task->computed + drafted, task->phase == Phase::kDecoding});
  }
  return batch;
}

std::vector<Core::StepRows> Core::plan_with_room(size_t most_requests) {
  const auto parts_of = [&](const policy::StepPlan& plan) {
    std::vector<StepRows> parts;
    for (const policy::StepPiece& piece : plan.pieces) {
      Task* task = ready_[static_cast<size_t>(piece.index)];
      parts.push_back({task, task->rows_at_once(piece.rows)});
    }
    return parts;
  };
  for (;;) {
    const policy::BatchSnapshot batch = snapshot_batch(most_requests);
    const policy::StepPlan plan = policy::plan_step(batch, options_.batch);
    if (plan.wanted_cells <= batch.free_cells) return parts_of(plan);
    if (residents_.free_up(plan.wanted_cells, EvictionReason::kGrowth)) continue;
    // What fits goes on; idle sequences that are being flushed will make room soon.
    if (plan.stalled == 0 || !residents_.empty()) return parts_of(plan);
    // So may requests that end with a step in flight; none of those in one can be preempted.
    if (!in_flight_.empty()) return {};
    if (preempt_one()) continue;
    end(*active_.front(),
        resource_exhausted(
            fmt::format("no cell is free for a lone sequence of {}", active_.front()->computed)),
        "");
    return {};
  }
}

void Core::note_decoding(std::span<const StepRows> parts) {
  for (const StepRows& part : parts) {
    decoding_ = decoding_ || part.task->phase == Phase::kDecoding;
  }
}

int32_t Core::most_drafted(const Task& task, int64_t decoding, int64_t free_cells) const {
  // Of the cells most stay for what comes for sure.
  constexpr int64_t kShareOfCells = 4;
  if (task.phase != Phase::kDecoding || task.length() - task.computed != 1) return 0;
  const int64_t until_cut = policy::next_cut(task.held, task.limits) - task.length();
  return static_cast<int32_t>(
      std::min<int64_t>({options_.draft.most, task.request.max_draft, task.remaining_new() - 1,
                         until_cut, free_cells / (kShareOfCells * decoding) - 1,
                         int64_t{options_.batch.max_step_tokens} / decoding - 1}));
}

policy::DraftLength Core::model_length(const Task& task, int64_t decoding,
                                       const policy::DraftLimits& limits) const {
  // As sure as a copy behind so many tokens, before anything is known.
  constexpr int32_t kTrust = 4;
  if (!drafter_->ready(task.id)) return {};
  policy::DraftCosts costs = draft_costs(decoding);
  costs.token_s = drafter_->step_s(decoding) / static_cast<double>(decoding);
  return policy::draft_length(costs, task.modelled.probability(kTrust), limits);
}

policy::DraftCosts Core::draft_costs(int64_t decoding) const {
  return {.step_s = [this](int64_t rows) { return executor_.step_s(rows); },
          .token_s = 0,
          .others = decoding - 1};
}

void Core::draft(int64_t decoding, int64_t free_cells) {
  std::vector<Drafter::Wanted> wanted;
  std::vector<Task*> modelled;
  for (Task* task : ready_) {
    const int32_t most = std::max(most_drafted(*task, decoding, free_cells), 0);
    if (std::exchange(task->drafted_at, task->length()) == task->length()) {
      // The step is being planned once more.
      task->draft.resize(std::min(task->draft.size(), static_cast<size_t>(most)));
      continue;
    }
    task->draft.clear();
    if (most < 1) continue;
    policy::DraftLimits limits = options_.draft;
    limits.most = most;
    policy::Draft copy = policy::look_up(task->chain, limits);
    // What was copied of a picture is no guess.
    copy.tokens.erase(std::find_if(copy.tokens.begin(), copy.tokens.end(),
                                   [](int32_t token) { return token < 0; }),
                      copy.tokens.end());
    const policy::DraftLength length =
        copy.tokens.empty() ? policy::DraftLength()
                            : policy::draft_length(draft_costs(decoding),
                                                   task->copied.probability(copy.matched), limits);
    // The drafting model sees no pictures.
    const bool can_model = drafter_ != nullptr && task->request.media == nullptr;
    const policy::DraftLength model =
        can_model ? model_length(*task, decoding, limits) : policy::DraftLength();
    task->drafted_by_model = model.rate > length.rate;
    if (can_model && (task->drafted_by_model || !drafter_->ready(task->id))) {
      modelled.push_back(task);
      wanted.push_back({.request = task->id,
                        .salt = task->request.salt,
                        .save = task->request.save,
                        .chain = task->chain,
                        .most = task->drafted_by_model ? model.tokens : 0});
    }
    if (task->drafted_by_model) continue;
    copy.tokens.resize(static_cast<size_t>(length.tokens));
    task->draft = std::move(copy.tokens);
  }
  if (wanted.empty()) return;
  std::vector<std::vector<int32_t>> drafts = drafter_->draft(wanted);
  for (size_t i = 0; i < modelled.size(); ++i) {
    if (modelled[i]->drafted_by_model) modelled[i]->draft = std::move(drafts[i]);
  }
}

std::vector<StepItem> Core::items_of(std::span<const StepRows> parts) {
  std::vector<StepItem> items;
  for (const StepRows& part : parts) {
    Task& task = *part.task;
    StepItem item;
    item.seq = task.seq;
    const auto chain =
        std::span<const int32_t>(task.chain).subspan(static_cast<size_t>(task.computed));
    const auto rows = static_cast<size_t>(part.rows);
    if (rows > chain.size()) {
      task.drafted_run.assign(chain.begin(), chain.end());
      task.drafted_run.insert(
          task.drafted_run.end(), task.draft.begin(),
          task.draft.begin() + static_cast<std::ptrdiff_t>(rows - chain.size()));
    }
    item.tokens =
        rows > chain.size() ? std::span<const int32_t>(task.drafted_run) : chain.first(rows);
    item.logits = part.logits();
    item.hidden = task.request.tells_hidden;
    item.media = task.request.media.get();
    items.push_back(item);
  }
  return items;
}

void Core::run(std::span<const StepRows> parts) { settle(parts, executor_.step(items_of(parts))); }

bool Core::begin_step(std::vector<StepRows> parts) {
  if (const Status begun = executor_.begin_step(items_of(parts)); !begun.ok()) {
    settle(parts, begun);
    return false;
  }
  for (const StepRows& part : parts) part.task->stepping = part.rows;
  in_flight_.push_back(std::move(parts));
  return true;
}

void Core::finish_step() {
  const std::vector<StepRows> parts = std::move(in_flight_.front());
  in_flight_.pop_front();
  const Result<StepOutput> output = executor_.finish_step();
  for (const StepRows& part : parts) part.task->stepping = 0;
  stepped_ = progressed_ = true;
  note_decoding(parts);
  settle(parts, output);
}

void Core::finish_steps() {
  while (!in_flight_.empty()) finish_step();
}

void Core::settle(std::span<const StepRows> parts, const Result<StepOutput>& output) {
  if (!output.ok()) {
    ++totals_.failed_steps;
    finish_steps();
    if (parts.size() == 1) {
      step_failed(*parts[0].task, output.status());
      return;
    }
    // Alone, each shows whether it was the cause.
    for (size_t i = 0; i < parts.size(); ++i) run(parts.subspan(i, 1));
    return;
  }
  step_s_ += output->seconds;
  if (decoding_) load_timer_.stepped(output->seconds);
  size_t next_logits = 0;
  for (const StepRows& part : parts) {
    Task& task = *part.task;
    if (task.phase == Phase::kPrefill) task.outcome.prefill_s += output->seconds;
    const auto n_logits = static_cast<size_t>(logits_count(part.logits(), part.rows));
    deliver(task, part.rows, std::span(output->logits).subspan(next_logits, n_logits));
    next_logits += n_logits;
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

Status Core::drop_ahead(Task& task) {
  if (std::exchange(task.ahead, 0) == 0) return {};
  return executor_.trim(task.seq, task.held.rows(task.computed));
}

// Each row's logits are of a chain that is the request's as long as what was guessed came true.
void Core::deliver_draft(Task& task, std::span<const std::span<const float>> logits) {
  const std::vector<int32_t> run = std::move(task.drafted_run);
  const auto drafted = static_cast<int64_t>(logits.size()) - 1;
  task.drafted_run.clear();
  task.step_failures = 0;
  task.ahead = drafted + 1;
  task.outcome.drafted_tokens += drafted;
  ++totals_.drafts;
  totals_.drafted_tokens += static_cast<uint64_t>(drafted);
  for (size_t row = 0; row < logits.size(); ++row) {
    if (row > 0) {
      if (task.chain.back() != run[row]) break;
      ++task.outcome.accepted_tokens;
      ++totals_.accepted_tokens;
    }
    ++task.computed;
    --task.ahead;
    ++totals_.decode_rows;
    chain_computed(task, logits[row]);
    if (task.ended()) return;
  }
  policy::Acceptance& acceptance = task.drafted_by_model ? task.modelled : task.copied;
  acceptance.note(static_cast<int32_t>(drafted - task.ahead), task.ahead == 0);
  if (const Status dropped = drop_ahead(task); !dropped.ok()) {
    log::warn("request {}: its sequence is given up: {}", task.id, dropped.to_string());
    preempt(task, /*keep_state=*/false);
  }
}

void Core::deliver(Task& task, int32_t rows, std::span<const std::span<const float>> logits) {
  if (task.computed + rows > task.length()) return deliver_draft(task, logits);
  if (task.tells_logits() && !logits.empty()) {
    for (int64_t row = task.told - task.computed; row < rows; ++row) {
      task.request.on_prompt_logits(task.told++, logits[static_cast<size_t>(row)]);
    }
  }
  task.computed += rows;
  task.step_failures = 0;
  if (task.phase == Phase::kDecoding) {
    totals_.decode_rows += static_cast<uint64_t>(rows);
  } else {
    totals_.prefill_rows += static_cast<uint64_t>(rows);
    enter(task, Phase::kPrefill, task.computed_share());
  }
  if (task.computed == task.length()) {
    chain_computed(task, logits.empty() ? std::span<const float>() : logits.back());
  }
}

void Core::chain_computed(Task& task, std::span<const float> logits) {
  Outcome& outcome = task.outcome;
  if (outcome.generated_tokens == 0) {
    outcome.new_tokens = outcome.prompt_tokens - outcome.dropped_before - outcome.resident_tokens -
                         outcome.hidden_tokens - outcome.kv_tokens - outcome.recomputed_tokens;
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
  for (const auto& task : active_) {
    candidates.push_back({level_of(*task, now_ns), task->id, task->request.background});
  }
  preempt(*active_[static_cast<size_t>(policy::choose_victim(candidates))]);
  return true;
}

// Its sequence becomes an idle one like any other: it is evicted once its state is durable, or the
// request goes on from it if room comes sooner.
void Core::preempt(Task& task, bool keep_state) {
  complete(task);
  leave_sequence(task, keep_state);
  task.preempted = true;
  task.compute_only = false;
  task.saved = nullptr;
  task.saved_ns = -1;
  task.outcome.preempted_at_s.push_back(since_submit_s(task));
  ++totals_.preemptions;
  progressed_ = true;
  inbox_.requeued(task);
  enter(task, Phase::kQueued);
  const auto at = std::find_if(active_.begin(), active_.end(),
                               [&](const auto& other) { return other.get() == &task; });
  std::unique_ptr<Task> owned = std::move(*at);
  active_.erase(at);
  enqueue(std::move(owned));
}

// ---- Restores

void Core::restore() {
  const bool restoring = restores_in_flight() > 0;
  note_company();
  stalled_s_ = 0;
  double used_s = 0;
  if (Task* task = lone_restore(); task != nullptr) {
    constexpr double kEndless = std::numeric_limits<double>::infinity();
    used_s = advance(*task, {.budget_s = kEndless,
                             .whole_budget_s = kEndless,
                             .proceed = [this, task, shown = 0.0](double fraction) mutable {
                               if (fraction >= shown + kShownFraction) {
                                 enter(*task, Phase::kRestoring, fraction);
                                 shown = fraction;
                               }
                               return !inbox_.signalled();
                             }});
    restore_debt_s_ = 0;
  } else {
    const double budget_s =
        policy::restore_budget_s(decoding_, step_s_, restore_debt_s_, options_.restore);
    used_s = restore_in_turns(budget_s);
    restore_debt_s_ = policy::restore_debt_s(decoding_, budget_s, used_s);
  }
  if (used_s > 0) progressed_ = true;
  count_time(restoring, used_s);
}

// The one that has had least comes next, in the background after all others; one that waits for its
// bytes lets the others go on.
double Core::restore_in_turns(double budget_s) {
  std::vector<Task*> able;
  for (const auto& task : active_) {
    if (task->in_restore()) able.push_back(task.get());
  }
  // Beside a step what there is is too little to be cut: they take turns from step to step.
  const double turn_s =
      decoding_ ? budget_s : budget_s / static_cast<double>(std::max<size_t>(able.size(), 1));
  const double whole_s = policy::restore_budget_s(decoding_, step_s_, 0, options_.restore);
  double used_s = 0;
  while (used_s < budget_s && !able.empty()) {
    const auto next = std::min_element(able.begin(), able.end(), [](const Task* a, const Task* b) {
      return std::tuple(a->request.background, a->restore_used_s, a->restore_number) <
             std::tuple(b->request.background, b->restore_used_s, b->restore_number);
    });
    Task& task = **next;
    const double spent_s = advance(task, {.budget_s = std::min(turn_s, budget_s - used_s),
                                          .whole_budget_s = whole_s,
                                          .proceed = {}});
    task.restore_used_s += spent_s;
    used_s += spent_s;
    if (!task.in_restore() || task.waits_for_io) {
      able.erase(next);
    } else if (decoding_) {
      break;  // its turn is over
    }
  }
  return used_s;
}

Task* Core::lone_restore() const {
  const bool lone = active_.size() == 1 && queue_.empty() && !stepped_;
  return lone && active_[0]->in_restore() ? active_[0].get() : nullptr;
}

void Core::note_company() {
  if (!stepped_ && restores_in_flight() < 2) return;
  for (const auto& task : active_) {
    if (task->in_restore()) task->restore_alone = false;
  }
}

double Core::advance(Task& task, const RestoreTurn& turn) {
  Result<RestoreStatus> status = executor_.advance_restore(task.seq, turn);
  if (!status.ok()) {
    restore_failed(task, status.status());
    return 0;
  }
  const double seconds = status->seconds;
  stalled_s_ += status->stalled_s;
  task.waits_for_io = status->phase == RestoreStatus::Phase::kWaitingForIo;
  task.outcome.restore_busy_s += seconds;
  if (status->phase == RestoreStatus::Phase::kDone) {
    restored(task, *status);
    return seconds;
  }
  task.reserved = status->reserved;
  if (status->phase == RestoreStatus::Phase::kWorking || seconds > 0) {
    enter(task, Phase::kRestoring, status->fraction);
  }
  return seconds;
}

void Core::restored(Task& task, RestoreStatus& status) {
  policy::RestoreRecord& record = status.record;
  Outcome& outcome = task.outcome;
  record.alone = task.restore_alone;
  load_timer_.loaded(status.tokens, seconds_between(task.restore_begin_ns, executor_.now_ns()));
  outcome.restore_s += record.restore_s;
  outcome.bytes += record.read;
  if (outcome.generated_tokens == 0) {
    outcome.hidden_tokens = record.hidden_tokens;
    outcome.kv_tokens = record.kv_tokens;
    outcome.recomputed_tokens = record.recomputed_tokens;
  }
  outcome.restores.push_back(std::move(record));
  const bool whole = status.tokens == task.length() && !status.logits.empty();
  task.computed = std::min(status.tokens, whole ? task.length() : task.length() - 1);
  task.held = status.held;
  task.reserved = 0;
  if (outcome.generated_tokens == 0) outcome.dropped_before = task.held.dropped();
  outcome.dropped_tokens = task.held.dropped();
  progressed_ = true;
  enter(task, Phase::kPrefill, task.computed_share());
  if (whole) chain_computed(task, status.logits);
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
    const auto note = [&](double* most, double seconds) {
      *most = std::max(*most, 1 + seconds / step_s_);
    };
    note(&totals_.restore_stretch_max, slices_s);
    note(&totals_.restore_stretch_own_max, slices_s - stalled_s_);
  } else {
    ++totals_.steps;
    totals_.step_s += step_s_;
  }
}

}  // namespace hcache::scheduler
