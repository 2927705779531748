// Pipeline parallelism: steps of different sequences in flight at once, each on another stage.
#pragma once

#include <deque>
#include <span>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/engine.h"

namespace hcache::engine {

// Keeps as many steps in flight as the engine has stages. Steps move on from stage to stage, the
// oldest first, and none enters a stage before the step ahead has left it; so every device computes
// one step's rows while the others compute theirs. The bits are those of the same steps one after
// another.
//
// Devices overlap where giving work to their queues returns at once: see Engine::stages_overlap().
// A sequence that is released or cut while its step is in flight ends that step with an error; the
// others go on.
//
// Threading: the engine's thread. The engine must outlive it.
class Pipeline {
 public:
  explicit Pipeline(Engine& engine);

  // Steps that may be in flight.
  [[nodiscard]] int capacity() const { return static_cast<int>(stages_.size()); }
  [[nodiscard]] int size() const { return static_cast<int>(flights_.size()); }

  // Prepares a step (errors as Engine::prepare(): it is not in flight then) and gives its rows to
  // the first stage; the steps before it move on. kFailedPrecondition when as many steps as there
  // are stages are in flight.
  Status begin(std::span<const BatchItem> items);
  // Ends the oldest step: waits for its results, and for no other step's. Its logits are valid
  // until the next finish(); the steps behind it have moved on by then. An error is this step's
  // alone. kFailedPrecondition when none is in flight.
  Result<Logits> finish();
  // Drops all steps; their sequences are as they were before.
  void clear() { flights_.clear(); }

 private:
  struct Flight {
    Step step;
    int stage = -1;  // that has its rows
    Status status;   // of what it has been through
  };
  void run_next_stage(Flight& flight);
  void move_on();

  Engine& engine_;
  const std::vector<std::pair<int, int>> stages_;  // layers [begin, end) of each
  std::deque<Flight> flights_;                     // oldest first
};

}  // namespace hcache::engine
