// /slots: the sequences in the arena as llama-server's slots.
//
// A slot is a sequence, and its number stays while the sequence lives; the numbers of those that
// have gone are given out again, lowest first. Saving makes a slot's state durable and its tokens a
// session of the file's name. Restoring finds that session: requests that begin with its tokens
// then use the state, as they always do. Erasing gives the arena's rows back and leaves what is
// saved.
//
// Threading: as a Service; add_to() from one thread.
#pragma once

#include <atomic>
#include <map>
#include <optional>

#include "base/sync.h"
#include "endpoint.h"

namespace hcache::server {

class SlotEndpoints {
 public:
  // `transfers` runs actions, which wait for the slot and for the disk.
  SlotEndpoints(Service& service, WorkQueue& transfers)
      : service_(service), transfers_(transfers) {}

  void add_to(http::Router* router);
  // Actions that wait give up.
  void stop() { stopping_.store(true, std::memory_order_relaxed); }

 private:
  // The sequence of a slot, with what it held when it was last looked at.
  struct Slot {
    int id = 0;
    scheduler::SeqId seq = scheduler::kNoSeq;
    scheduler::IdleSequence held;
  };

  Result<api::Json> list() HCACHE_EXCLUDES(mutex_);
  Result<api::Json> act(const Call& call) HCACHE_EXCLUDES(mutex_);
  Result<api::Json> save(const Call& call, int id);
  Result<api::Json> restore(const Call& call, int id);
  Result<api::Json> erase(const Call& call, int id);

  // Waits until no request runs on the slot. kInvalidArgument: there is no such slot, or its salt
  // is another one; kUnavailable: it takes too long.
  Result<Slot> wait_for(const Call& call, int id, bool release);
  [[nodiscard]] Result<scheduler::IdleSequence> visit(scheduler::SeqId seq, bool release);
  [[nodiscard]] std::optional<scheduler::SeqId> sequence_of(int id) HCACHE_EXCLUDES(mutex_);
  // Sleeps a moment; kUnavailable with `what` when it has been long enough.
  Status wait(int64_t end_ns, int id, const char* what);
  // Gives every resident sequence a number.
  void number(const std::vector<scheduler::ResidentSequence>& resident) HCACHE_REQUIRES(mutex_);

  Service& service_;
  WorkQueue& transfers_;
  std::atomic<bool> stopping_ = false;
  Mutex mutex_;
  std::map<scheduler::SeqId, int> numbers_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::server
