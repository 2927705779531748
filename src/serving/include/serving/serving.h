// Requests on the engine: one thread that owns the runtime's engine, and the scheduler that it
// runs. Everything that generates or restores goes through here: the server, the command line and
// the benchmarks submit the same requests.
//
// Threading: open, stop, close and the destructor from one thread; the rest from any, unless it
// says otherwise. Not from a request's functions, but for submit and cancel.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/env.h"
#include "base/status.h"
#include "scheduler/scheduler.h"
#include "serving/draft_model.h"
#include "serving/media.h"
#include "state/runtime.h"

namespace hcache::serving {

struct ServingOptions {
  state::RuntimeOptions runtime;
  scheduler::SchedulerOptions scheduler;
  int32_t max_sequences = 64;  // in the arena, idle ones included
  int64_t max_context = 0;     // rows of one; 0: as many as the model and the arena have
  // The memory that so many restores at once read into is there from the start: a step that others
  // take beside does not wait for the kernel to make it.
  int32_t prepared_restores = 0;
  std::optional<DraftOptions>
      draft;  // a model that drafts for it, as far as scheduler.draft allows
  // May be empty. Called on the engine's thread between iterations, several times a second: quick.
  std::function<void()> tick;
};

// What the batch engine does, so far.
struct BatchReport {
  policy::HybridMode mode = policy::HybridMode::kSearch;
  // The fits that plans are made with: seconds over tokens of one layer, over rows with `forward`.
  bool from_profile = false;  // of an earlier process
  policy::LinearFit kv_gen, load_kv, load_act, forward;
  double act_share = 0;  // of blocks, by the plan in force
  int mini_batches = 0;  // of the last step
  engine::HybridCacheUse cache;
  int64_t steps = 0;
  int64_t rows = 0;  // that they computed
  double step_s = 0;
  double wait_s = 0;            // of it, for blocks
  double weights_wait_s = 0;    // for weights
  uint64_t read_bytes = 0;      // of blocks
  uint64_t streamed_bytes = 0;  // weights that each step reads once
  // Sums over the steps in which every sequence had one row.
  int64_t decode_steps = 0;
  double decode_step_s = 0;
  double predicted_step_s = 0;
  double link_idle = 0;  // shares of each step
  double compute_idle = 0;
};

class Serving {
 public:
  // Loads the model, opens the store, starts the engine's thread. Errors of all of them; see
  // state::Runtime::open(), whose progress is told on the engine's thread.
  static Result<std::unique_ptr<Serving>> open(Env& env, const ServingOptions& options);
  // As stop(0) and close().
  virtual ~Serving() = default;

  // Its any-thread part; it is there until close(), and does nothing any more after stop().
  [[nodiscard]] virtual scheduler::Scheduler& scheduler() = 0;
  // Submits the request and waits for its end; an on_done of its own is called as well. Errors of
  // submit(). What became of the request is in its outcome. `goes_on` (may be empty) is asked
  // several times a second, on the calling thread; after false the request is cancelled.
  [[nodiscard]] virtual Result<scheduler::Outcome> run(
      scheduler::Request request, const std::function<bool()>& goes_on = {}) = 0;
  // For inspection and measurements: runs `call` on the engine's thread, between two iterations,
  // and waits for it; gives back what it does. Sequences that requests run on must not be changed.
  virtual Status on_engine(const std::function<Status(state::Runtime&)>& call) = 0;
  // Everything captured so far is durable when it returns.
  virtual Status flush() = 0;
  // Does now what would be done while nothing else runs or waits, as far as there is room, until
  // `goes_on` (may be empty), which is told how much is done, gives false; then flush(). Nothing
  // may run.
  virtual Status finish_chores(const std::function<bool(double fraction)>& goes_on = {}) = 0;

  // What of it any thread may use: the store, the saver's numbers, what never changes.
  [[nodiscard]] virtual state::Runtime& runtime() = 0;
  [[nodiscard]] virtual int64_t context() const = 0;  // most rows of one sequence
  // Why what outgrows the context can't be cut; empty: it can.
  [[nodiscard]] virtual const std::string& why_no_cuts() const = 0;
  // Why it is not attention that chooses rows which stay then; empty: it is.
  [[nodiscard]] virtual const std::string& why_no_choice() const = 0;
  // What prompts may have beside text; nullptr: nothing.
  [[nodiscard]] virtual const libllama::MediaReader* media() const = 0;
  // Read from disks for requests that waited.
  [[nodiscard]] virtual uint64_t bytes_read_ahead() const = 0;
  // nullopt: the ordinary engine runs.
  [[nodiscard]] virtual std::optional<BatchReport> batch_report() const = 0;

  // Accepts nothing more, waits up to grace_ns for what runs, cuts off the rest. Nothing computes
  // afterwards; the runtime is still open.
  virtual void stop(int64_t grace_ns) = 0;
  // stop(0), then everything is made durable, and the store closed. Errors of the store are
  // reported here at the latest.
  virtual Status close() = 0;
};

}  // namespace hcache::serving
