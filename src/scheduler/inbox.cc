#include "inbox.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace hcache::scheduler {

namespace {

constexpr size_t kCompletions = 16;  // that the estimate of retry_after_s looks back on
constexpr double kMinRetryS = 1;
constexpr double kMaxRetryS = 60;

}  // namespace

Inbox::Inbox(const Executor& executor, const SchedulerOptions& options)
    : executor_(executor),
      options_(options),
      context_(executor.limits().context),
      arena_cells_(executor.limits().arena_cells),
      why_no_cuts_(executor.limits().why_no_cuts),
      chooses_(executor.limits().why_no_choice.empty()),
      media_(executor.limits().media) {
  snapshot_.arena_cells = arena_cells_;
}

Status Inbox::check(const Request& request) const {
  if (request.tokens.empty()) return invalid_argument("the prompt has no tokens");
  if (!request.next && request.max_new_tokens > 0) {
    return invalid_argument("the request has no next()");
  }
  if (request.media && !media_) {
    return unimplemented("pictures need a model on libllama with a projector (--mmproj)");
  }
  const auto below = [](int32_t token) { return token < 0; };
  if (!request.media && std::ranges::any_of(request.tokens, below)) {
    return failed_precondition(
        "the chain has pictures: it goes on only with a request that has them");
  }
  const auto n = static_cast<int64_t>(request.tokens.size());
  if (n > std::min(context_, arena_cells_) && limits_of(request).context == 0) {
    const std::string why_whole =
        request.truncation ? fmt::format("; {}", check_cuts(request).message()) : "";
    return n > context_
               ? out_of_range(fmt::format(
                     "the prompt of {} tokens exceeds the available context size of {}{}", n,
                     context_, why_whole))
               : out_of_range(fmt::format("the prompt has {} tokens, the KV arena {} cells{}", n,
                                          arena_cells_, why_whole));
  }
  if (request.on_prompt_logits && (request.logits_from < 0 || request.logits_from >= n)) {
    return invalid_argument(fmt::format("logits of a prompt of {} tokens are wanted from token {}",
                                        n, request.logits_from));
  }
  if (request.tells_hidden && (!request.on_prompt_logits || request.max_new_tokens > 0)) {
    return invalid_argument("a request that is told of hidden rows generates nothing");
  }
  return {};
}

policy::TruncationLimits Inbox::limits_of(const Request& request) const {
  return request.truncation && check_cuts(request).ok() ? wanted_limits(request)
                                                        : policy::TruncationLimits();
}

policy::TruncationLimits Inbox::wanted_limits(const Request& request) const {
  policy::TruncationLimits limits = *request.truncation;
  const int64_t most = std::min(context_, arena_cells_);
  limits.context = limits.context > 0 ? std::min(limits.context, most) : most;
  if (!chooses_) limits.important = 0;
  return limits;
}

Status Inbox::check_cuts(const Request& request) const {
  if (!why_no_cuts_.empty()) {
    return unimplemented(fmt::format("what outgrows the context can't be cut: {}", why_no_cuts_));
  }
  return policy::validate(wanted_limits(request));
}

Inbox::Count& Inbox::count_of(const Request& request) {
  return request.background ? background_ : keys_[request.key];
}

Status Inbox::check_room(const Request& request) {
  if (draining_) return unavailable("shutting down: no new requests");
  if (request.background) return {};
  const int64_t queued = total_.queued - background_.queued;
  if (queued >= options_.max_queued) {
    return resource_exhausted(fmt::format("{} requests are queued", queued));
  }
  const auto count = keys_.find(request.key);
  if (options_.max_queued_per_key > 0 && count != keys_.end() &&
      count->second.queued >= options_.max_queued_per_key) {
    return resource_exhausted(
        fmt::format("{} requests of this key are queued", count->second.queued));
  }
  return {};
}

double Inbox::retry_after_s() const {
  if (completions_ns_.size() < 2) return kMinRetryS;
  // One request that ends makes room for one in the queue. The time since the last end counts, so
  // that the estimate grows while nothing ends.
  const double interval = seconds_between(completions_ns_.front(), executor_.now_ns()) /
                          static_cast<double>(completions_ns_.size());
  return std::clamp(interval, kMinRetryS, kMaxRetryS);
}

Result<RequestId> Inbox::submit(Request request, double* retry_after_s) {
  const Status valid = check(request);
  MutexLock lock(mutex_);
  const Status status = valid.ok() ? check_room(request) : valid;
  if (!status.ok()) {
    ++refused_;
    if (retry_after_s != nullptr) *retry_after_s = this->retry_after_s();
    return status;
  }
  auto task = std::make_unique<Task>();
  task->id = ++last_id_;
  task->submit_ns = executor_.now_ns();
  task->limits = limits_of(request);
  task->chain = std::move(request.tokens);
  // The last generated token takes no cell. What is cut has room without end.
  int64_t most = std::min(context_, arena_cells_) - task->length() + 1;
  if (task->limits.context > 0) {
    const bool limited = request.max_new_tokens != kAsManyAsFit;
    most = limited ? std::max<int64_t>(request.max_new_tokens, 0) : task->limits.context;
  }
  task->max_new = std::clamp<int64_t>(request.max_new_tokens, 0, most);
  task->request = std::move(request);
  task->told = task->request.logits_from;
  task->outcome.id = task->id;
  task->outcome.prompt_tokens = task->length();
  ++total_.queued;
  ++count_of(task->request).queued;
  delivery_.submitted.push_back(std::move(task));
  signalled_ = true;
  changed_.notify_one();
  return last_id_;
}

void Inbox::cancel(RequestId id) {
  MutexLock lock(mutex_);
  delivery_.cancelled.push_back(id);
  signalled_ = true;
  changed_.notify_one();
}

void Inbox::forget(ForgottenChain chain) {
  MutexLock lock(mutex_);
  delivery_.forgotten.push_back(std::move(chain));
  signalled_ = true;
  changed_.notify_one();
}

void Inbox::drain() {
  MutexLock lock(mutex_);
  draining_ = true;
}

void Inbox::stop_all(Status reason) {
  MutexLock lock(mutex_);
  draining_ = true;
  delivery_.stop = std::move(reason);
  signalled_ = true;
  changed_.notify_one();
}

void Inbox::wake() {
  MutexLock lock(mutex_);
  signalled_ = true;
  changed_.notify_one();
}

void Inbox::visit_idle(Visit visit) {
  MutexLock lock(mutex_);
  delivery_.visits.push_back(std::move(visit));
  signalled_ = true;
  changed_.notify_one();
}

int64_t Inbox::queued() const {
  MutexLock lock(mutex_);
  return total_.queued;
}

int64_t Inbox::running() const {
  MutexLock lock(mutex_);
  return total_.running;
}

Snapshot Inbox::stats() const {
  MutexLock lock(mutex_);
  Snapshot snapshot = snapshot_;
  snapshot.queued = total_.queued;
  snapshot.submitted = last_id_;
  snapshot.refused = refused_;
  return snapshot;
}

Inbox::Delivery Inbox::take() {
  MutexLock lock(mutex_);
  signalled_ = false;
  return std::exchange(delivery_, {});
}

bool Inbox::wait(int64_t timeout_ns) {
  MutexLock lock(mutex_);
  if (!signalled_) changed_.wait_for_ns(mutex_, timeout_ns);
  return signalled_;
}

bool Inbox::signalled() const {
  MutexLock lock(mutex_);
  return signalled_;
}

bool Inbox::may_run(const Task& task) const {
  if (options_.max_running_per_key <= 0 || task.request.background) return true;
  MutexLock lock(mutex_);
  const auto count = keys_.find(task.request.key);
  return count == keys_.end() || count->second.running < options_.max_running_per_key;
}

void Inbox::started(const Task& task) {
  MutexLock lock(mutex_);
  Count& count = count_of(task.request);
  --total_.queued, ++total_.running;
  --count.queued, ++count.running;
}

void Inbox::requeued(const Task& task) {
  MutexLock lock(mutex_);
  Count& count = count_of(task.request);
  ++total_.queued, --total_.running;
  ++count.queued, --count.running;
}

void Inbox::ended(const Task& task, bool was_running) {
  MutexLock lock(mutex_);
  Count& count = count_of(task.request);
  --(was_running ? total_.running : total_.queued);
  --(was_running ? count.running : count.queued);
  if (&count != &background_ && count.queued == 0 && count.running == 0) {
    keys_.erase(task.request.key);
  }
  completions_ns_.push_back(executor_.now_ns());
  if (completions_ns_.size() > kCompletions) completions_ns_.pop_front();
}

void Inbox::publish(Snapshot snapshot) {
  MutexLock lock(mutex_);
  snapshot_ = std::move(snapshot);
}

}  // namespace hcache::scheduler
