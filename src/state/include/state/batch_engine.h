// The batch engine of a process: how it is asked for, and what it is opened with.
//
// Threading: the engine's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/env.h"
#include "base/status.h"
#include "engine/hybrid_engine.h"
#include "model/model.h"
#include "policy/hybrid_plan.h"
#include "state/batch_policy.h"
#include "state/cost_profile.h"

namespace hcache::state {

// When requests run on the batch engine instead of the ordinary one.
enum class BatchEngineUse : uint8_t {
  kNever,
  kWhereStreamed,  // where weights are: every step pays for them, so it should have many rows
  kWherePossible,  // and the ordinary one where the model or its devices have no way to it
  kAlways,
};

struct BatchEngineOptions {
  BatchEngineUse use = BatchEngineUse::kNever;
  // Its KV type, attention, rows of a graph and Env are the runtime's. Its decisions are the
  // policy's.
  engine::HybridOptions engine;
  policy::HybridMode mode = policy::HybridMode::kSearch;
  double share = 0.5;  // with kFixedShare and kTokens
  // At a time: what kinds of blocks are chosen for until so many have begun.
  int32_t sequences = 1;
  // Planned with instead of measured ones (experiments, tests); they are not kept.
  std::optional<MeasuredBatchCosts> measured;
};

struct OpenBatchEngine {
  std::unique_ptr<engine::HybridEngine> engine;
  MeasuredBatchCosts measured;
  bool from_profile = false;  // measured by an earlier process
};

// Measures what a batch takes, unless `dir` has a profile for the same model (`digest`), device,
// buffers and places, and opens the engine. Errors of both as they are. kCancelled: `progress` said
// no.
[[nodiscard]] Result<OpenBatchEngine> open_batch_engine(Env& env, const model::Model& model,
                                                        const std::string& digest,
                                                        const BatchEngineOptions& options,
                                                        const std::string& dir,
                                                        const ProgressFn& progress);

}  // namespace hcache::state
