#include "scheduler/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "core.h"
#include "inbox.h"

namespace hcache::scheduler {

namespace {

constexpr std::array<std::string_view, 8> kPhaseNames = {
    "queued", "fetching", "restoring", "prefill", "decoding", "done", "cancelled", "failed"};
constexpr std::array<std::string_view, kEvictionReasons> kReasonNames = {
    "admission", "growth", "slots", "offload", "chores"};

Status at_least(std::string_view name, int64_t value, int64_t least) {
  if (value >= least) return {};
  return invalid_argument(fmt::format("{} is {}; it takes {} or more", name, value, least));
}

Status above_zero(std::string_view name, double value) {
  if (std::isfinite(value) && value > 0) return {};
  return invalid_argument(fmt::format("{} is {}; it takes a number above 0", name, value));
}

Status check(const SchedulerOptions& options, const ExecutorLimits& limits) {
  HCACHE_RETURN_IF_ERROR(at_least("max_step_tokens", options.batch.max_step_tokens, 1));
  HCACHE_RETURN_IF_ERROR(at_least("max_sequences", options.batch.max_sequences, 1));
  HCACHE_RETURN_IF_ERROR(
      at_least("max_step_tokens", options.batch.max_step_tokens, options.batch.max_sequences));
  HCACHE_RETURN_IF_ERROR(at_least("max_restores", options.max_restores, 1));
  HCACHE_RETURN_IF_ERROR(at_least("decode_headroom", options.decode_headroom, 0));
  HCACHE_RETURN_IF_ERROR(at_least("max_queued", options.max_queued, 1));
  HCACHE_RETURN_IF_ERROR(at_least("max_queued_per_key", options.max_queued_per_key, 0));
  HCACHE_RETURN_IF_ERROR(at_least("max_running_per_key", options.max_running_per_key, 0));
  HCACHE_RETURN_IF_ERROR(at_least("queue.window", options.queue.window, 1));
  HCACHE_RETURN_IF_ERROR(at_least("min_fork_tokens", options.reuse.min_fork_tokens, 1));
  HCACHE_RETURN_IF_ERROR(at_least("cheap_tokens", options.reuse.cheap_tokens, 0));
  HCACHE_RETURN_IF_ERROR(above_zero("restore.share", options.restore.share));
  HCACHE_RETURN_IF_ERROR(above_zero("restore.idle_slice_s", options.restore.idle_slice_s));
  if (!(options.offload_above >= 0 && options.offload_above <= 1)) {
    return invalid_argument(
        fmt::format("offload_above is {}; it takes a share from 0 to 1", options.offload_above));
  }
  HCACHE_RETURN_IF_ERROR(at_least("the arena's cells", limits.arena_cells, 1));
  HCACHE_RETURN_IF_ERROR(at_least("the context", limits.context, 1));
  HCACHE_RETURN_IF_ERROR(at_least("the executor's rows", limits.max_step_rows, 1));
  return at_least("the executor's sequences", limits.max_sequences, 1);
}

}  // namespace

std::string_view phase_name(Phase phase) { return kPhaseNames.at(static_cast<size_t>(phase)); }

std::string_view eviction_reason_name(EvictionReason reason) {
  return kReasonNames.at(static_cast<size_t>(reason));
}

Result<std::unique_ptr<Scheduler>> Scheduler::create(Executor& executor,
                                                     const SchedulerOptions& options,
                                                     Drafter* drafter) {
  const ExecutorLimits& limits = executor.limits();
  HCACHE_RETURN_IF_ERROR(check(options, limits));
  SchedulerOptions cut = options;
  cut.batch.max_step_tokens = std::min(options.batch.max_step_tokens, limits.max_step_rows);
  cut.batch.max_sequences =
      std::min({options.batch.max_sequences, limits.max_sequences, cut.batch.max_step_tokens});
  auto inbox = std::make_unique<Inbox>(executor, cut);
  auto core = std::make_unique<Core>(executor, cut, drafter, *inbox);
  return std::unique_ptr<Scheduler>(new Scheduler(std::move(inbox), std::move(core)));
}

Scheduler::Scheduler(std::unique_ptr<Inbox> inbox, std::unique_ptr<Core> core)
    : inbox_(std::move(inbox)), core_(std::move(core)) {}

Scheduler::~Scheduler() {
  inbox_->drain();  // so that no on_done() submits anything
  core_.reset();
}

Result<RequestId> Scheduler::submit(Request request, double* retry_after_s) {
  return inbox_->submit(std::move(request), retry_after_s);
}
void Scheduler::cancel(RequestId id) { inbox_->cancel(id); }
void Scheduler::forget(const SaltId& salt, std::vector<int32_t> tokens, int64_t keep) {
  inbox_->forget({salt, std::move(tokens), keep});
}
void Scheduler::drain() { inbox_->drain(); }
void Scheduler::stop_all(Status reason) { inbox_->stop_all(std::move(reason)); }
void Scheduler::wake() { inbox_->wake(); }
void Scheduler::visit_idle(SeqId seq, bool release, IdleVisitor done) {
  inbox_->visit_idle({seq, release, std::move(done)});
}
int64_t Scheduler::queued() const { return inbox_->queued(); }
int64_t Scheduler::running() const { return inbox_->running(); }
Snapshot Scheduler::stats() const { return inbox_->stats(); }
Activity Scheduler::run_once() { return core_->run_once(); }

void Scheduler::finish_chores(const std::function<bool(double)>& goes_on) {
  core_->finish_chores(goes_on);
}
bool Scheduler::wait_for_work(int64_t timeout_ns) { return inbox_->wait(timeout_ns); }

}  // namespace hcache::scheduler
