#include "engine/pipeline.h"

#include <fmt/format.h>

#include <utility>

namespace hcache::engine {

Pipeline::Pipeline(Engine& engine) : engine_(engine), stages_(engine.stage_ranges()) {}

void Pipeline::run_next_stage(Flight& flight) {
  const auto [begin, end] = stages_[static_cast<size_t>(++flight.stage)];
  flight.status = engine_.run_layers(flight.step, begin, end);
  if (!flight.status.ok()) flight.stage = capacity();  // out of the others' way
}

void Pipeline::move_on() {
  int free_to = capacity();  // the stage of the step ahead
  for (Flight& flight : flights_) {
    if (flight.stage + 1 < free_to) run_next_stage(flight);
    free_to = flight.stage;
  }
}

Status Pipeline::begin(std::span<const BatchItem> items) {
  if (size() == capacity()) {
    return failed_precondition(
        fmt::format("{} steps are in flight on {} stages; finish one first", size(), capacity()));
  }
  while (!flights_.empty() && flights_.back().stage == 0) move_on();
  HCACHE_ASSIGN_OR_RETURN(Step step, engine_.prepare(items));
  flights_.push_back({.step = std::move(step), .stage = -1, .status = {}});
  run_next_stage(flights_.back());
  return {};
}

Result<Logits> Pipeline::finish() {
  if (flights_.empty()) return failed_precondition("no step is in flight");
  while (flights_.front().stage + 1 < capacity()) move_on();
  Result<Logits> logits = flights_.front().status.ok() ? engine_.finish(flights_.front().step)
                                                       : Result<Logits>(flights_.front().status);
  flights_.pop_front();
  move_on();  // before the caller looks at the logits, so that no device waits for that
  return logits;
}

}  // namespace hcache::engine
