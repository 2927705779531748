#include "residents.h"

#include <algorithm>
#include <utility>

#include "task.h"

namespace hcache::scheduler {

void Residents::add(Resident resident) {
  resident.last_used = ++uses_;
  resident.last_used_ns = executor_.now_ns();
  resident.flush_begin_ns = -1;
  if (resident.save) executor_.request_flush(resident.seq);
  residents_.push_back(std::move(resident));
}

Resident Residents::take(size_t index) {
  Resident resident = std::move(residents_[index]);
  residents_.erase(residents_.begin() + static_cast<std::ptrdiff_t>(index));
  return resident;
}

int64_t Residents::cells() const {
  int64_t cells = 0;
  for (const Resident& resident : residents_)
    cells += executor_.cells(resident.seq, resident.rows());
  return cells;
}

bool Residents::is_durable(const Resident& resident) {
  const int64_t durable = executor_.durable_tokens(resident.seq);
  return durable == kNotSaving || durable >= resident.length();
}

bool Residents::waited_enough(const Resident& resident) const {
  return resident.flush_begin_ns >= 0 &&
         seconds_between(resident.flush_begin_ns, executor_.now_ns()) > flush_wait_s_;
}

int32_t Residents::victim(SeqId pinned, bool patient) {
  std::vector<policy::IdleSequence> idle;
  const bool weighs = policy_ == policy::EvictPolicy::kCostAware;
  for (const Resident& resident : residents_) {
    idle.push_back(
        {.last_used = resident.last_used,
         .durable = is_durable(resident) || (!patient && waited_enough(resident)),
         .pinned = resident.seq == pinned,
         .demand = policy::looks_ahead(policy_) ? demand_of_(resident) : policy::Demand(),
         .idle_s = seconds_between(resident.last_used_ns, executor_.now_ns()),
         .cells = static_cast<double>(std::max<int64_t>(resident.rows(), 1)),
         .restore_s = weighs ? executor_.restore_s(resident.rows()) : 1});
  }
  return policy::choose_eviction(idle, policy_);
}

void Residents::evict(size_t index, EvictionReason reason) {
  const Resident resident = take(index);
  if (executor_.durable_tokens(resident.seq) < resident.length()) ++evicted_unsaved_;
  ++evictions_.at(static_cast<size_t>(reason));
  executor_.release(resident.seq);
}

void Residents::ask_for_flushes(int64_t cells, SeqId pinned) {
  for (Resident& resident : residents_) {
    if (cells <= 0) return;
    if (resident.seq == pinned) continue;
    cells -= resident.rows();
    if (resident.flush_begin_ns >= 0) continue;
    resident.flush_begin_ns = executor_.now_ns();
    executor_.request_flush(resident.seq);
  }
}

bool Residents::free_up(int64_t cells, EvictionReason reason, SeqId pinned) {
  bool evicted = false;
  while (executor_.free_cells() < cells) {
    const int32_t index = victim(pinned);
    if (index < 0) {
      ask_for_flushes(cells - executor_.free_cells(), pinned);
      break;
    }
    evict(static_cast<size_t>(index), reason);
    evicted = true;
  }
  return evicted;
}

void Residents::offload(int64_t cells) {
  while (executor_.free_cells() < cells) {
    const int32_t index = victim(kNoSeq, /*patient=*/true);
    if (index < 0) return;
    evict(static_cast<size_t>(index), EvictionReason::kOffload);
  }
}

bool Residents::free_slot(SeqId pinned) {
  const int32_t index = victim(pinned);
  if (index < 0) {
    ask_for_flushes(1, pinned);
    return false;
  }
  evict(static_cast<size_t>(index), EvictionReason::kSlots);
  return true;
}

void Residents::forget(const SaltId& salt, std::span<const int32_t> tokens, int64_t keep) {
  for (size_t i = residents_.size(); i-- > 0;) {
    Resident& resident = residents_[i];
    if (resident.salt.id != salt || common_prefix(resident.tokens, tokens) <= keep) continue;
    // A cut can't be taken back.
    if (keep > 0 && keep >= resident.held.cut_at &&
        executor_.trim(resident.seq, resident.held.rows(keep)).ok()) {
      resident.tokens.resize(static_cast<size_t>(keep));
    } else {
      executor_.release(take(i).seq);
    }
  }
}

void Residents::release_all() {
  for (const Resident& resident : residents_) executor_.release(resident.seq);
  residents_.clear();
}

}  // namespace hcache::scheduler
