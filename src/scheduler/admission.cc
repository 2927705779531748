// From the queue into the arena. A request is admitted when the arena, idle sequences counted as
// free, can hold its chain beside what the running ones still need; how its chain gets there –
// taken over, forked, restored, computed – is policy::choose_reuse's choice.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/log.h"
#include "core.h"

namespace hcache::scheduler {

namespace {

// A look into the catalog is believed for so long.
constexpr double kLookupAgeS = 1;
// Requests at the front of the queue that an eviction from the arena looks at.
constexpr size_t kLookAhead = 64;
// So is the order of the queue.
constexpr double kSortAgeS = 0.5;

}  // namespace

bool Core::before(const Task& a, const Task& b, int64_t now_ns) const {
  const auto key = [&](const Task& task) {
    return policy::QueueKey{task.preempted, level_of(task, now_ns), task.id,
                            task.request.background};
  };
  return policy::admitted_before(key(a), key(b));
}

// Each request is put in by its ticket and leaves the others in order; only time, which raises
// levels, brings them out of it.
void Core::sort_queue(int64_t now_ns) {
  if (seconds_between(queue_sorted_ns_, now_ns) < kSortAgeS) return;
  queue_sorted_ns_ = now_ns;
  const auto less = [&](const auto& a, const auto& b) { return before(*a, *b, now_ns); };
  if (!std::is_sorted(queue_.begin(), queue_.end(), less)) {
    std::sort(queue_.begin(), queue_.end(), less);
  }
}

// What the policy makes of the front of the queue.
void Core::order_window(int64_t now_ns) {
  if (options_.queue.policy == policy::QueuePolicy::kFcfs) return;
  const size_t n = std::min(queue_.size(), static_cast<size_t>(options_.queue.window));
  const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(n);
  std::sort(queue_.begin(), end,
            [&](const auto& a, const auto& b) { return before(*a, *b, now_ns); });
  std::vector<policy::WindowEntry> window;
  for (auto task = queue_.begin(); task != end; ++task) {
    Task& t = **task;
    if (seconds_between(t.group_ns, now_ns) >= kLookupAgeS) note_group(t, choose_for_queue(t));
    // What is in the background stays behind, however often it was overtaken.
    if (t.request.background) {
      window.push_back({.priority = std::numeric_limits<int32_t>::min(), .group = t.group});
    } else {
      window.push_back({t.preempted, t.request.priority, t.overtaken, t.group});
    }
  }
  TaskList ordered;
  for (const int32_t index : policy::window_order(window, options_.queue)) {
    ordered.push_back(std::move(queue_[static_cast<size_t>(index)]));
  }
  std::move(ordered.begin(), ordered.end(), queue_.begin());
}

void Core::note_overtaken(const Task& by, int64_t now_ns) {
  if (options_.queue.policy == policy::QueuePolicy::kFcfs) return;
  const size_t n = std::min(queue_.size(), static_cast<size_t>(options_.queue.window));
  for (size_t i = 0; i < n; ++i) {
    if (before(*queue_[i], by, now_ns)) ++queue_[i]->overtaken;
  }
}

void Core::admit() {
  const int64_t now_ns = executor_.now_ns();  // one time for all, or the order is none
  sort_queue(now_ns);
  order_window(now_ns);
  size_t at = 0;
  bool others_wait = false;  // what is in the background would take what they wait for
  for (bool loads_only = false; at < queue_.size();) {
    Task& next = *queue_[at];
    if (next.request.background && others_wait) break;
    const bool joins = may_join(&loads_only);
    if (loads_only && clear_background(next)) continue;
    if (!joins) break;
    const Admission admission = try_admit(next, loads_only);
    if (admission == Admission::kBlocked) {
      if (clear_background(next)) continue;
      break;
    }
    if (admission != Admission::kAdmitted) {
      others_wait = others_wait || (admission == Admission::kLater && inbox_.may_run(next));
      ++at;
      continue;
    }
    auto task = std::move(queue_[at]);
    queue_.erase(queue_.begin() + static_cast<std::ptrdiff_t>(at));
    note_overtaken(*task, now_ns);
    const auto at = std::upper_bound(active_.begin(), active_.end(), task,
                                     [](const auto& a, const auto& b) { return a->id < b->id; });
    active_.insert(at, std::move(task));
  }
}

// What is preempted comes behind `wanting` in the queue, whose place there stays. One with a step
// in flight is left until that has ended, which is before the next admission if it is the oldest.
bool Core::clear_background(const Task& wanting, bool restores_only) {
  if (wanting.request.background || !inbox_.may_run(wanting)) return false;
  const auto victim = std::find_if(active_.rbegin(), active_.rend(), [&](const auto& task) {
    return task->request.background && !task->ended() && task->stepping == 0 &&
           (!restores_only || task->in_restore());
  });
  if (victim == active_.rend()) return false;
  preempt(**victim);
  return true;
}

// What would be reused if it were admitted into an empty arena now.
policy::ReuseChoice Core::choose_for_queue(Task& task) {
  return choose(task, executor_.limits().arena_cells);
}

policy::Demand Core::demand_of(const Resident& resident) const {
  const auto rows = static_cast<int64_t>(resident.tokens.size());
  const auto enough = std::max(options_.reuse.min_fork_tokens, rows / 2);
  policy::Demand demand;
  for (size_t i = 0; i < std::min(queue_.size(), kLookAhead); ++i) {
    const Task& task = *queue_[i];
    if (task.request.salt != resident.salt || task.request.save != resident.save) continue;
    if (common_prefix(task.chain, resident.tokens) < enough) continue;
    demand.first = std::min(demand.first.value_or(task.ticket), task.ticket);
    if (i < policy::Wanted::kWindow) ++demand.score;
  }
  return demand;
}

void Core::note_group(Task& task, const policy::ReuseChoice& choice) const {
  task.group_ns = executor_.now_ns();
  switch (choice.action) {
    case policy::Reuse::kTakeOver:
    case policy::Reuse::kFork: task.group = policy::QueueGroup::kResident; return;
    case policy::Reuse::kCompute: task.group = policy::QueueGroup::kNoHistory; return;
    case policy::Reuse::kRestore:
    case policy::Reuse::kWait: task.group = policy::QueueGroup::kLoading; return;
  }
}

void Core::enqueue(std::unique_ptr<Task> task) {
  Task& t = *task;
  const int64_t now_ns = executor_.now_ns();
  const auto behind =
      std::upper_bound(queue_.begin(), queue_.end(), task,
                       [&](const auto& a, const auto& b) { return before(*a, *b, now_ns); });
  queue_.insert(behind, std::move(task));
  t.ticket = policy::queue_ticket({t.preempted, t.request.priority, t.id, t.request.background});
  const policy::ReuseChoice choice = choose_for_queue(t);
  note_group(t, choice);
  t.overtaken = 0;
  const int64_t restore = choice.action == policy::Reuse::kRestore ? choice.rows : 0;
  executor_.enqueued({.ticket = t.ticket,
                      .salt = t.request.salt,
                      .tokens = t.chain,
                      .prefix = t.saved,
                      .restore = restore,
                      .cut = policy::held_at(t.cuts(), restore).cut_at > 0,
                      .method = t.request.restore});
}

void Core::leave_queue(Task& task, bool admitted) {
  if (task.ticket == 0) return;
  executor_.dequeued(task.ticket, admitted);
  if (admitted) task.came_from = task.ticket;
  task.ticket = 0;
}

void Core::complete(Task& task) {
  if (task.came_from != 0) executor_.completed(std::exchange(task.came_from, 0));
}

bool Core::may_join(bool* loads_only) const {
  const auto most = static_cast<size_t>(options_.batch.max_sequences);
  *loads_only = active_.size() >= most;
  return active_.size() <= most &&
         (!*loads_only || options_.fetch == policy::FetchPolicy::kCarTimer);
}

bool Core::loads_ahead(int64_t rows) const {
  const double load_s = load_timer_.load_s(rows);
  return std::any_of(active_.begin(), active_.end(), [&](const auto& task) {
    return task->phase == Phase::kDecoding &&
           load_timer_.remaining_s(task->request.key, task->outcome.generated_tokens,
                                   task->max_new) <= load_s;
  });
}

Core::Admission Core::try_admit(Task& task, bool loads_only) {
  if (!inbox_.may_run(task)) return Admission::kLater;
  const int64_t spare = room() - headroom(task);
  if (spare < task.wanted_cells()) {
    if (!active_.empty()) return Admission::kBlocked;
    end(task,
        resource_exhausted(fmt::format("{} cells are wanted, and the empty arena has {}",
                                       task.wanted_cells() + headroom(task), room())),
        "");
    return Admission::kEnded;
  }
  const policy::ReuseChoice choice = choose(task, spare);
  if (loads_only && (choice.action != policy::Reuse::kRestore || !loads_ahead(choice.rows))) {
    return Admission::kBlocked;
  }
  const Admission admission = apply(task, choice);
  if (admission == Admission::kAdmitted) admitted(task);
  return admission;
}

void Core::admitted(Task& task) {
  leave_queue(task, /*admitted=*/true);
  task.preempted = false;
  Outcome& outcome = task.outcome;
  outcome.seq = task.seq;
  outcome.dropped_tokens = task.held.dropped();
  if (outcome.preempted_at_s.empty()) outcome.queue_s = since_submit_s(task);
  if (outcome.generated_tokens == 0) {
    outcome.resident_tokens = task.held.rows(task.computed);
    outcome.dropped_before = task.held.dropped();
    outcome.hidden_tokens = outcome.kv_tokens = outcome.recomputed_tokens = 0;
  }
  progressed_ = true;
  inbox_.started(task);
}

int64_t Core::headroom(const Task& task) const {
  int64_t most = options_.decode_headroom;
  if (task.limits.context > 0) most = std::min(most, task.limits.context - task.wanted_cells());
  return std::clamp<int64_t>(task.remaining_new() - 1, 0, most);
}

// What the arena could still give away: idle sequences count as free, and what admitted requests
// will need as taken. Stays the same while they prefill, whatever they reuse.
int64_t Core::room() const {
  int64_t room = executor_.free_cells() + residents_.cells();
  for (const auto& task : active_) {
    room -= std::max<int64_t>(0, task->wanted_cells() - task->cells()) + headroom(*task);
  }
  return room;
}

int32_t Core::restores_in_flight() const {
  return static_cast<int32_t>(std::count_if(active_.begin(), active_.end(),
                                            [](const auto& task) { return task->in_restore(); }));
}

// What was found stays pinned, and is looked up again only where more may be found: what has left
// the arena since is saved alone, and after a while so may be what others have computed.
int64_t Core::saved_prefix(Task& task) {
  const Request& request = task.request;
  if (request.cache == CacheUse::kNone) return 0;
  if (request.restore.mode == policy::Mode::kRecompute) return 0;
  const int64_t now_ns = executor_.now_ns();
  const bool whole = task.saved && task.saved->tokens() + 1 >= task.length();
  const bool fresh = task.saved_ns >= 0 && task.saved_evictions == residents_.evicted() &&
                     seconds_between(task.saved_ns, now_ns) < kLookupAgeS;
  if (!whole && !fresh) {
    Result<SavedPrefixRef> saved =
        executor_.saved_prefix(request.salt, task.chain, task.cuts(), task.saved);
    if (!saved.ok()) log::warn("saved state not looked up: {}", saved.status().to_string());
    task.saved = saved.ok() ? std::move(*saved) : nullptr;
    task.saved_ns = now_ns;
    task.saved_evictions = residents_.evicted();
  }
  return task.saved ? task.saved->tokens() : 0;
}

// Candidates: the idle sequences, then the active ones.
policy::ReuseChoice Core::choose(Task& task, int64_t room) {
  if (task.compute_only) return {};
  policy::ReuseSnapshot snapshot;
  snapshot.tokens = task.length();
  snapshot.dropped = task.length() - task.wanted_cells();
  snapshot.saved = std::min(saved_prefix(task), task.reusable() - 1);
  snapshot.room = room;
  snapshot.slots = executor_.limits().max_sequences - static_cast<int64_t>(active_.size());
  const Request& request = task.request;
  // What is not saved can be forked off what is.
  const auto may_share = [&](const Salt& salt, bool save) {
    return request.cache == CacheUse::kAll && salt == request.salt && (save || !request.save);
  };
  const auto shared_tokens = [&](const auto& other, std::span<const int32_t> tokens) {
    // The last token is always computed: what was cut there can't be gone on from.
    const int64_t shared =
        std::min({common_prefix(task.chain, tokens), task.reusable(), task.length() - 1});
    const int64_t usable = policy::usable_positions(other.held, other.limits, shared, task.limits);
    return other.held.rows(usable) < executor_.shortest(other.seq) ? 0 : usable;
  };
  for (const Resident& resident : residents_.all()) {
    policy::ReuseCandidate candidate;
    candidate.held = candidate.coming = resident.length();
    candidate.dropped = resident.held.dropped();
    candidate.idle = resident.save == request.save;
    candidate.fork_only = !candidate.idle;
    if (may_share(resident.salt, resident.save)) {
      candidate.shared = shared_tokens(resident, resident.tokens);
    }
    snapshot.candidates.push_back(candidate);
  }
  for (const auto& other : active_) {
    policy::ReuseCandidate candidate;
    candidate.held = other->computed;
    candidate.dropped = other->held.dropped();
    const bool behind = other->request.background && !request.background;
    candidate.coming = behind ? other->computed : other->end_of_run();  // nobody waits for those
    if (may_share(other->request.salt, other->request.save)) {
      candidate.shared = shared_tokens(*other, other->chain);
    }
    snapshot.candidates.push_back(candidate);
  }
  return policy::choose_reuse(snapshot, options_.reuse);
}

Core::Admission Core::apply(Task& task, const policy::ReuseChoice& choice) {
  const auto index = static_cast<size_t>(std::max(choice.candidate, 0));
  switch (choice.action) {
    case policy::Reuse::kCompute: return start_new(task, 0);
    case policy::Reuse::kRestore:
      if (restores_in_flight() >= options_.max_restores &&
          !clear_background(task, /*restores_only=*/true)) {
        return Admission::kLater;
      }
      return start_new(task, choice.rows);
    case policy::Reuse::kTakeOver: return take_over(task, index, choice.rows);
    case policy::Reuse::kFork: {
      if (index < residents_.count()) {
        const Resident& resident = residents_.all()[index];
        return fork(task, resident.seq, choice.rows, resident.held);
      }
      const Task& other = *active_[index - residents_.count()];
      return fork(task, other.seq, choice.rows, other.held);
    }
    case policy::Reuse::kWait: break;
  }
  return Admission::kLater;
}

bool Core::make_slot(SeqId pinned) {
  const size_t sequences = active_.size() + residents_.count();
  return sequences < static_cast<size_t>(executor_.limits().max_sequences) ||
         residents_.free_slot(pinned);
}

Core::Admission Core::take_over(Task& task, size_t index, int64_t tokens) {
  const Resident resident = residents_.take(index);
  if (tokens < resident.length()) {
    const Status status = executor_.trim(resident.seq, resident.held.rows(tokens));
    if (!status.ok()) {
      log::warn("a resident sequence is given up: {}", status.to_string());
      executor_.release(resident.seq);
      task.compute_only = true;
      return start_new(task, 0);
    }
  }
  task.seq = resident.seq;
  task.computed = tokens;
  task.held = resident.held;
  enter(task, Phase::kPrefill, task.computed_share());
  return Admission::kAdmitted;
}

Core::Admission Core::fork(Task& task, SeqId source, int64_t tokens, policy::HeldRows held) {
  const int64_t rows = held.rows(tokens);
  if (!make_slot(source)) return Admission::kBlocked;
  residents_.free_up(rows, EvictionReason::kAdmission, source);
  if (executor_.free_cells() < rows) return Admission::kBlocked;
  const Result<SeqId> seq = executor_.fork(source, rows, task.request.save);
  if (!seq.ok()) {
    log::warn("a prefix is computed instead of forked: {}", seq.status().to_string());
    task.compute_only = true;
    return start_new(task, 0);
  }
  task.seq = *seq;
  task.computed = tokens;
  task.held = held;
  enter(task, Phase::kPrefill, task.computed_share());
  return Admission::kAdmitted;
}

Core::Admission Core::start_new(Task& task, int64_t restore_tokens) {
  if (!make_slot()) return Admission::kBlocked;
  const std::vector<policy::HeldRows> cuts = task.cuts();
  const int64_t rows = policy::held_at(cuts, restore_tokens).rows(restore_tokens);
  residents_.free_up(rows, EvictionReason::kAdmission);
  if (executor_.free_cells() < rows) return Admission::kBlocked;
  const Result<SeqId> seq = executor_.create(task.request.salt, task.request.save);
  if (!seq.ok()) return no_sequence(task, seq.status());
  task.seq = *seq;
  if (restore_tokens > 0) {
    begin_restore(task, restore_tokens, cuts);
  } else {
    enter(task, Phase::kPrefill);
  }
  return Admission::kAdmitted;
}

// Room may come while there is anything that can go away.
Core::Admission Core::no_sequence(Task& task, const Status& status) {
  if (status.code() == Code::kResourceExhausted && !(active_.empty() && residents_.empty())) {
    if (residents_.free_slot()) progressed_ = true;
    return Admission::kBlocked;
  }
  end(task, status, "");
  return Admission::kEnded;
}

void Core::begin_restore(Task& task, int64_t tokens, std::span<const policy::HeldRows> cuts) {
  // First: what is being read ahead for it makes way for its own reads.
  leave_queue(task, /*admitted=*/true);
  task.restore_begin_ns = executor_.now_ns();
  task.restore_number = ++last_restore_;
  task.restore_alone = true;
  task.restore_used_s = 0;
  bool decoding = false;
  bool shared = false;
  for (const auto& other : active_) {
    decoding = decoding || other->phase == Phase::kDecoding;
    if (!other->in_restore()) continue;
    // It gets its share from now on, and does not make up for what the others have had.
    task.restore_used_s =
        shared ? std::min(task.restore_used_s, other->restore_used_s) : other->restore_used_s;
    shared = true;
  }
  const Status status = executor_.begin_restore(
      task.seq, {.prefix = std::exchange(task.saved, nullptr),
                 .tokens = std::span(task.chain).first(static_cast<size_t>(task.reusable())),
                 .upto = tokens,
                 .cuts = cuts,
                 .media = task.request.media,
                 .method = task.request.restore,
                 .compute_share = policy::restore_compute_share(decoding, options_.restore),
                 .alone = active_.empty() && queue_.size() == 1});
  task.saved_ns = -1;
  if (!status.ok()) return restore_failed(task, status);
  task.reserved = policy::held_at(cuts, tokens).rows(tokens);
  enter(task, Phase::kFetching);
}

}  // namespace hcache::scheduler
