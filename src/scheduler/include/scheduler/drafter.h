// What the scheduler asks of a model that drafts: a small one that says what probably comes next,
// so that the model that answers computes several tokens in one step (speculative decoding). What
// it says is never taken on trust, so it may be wrong, late or silent, but not slow.
//
// Threading: the scheduler's owner thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/ids.h"
#include "scheduler/request.h"

namespace hcache::scheduler {

class Drafter {
 public:
  struct Wanted {
    RequestId request = 0;
    const Salt& salt;
    bool save = true;  // whether state of the request may be saved
    std::span<const int32_t> chain;
    int32_t most = 0;  // tokens to give; 0: only what the drafter lacks of the chain is computed
  };

  Drafter() = default;
  Drafter(const Drafter&) = delete;
  Drafter& operator=(const Drafter&) = delete;
  virtual ~Drafter() = default;

  // For each of them, in order, what probably follows its chain; nothing where the drafter isn't
  // sure or isn't there yet. A call takes about as long as a step and what it gives: what is
  // lacking of a long chain is computed over several.
  virtual std::vector<std::vector<int32_t>> draft(std::span<const Wanted> wanted) = 0;
  // Whether it has come to the end of the request's chain once, so that a draft costs what it
  // gives.
  [[nodiscard]] virtual bool ready(RequestId request) const = 0;
  // What a step of so many rows is expected to take, in the unit of Executor::step_s().
  [[nodiscard]] virtual double step_s(int64_t rows) const = 0;
  // The request has ended, or waits again: what is held of it may serve another.
  virtual void ended(RequestId request) = 0;
  // As Scheduler::forget().
  virtual void forget(const SaltId& salt, std::span<const int32_t> tokens, int64_t keep) = 0;
};

}  // namespace hcache::scheduler
