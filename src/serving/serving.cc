#include "serving/serving.h"

#include <atomic>
#include <deque>
#include <optional>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/sync.h"
#include "batch_executor.h"
#include "engine_executor.h"
#include "llama_executor.h"

namespace hcache::serving {
namespace {

constexpr int64_t kIoPollNs = 1'000'000;
constexpr int64_t kIdleWaitNs = 100'000'000;
constexpr int64_t kStopPollNs = 10'000'000;
constexpr int64_t kAskNs = 50'000'000;  // between questions whether a request goes on

// A value that one thread waits for and another one gives, once.
template <typename T>
class Awaited {
 public:
  void give(T value) {
    MutexLock lock(mutex_);
    value_ = std::move(value);
    given_.notify_all();
  }
  T take() {
    MutexLock lock(mutex_);
    while (!value_) given_.wait(mutex_);
    return std::move(*value_);
  }
  // Whether it was given by then.
  bool wait(int64_t timeout_ns) {
    MutexLock lock(mutex_);
    if (!value_) given_.wait_for_ns(mutex_, timeout_ns);
    return value_.has_value();
  }

 private:
  Mutex mutex_;
  CondVar given_;
  std::optional<T> value_ HCACHE_GUARDED_BY(mutex_);
};

class ServingImpl : public Serving {
 public:
  ServingImpl(Env& env, const ServingOptions& options) : env_(env), options_(options) {}
  ServingImpl(const ServingImpl&) = delete;
  ServingImpl& operator=(const ServingImpl&) = delete;
  ~ServingImpl() override { close().ignore("errors were logged; a destructor has nobody to tell"); }

  Status start() {
    Awaited<Status> opened;
    // Opened by the thread that computes: OpenMP keeps a team for every thread that has computed,
    // and with more threads in teams than cores it puts them to sleep between any two operations.
    thread_ = std::thread([this, &opened] {
      const Status status = open_all();
      const bool ok = status.ok();
      opened.give(status);
      if (ok) work();
    });
    Status status = opened.take();
    if (!status.ok()) thread_.join();
    return status;
  }

  scheduler::Scheduler& scheduler() override { return *scheduler_; }
  Result<scheduler::Outcome> run(scheduler::Request request,
                                 const std::function<bool()>& goes_on) override;
  Status on_engine(const std::function<Status(state::Runtime&)>& call) override;
  Status flush() override {
    return on_engine([](state::Runtime& runtime) { return runtime.flush(); });
  }
  Status finish_chores(const std::function<bool(double)>& goes_on) override {
    return on_engine([&](state::Runtime& runtime) {
      HCACHE_RETURN_IF_ERROR(runtime.flush());  // what is saved can make room
      scheduler_->finish_chores(goes_on);
      return runtime.flush();
    });
  }
  state::Runtime& runtime() override { return *runtime_; }
  int64_t context() const override { return limits_.context; }
  const std::string& why_no_cuts() const override { return limits_.why_no_cuts; }
  const std::string& why_no_choice() const override { return limits_.why_no_choice; }
  const libllama::MediaReader* media() const override {
    return runtime_->llama() == nullptr ? nullptr : runtime_->llama()->engine->media();
  }
  uint64_t bytes_read_ahead() const override {
    return executor_ ? executor_->bytes_read_ahead() : 0;
  }
  std::optional<BatchReport> batch_report() const override {
    return batch_ ? std::optional(batch_->report()) : std::nullopt;
  }
  void stop(int64_t grace_ns) override;
  Status close() override;

 private:
  struct Call {
    const std::function<Status(state::Runtime&)>* call = nullptr;
    Awaited<Status>* done = nullptr;
  };

  // ---- The engine's thread
  Status open_all();
  Status open_draft(const scheduler::SchedulerOptions& scheduler);
  void work();
  void run_calls() HCACHE_EXCLUDES(mutex_);

  Env& env_;
  const ServingOptions options_;
  std::unique_ptr<state::Runtime> runtime_;
  std::unique_ptr<EngineExecutor> executor_;  // or
  std::unique_ptr<BatchExecutor> batch_;      // or
  std::unique_ptr<LlamaExecutor> llama_;
  std::unique_ptr<DraftModel> draft_;  // null: none
  std::unique_ptr<scheduler::Scheduler> scheduler_;
  scheduler::ExecutorLimits limits_;
  std::atomic<bool> stop_ = false;
  Mutex mutex_;
  std::deque<Call> calls_ HCACHE_GUARDED_BY(mutex_);
  std::thread thread_;
};

Status ServingImpl::open_all() {
  state::RuntimeOptions runtime = options_.runtime;
  runtime.max_sequences = options_.max_sequences;
  HCACHE_ASSIGN_OR_RETURN(runtime_, state::Runtime::open(env_, runtime));
  if (runtime_->llama() != nullptr) {
    llama_ = std::make_unique<LlamaExecutor>(env_, *runtime_, options_.max_context);
    limits_ = llama_->limits();
    scheduler::SchedulerOptions scheduler = options_.scheduler;
    // Guesses that do not come true could not be taken back.
    if (runtime_->llama()->engine->layout().snapshots && scheduler.draft.most > 0) {
      log::warn(
          "--draft-max {} does nothing: this model's state can't be taken back to before a "
          "guess",
          scheduler.draft.most);
      scheduler.draft.most = 0;
    }
    HCACHE_RETURN_IF_ERROR(open_draft(scheduler));
    HCACHE_ASSIGN_OR_RETURN(scheduler_,
                            scheduler::Scheduler::create(*llama_, scheduler, draft_.get()));
    return {};
  }
  if (runtime_->batch() != nullptr) {
    batch_ = std::make_unique<BatchExecutor>(env_, *runtime_, options_.runtime.batch,
                                             options_.max_sequences);
    limits_ = batch_->limits();
    scheduler::SchedulerOptions scheduler = options_.scheduler;
    scheduler.offload_above = 0;  // nothing goes on from what is idle
    HCACHE_ASSIGN_OR_RETURN(scheduler_, scheduler::Scheduler::create(*batch_, scheduler));
    return {};
  }
  EngineExecutorOptions executor;
  executor.max_sequences = options_.max_sequences;
  executor.max_context = options_.max_context;
  executor.fetch = options_.scheduler.fetch;
  executor.dram_bytes = options_.runtime.dram_bytes;
  executor_ = std::make_unique<EngineExecutor>(env_, *runtime_, executor);
  limits_ = executor_->limits();
  if (runtime_->store() != nullptr && options_.prepared_restores > 0) {
    // One begins alone at a time.
    store::Store& store = *runtime_->store();
    store.prepare_readers(static_cast<size_t>(options_.prepared_restores) - 1,
                          {.ring_bytes = executor.beside_ring_bytes});
    store.prepare_readers(1, {.ring_bytes = executor.restore_ring_bytes});
  }
  HCACHE_RETURN_IF_ERROR(open_draft(options_.scheduler));
  HCACHE_ASSIGN_OR_RETURN(
      scheduler_, scheduler::Scheduler::create(*executor_, options_.scheduler, draft_.get()));
  return {};
}

Status ServingImpl::open_draft(const scheduler::SchedulerOptions& scheduler) {
  if (!options_.draft || scheduler.draft.most == 0) return {};
  DraftOptions draft = *options_.draft;
  draft.runtime.max_sequences = options_.max_sequences;
  Result<std::unique_ptr<DraftModel>> opened = DraftModel::open(env_, draft);
  if (!opened.ok()) return opened.status().with_context("the model that drafts");
  draft_ = std::move(*opened);
  return {};
}

void ServingImpl::work() {
  while (!stop_.load(std::memory_order_acquire)) {
    const scheduler::Activity activity = scheduler_->run_once();
    run_calls();
    if (options_.tick) options_.tick();
    if (activity == scheduler::Activity::kWorked) continue;
    scheduler_->wait_for_work(activity == scheduler::Activity::kWaiting ? kIoPollNs : kIdleWaitNs);
  }
  run_calls();
}

void ServingImpl::run_calls() {
  for (;;) {
    Call call;
    {
      MutexLock lock(mutex_);
      if (calls_.empty()) return;
      call = calls_.front();
      calls_.pop_front();
    }
    call.done->give((*call.call)(*runtime_));
  }
}

Status ServingImpl::on_engine(const std::function<Status(state::Runtime&)>& call) {
  Awaited<Status> done;
  {
    MutexLock lock(mutex_);
    calls_.push_back({&call, &done});
  }
  scheduler_->wake();
  return done.take();
}

Result<scheduler::Outcome> ServingImpl::run(scheduler::Request request,
                                            const std::function<bool()>& goes_on) {
  Awaited<scheduler::Outcome> ended;
  request.on_done = [&ended, own = std::move(request.on_done)](const scheduler::Outcome& outcome) {
    if (own) own(outcome);
    ended.give(outcome);
  };
  HCACHE_ASSIGN_OR_RETURN(const scheduler::RequestId id, scheduler_->submit(std::move(request)));
  while (goes_on && !ended.wait(kAskNs)) {
    if (goes_on()) continue;
    scheduler_->cancel(id);
    break;
  }
  return ended.take();
}

void ServingImpl::stop(int64_t grace_ns) {
  if (!thread_.joinable()) return;
  scheduler_->drain();
  const int64_t end_ns = env_.monotonic_ns() + grace_ns;
  const auto busy = [this] { return scheduler_->running() + scheduler_->queued() > 0; };
  while (busy() && env_.monotonic_ns() < end_ns) env_.sleep_ns(kStopPollNs);
  scheduler_->stop_all(unavailable("the server is shutting down"));
  while (busy()) env_.sleep_ns(kStopPollNs);
  stop_.store(true, std::memory_order_release);
  scheduler_->wake();
  thread_.join();  // the engine's owner is this thread from here on
}

Status ServingImpl::close() {
  stop(0);
  if (!runtime_) return {};
  scheduler_.reset();
  executor_.reset();
  batch_.reset();
  llama_.reset();
  const Status drafts = draft_ ? std::exchange(draft_, nullptr)->close() : Status();
  HCACHE_RETURN_IF_ERROR(runtime_->close());
  return drafts;
}

}  // namespace

Result<std::unique_ptr<Serving>> Serving::open(Env& env, const ServingOptions& options) {
  auto serving = std::make_unique<ServingImpl>(env, options);
  HCACHE_RETURN_IF_ERROR(serving->start());
  return std::unique_ptr<Serving>(std::move(serving));
}

}  // namespace hcache::serving
