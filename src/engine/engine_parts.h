// Everything an Engine consists of, put together.
#pragma once

#include <memory>
#include <vector>

#include "arena_rows.h"
#include "base/status.h"
#include "capture_tap.h"
#include "engine/compute_queue.h"
#include "engine/engine.h"
#include "engine/weight_stream.h"
#include "hidden_types.h"
#include "kept_rows.h"
#include "model/model.h"
#include "restore_ops.h"
#include "sequences.h"
#include "stage.h"
#include "step_runner.h"
#include "token_table.h"

namespace hcache::engine {

struct EngineParts {
  // See Engine::create(). row_groups: per layer, see Sequences.
  static Result<std::unique_ptr<EngineParts>> create(const model::Model& model,
                                                     const EngineOptions& options,
                                                     const MakeQueues& make_queues,
                                                     std::vector<int> row_groups);
  EngineParts(const EngineParts&) = delete;
  EngineParts& operator=(const EngineParts&) = delete;
  ~EngineParts();

  const model::Model& model;
  const EngineOptions options;
  Sequences sequences;
  Stages stages;
  const std::unique_ptr<WeightStream> weights;
  const std::unique_ptr<model::ComputeThreads> threads;  // where the CPU computes every layer
  ArenaRows rows;
  HiddenTypes types;
  CaptureTap tap;
  TokenTable table;
  StepRunner steps;
  RestoreOps restore;
  KeptRows kept;

 private:
  EngineParts(const model::Model& m, const EngineOptions& o, Sequences of_rows,
              std::vector<std::unique_ptr<Stage>> s, std::unique_ptr<WeightStream> w);
};

}  // namespace hcache::engine
