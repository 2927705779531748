#include "core.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace hcache::scheduler {

Core::Core(Executor& executor, const SchedulerOptions& options, Drafter* drafter, Inbox& inbox)
    : executor_(executor),
      options_(options),
      drafter_(drafter),
      inbox_(inbox),
      residents_(executor, options.flush_wait_s, options.evict,
                 [this](const Resident& resident) { return demand_of(resident); }) {}

Core::~Core() {
  take_inbox();
  end_all(unavailable("the scheduler has ended"));
  residents_.release_all();
}

Activity Core::run_once() {
  progressed_ = false;
  take_inbox();
  if (!active_.empty() || !queue_.empty()) executor_.leave_chores();
  admit();
  step();
  restore();
  offload();
  sweep();
  const bool chore_waits = do_chore();
  publish();
  if (progressed_) return Activity::kWorked;
  const bool idle = active_.empty() && queue_.empty() && !chore_waits;
  return idle ? Activity::kIdle : Activity::kWaiting;
}

void Core::take_inbox() {
  Inbox::Delivery delivery = inbox_.take();
  for (auto& task : delivery.submitted) enqueue(std::move(task));
  // A request that ends leaves its sequence, which may be in none of them.
  if (!delivery.cancelled.empty()) finish_steps();
  for (RequestId id : delivery.cancelled) {
    for (TaskList* list : {&queue_, &active_}) {
      for (auto& task : *list) {
        if (task->id == id && !task->ended()) end(*task, cancelled("cancelled"), "");
      }
    }
  }
  if (!delivery.stop.ok()) end_all(delivery.stop);
  sweep();
  for (const ForgottenChain& chain : delivery.forgotten) forget(chain);
  for (const Inbox::Visit& visit : delivery.visits) this->visit(visit);
}

void Core::visit(const Inbox::Visit& visit) {
  const std::vector<Resident>& idle = residents_.all();
  const auto found =
      std::find_if(idle.begin(), idle.end(), [&](const Resident& r) { return r.seq == visit.seq; });
  if (found == idle.end()) {
    const bool runs = std::any_of(active_.begin(), active_.end(),
                                  [&](const auto& task) { return task->seq == visit.seq; });
    visit.done(runs ? unavailable(fmt::format("a request runs on sequence {}", visit.seq))
                    : not_found(fmt::format("there is no sequence {}", visit.seq)));
    return;
  }
  IdleSequence sequence = {found->tokens, found->salt, executor_.durable_tokens(visit.seq)};
  if (visit.release) {
    executor_.release(residents_.take(static_cast<size_t>(found - idle.begin())).seq);
    progressed_ = true;
  }
  visit.done(std::move(sequence));
}

void Core::forget(const ForgottenChain& chain) {
  int64_t keep = chain.keep;
  for (const TaskList* list : {&queue_, &active_}) {
    for (const auto& task : *list) {
      if (task->request.salt.id != chain.salt) continue;
      keep = std::max(keep, common_prefix(task->chain, chain.tokens));
    }
  }
  residents_.forget(chain.salt, chain.tokens, keep);
  if (drafter_ != nullptr) drafter_->forget(chain.salt, chain.tokens, keep);
}

void Core::end_all(const Status& reason) {
  finish_steps();
  for (TaskList* list : {&queue_, &active_}) {
    for (auto& task : *list) {
      if (!task->ended()) end(*task, reason, "");
    }
  }
}

void Core::end(Task& task, const Status& status, std::string finish_reason, bool keep_state) {
  const bool was_running = task.phase != Phase::kQueued;
  unswept_ = true;
  leave_queue(task, /*admitted=*/false);
  complete(task);
  leave_sequence(task, keep_state);
  Outcome& outcome = task.outcome;
  outcome.status = status;
  outcome.finish_reason = std::move(finish_reason);
  outcome.total_s = since_submit_s(task);
  if (status.ok()) {
    ++totals_.done;
    task.phase = Phase::kDone;
  } else if (status.code() == Code::kCancelled) {
    ++totals_.cancelled;
    task.phase = Phase::kCancelled;
  } else {
    ++totals_.failed;
    task.phase = Phase::kFailed;
  }
  outcome.phase = task.phase;
  progressed_ = true;
  inbox_.ended(task, was_running);
  if (task.request.on_state) task.request.on_state(task.phase, 1);
  if (task.request.on_done) task.request.on_done(outcome);
}

void Core::leave_sequence(Task& task, bool keep_state) {
  if (task.seq == kNoSeq) return;
  if (drafter_ != nullptr) drafter_->ended(task.id);
  if (const Status dropped = drop_ahead(task); !dropped.ok()) keep_state = false;
  if (keep_state && !task.in_restore() && task.computed > 0) {
    Resident resident;
    resident.seq = task.seq;
    resident.tokens.assign(task.chain.begin(), task.chain.begin() + task.computed);
    resident.held = task.held;
    resident.limits = task.limits;
    resident.salt = task.request.salt;
    resident.save = task.request.save;
    residents_.add(std::move(resident));
  } else {
    executor_.release(task.seq);
  }
  task.seq = kNoSeq;
  task.computed = 0;
  task.held = {};
  task.reserved = 0;
}

void Core::offload() {
  if (options_.offload_above >= 1) return;
  const auto arena = static_cast<double>(executor_.limits().arena_cells);
  residents_.offload(std::llround((1 - options_.offload_above) * arena));
}

bool Core::do_chore() {
  if (progressed_ || !active_.empty() || !queue_.empty()) return false;
  const Chore chore = executor_.chore();
  if (chore.seq == kNoSeq || !make_room_for(chore)) return false;
  progressed_ = executor_.work_on(chore);
  return !progressed_;
}

void Core::finish_chores(const std::function<bool(double)>& goes_on) {
  if (!active_.empty() || !queue_.empty()) return;
  executor_.leave_chores();
  Chore chore = executor_.chore();
  const auto all = static_cast<double>(chore.left);
  for (; chore.left > 0 && make_room_for(chore); chore = executor_.chore()) {
    if (goes_on && !goes_on(1 - static_cast<double>(chore.left) / all)) return;
    executor_.work_on(chore);
  }
}

bool Core::make_room_for(const Chore& chore) {
  residents_.free_up(chore.cells, EvictionReason::kChores, chore.seq);
  return executor_.free_cells() >= chore.cells;
}

void Core::sweep() {
  if (!std::exchange(unswept_, false)) return;
  for (TaskList* list : {&queue_, &active_}) {
    std::erase_if(*list, [](const auto& task) { return task->ended(); });
  }
}

void Core::enter(Task& task, Phase phase, double fraction) {
  task.phase = phase;
  if (task.request.on_state) task.request.on_state(phase, fraction);
}

int64_t Core::level_of(const Task& task, int64_t now_ns) const {
  return policy::level(task.request.priority, seconds_between(task.submit_ns, now_ns),
                       options_.aging_s);
}

double Core::since_submit_s(const Task& task) const {
  return seconds_between(task.submit_ns, executor_.now_ns());
}

void Core::publish() {
  Snapshot snapshot = totals_;
  snapshot.arena_cells = executor_.limits().arena_cells;
  snapshot.evictions = residents_.evictions();
  snapshot.evicted_unsaved = residents_.evicted_unsaved();
  for (const auto& task : active_) {
    snapshot.fetching += task->phase == Phase::kFetching ? 1 : 0;
    snapshot.restoring += task->phase == Phase::kRestoring ? 1 : 0;
    snapshot.prefill += task->phase == Phase::kPrefill ? 1 : 0;
    snapshot.decoding += task->phase == Phase::kDecoding ? 1 : 0;
    snapshot.active_cells += task->cells();
    snapshot.resident.push_back({task->seq, task->cells(), false});
  }
  for (const Resident& resident : residents_.all()) {
    snapshot.idle_cells += resident.rows();
    snapshot.resident.push_back({resident.seq, resident.rows(), true});
  }
  inbox_.publish(std::move(snapshot));
}

}  // namespace hcache::scheduler
