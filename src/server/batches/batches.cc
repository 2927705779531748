#include "batches.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace hcache::server {
namespace {

using api::Json;

constexpr int64_t kTurnNs = 200'000'000;
constexpr int64_t kIdleNs = 2'000'000'000;
constexpr int64_t kRetryNs = 10'000'000'000;
constexpr int64_t kExpiryNs = 60'000'000'000;
constexpr int64_t kMostLines = 50'000;      // OpenAI's limit
constexpr int64_t kMostMessages = 100'000;  // Anthropic's
constexpr size_t kMostErrors = 100;         // of a batch that is refused
constexpr int64_t kMostActive = 64;         // batches; each has files open
constexpr int64_t kMostActivePerOwner = 4;
constexpr std::string_view kMessagesUrl = "/v1/messages";

BatchInputLimits limits_of(bool anthropic) {
  BatchInputLimits limits;
  limits.lines = anthropic ? kMostMessages : kMostLines;
  return limits;
}

Json error_json(std::string_view code, std::string_view message, Json line) {
  return {{"code", code}, {"message", message}, {"param", nullptr}, {"line", std::move(line)}};
}

// Where a file lies on this machine is nothing to clients.
std::string without_path(std::string message, const std::string& path, std::string_view name) {
  if (const size_t at = message.find(path); at != std::string::npos) {
    message.replace(at, path.size(), name);
  }
  return message;
}

}  // namespace

Result<std::unique_ptr<Batches>> Batches::open(Env& env, const BatchesOptions& options,
                                               MakeAnswerer make_answerer) {
  std::unique_ptr<Batches> batches(new Batches(env, options, std::move(make_answerer)));
  HCACHE_ASSIGN_OR_RETURN(batches->store_, BatchStore::open(env, options.dir, options.quota_bytes));
  return batches;
}

void Batches::start() {
  if (!thread_.joinable()) thread_ = std::thread([this] { work(); });
}

void Batches::stop() {
  if (!thread_.joinable()) return;
  stop_.store(true, std::memory_order_release);
  driver_.wake();
  thread_.join();
}

// ---- Clients ------------------------------------------------------------------------------------

StoredBatch Batches::new_batch(std::string_view id_prefix, const std::string& owner,
                               const api::CreateBatch& asked) const {
  StoredBatch batch;
  batch.id = store_->new_id(id_prefix);
  batch.owner = owner;
  batch.input_file_id = asked.input_file_id;
  batch.output_file_id = store_->new_id("file-");
  batch.error_file_id = store_->new_id("file-");
  batch.endpoint = asked.endpoint;
  batch.window = asked.window;
  batch.created_ns = env_.wall_ns();
  batch.expires_ns = batch.created_ns + asked.window_ns;
  batch.output_ttl_ns = asked.output_ttl_ns;
  batch.metadata = asked.metadata;
  return batch;
}

Result<StoredBatch> Batches::create(const std::string& owner, const api::CreateBatch& asked) {
  HCACHE_ASSIGN_OR_RETURN(const StoredFile file, store_->file(owner, asked.input_file_id));
  if (file.purpose != kBatchPurpose) {
    return invalid_argument(fmt::format(
        "input_file_id: file '{}' has the purpose '{}', expected batch", file.id, file.purpose));
  }
  if (!is_batch_url(asked.endpoint)) {
    return invalid_argument(
        fmt::format("endpoint: '{}' can't be in a batch; there are /v1/chat/completions, "
                    "/v1/completions, /v1/responses, /v1/messages",
                    asked.endpoint));
  }
  const StoredBatch batch = new_batch("batch_", owner, asked);
  HCACHE_RETURN_IF_ERROR(store_->add_batch(batch));
  driver_.wake();
  return batch;
}

Result<StoredBatch> Batches::create_messages(const std::string& owner, std::string_view lines) {
  StoredFile file;
  file.owner = owner;
  file.filename = "requests.jsonl";
  file.purpose = kMessagesPurpose;
  HCACHE_ASSIGN_OR_RETURN(file, store_->add_file(std::move(file), lines));
  const auto refuse = [&](const Status& status) {
    store_->remove_file(owner, file.id).ignore("it expires as others do");
    return status;
  };
  const std::string path = store_->content_path(file.id);
  const Result<BatchInput> input = BatchInput::open(env_, path, limits_of(/*anthropic=*/true));
  if (!input.ok()) {
    return refuse({input.code(), without_path(input.status().message(), path, "requests")});
  }
  for (const BatchLine& line : input->lines()) {
    if (line.status.ok()) continue;
    return refuse(
        invalid_argument(fmt::format("requests[{}]: {}", line.number - 1, line.status.message())));
  }
  api::CreateBatch asked;  // with the usual window
  asked.input_file_id = file.id;
  asked.endpoint = kMessagesUrl;
  StoredBatch batch = new_batch("msgbatch_", owner, asked);
  batch.anthropic = true;
  batch.counts.total = static_cast<int64_t>(input->lines().size());
  if (const Status added = store_->add_batch(batch); !added.ok()) return refuse(added);
  driver_.wake();
  return batch;
}

Result<StoredBatch> Batches::cancel(std::string_view owner, const std::string& id, bool anthropic) {
  HCACHE_ASSIGN_OR_RETURN(const StoredBatch found, store_->batch(owner, id));
  if (found.anthropic != anthropic) return not_found(fmt::format("there is no batch '{}'", id));
  Result<StoredBatch> cancelled = store_->change(id, [&](StoredBatch& batch) -> Status {
    if (has_ended(batch.status)) {
      return failed_precondition(
          fmt::format("batch '{}' has ended: {}", id, batch_status_name(batch.status)));
    }
    if (batch.status == BatchStatus::kFinalizing || batch.status == BatchStatus::kCancelling) {
      return {};
    }
    batch.status = BatchStatus::kCancelling;
    batch.ending = BatchStatus::kCancelled;
    batch.cancelling_ns = env_.wall_ns();
    return {};
  });
  driver_.wake();
  return cancelled;
}

BatchesStat Batches::stat() const {
  BatchesStat stat;
  stat.tally = store_->tally();
  stat.in_flight = in_flight_.load(std::memory_order_relaxed);
  stat.bytes = store_->used_bytes().value_or(0);
  stat.completed = completed_.load(std::memory_order_relaxed);
  stat.failed = failed_.load(std::memory_order_relaxed);
  return stat;
}

// ---- The thread ---------------------------------------------------------------------------------

void Batches::work() {
  while (!stop_.load(std::memory_order_acquire)) {
    take_up();
    for (auto it = active_.begin(); it != active_.end();) {
      look_at(it->first, it->second);
      it = it->second.run ? std::next(it) : active_.erase(it);
    }
    expire();
    driver_.turn(active_.empty() && retry_ns_.empty() ? kIdleNs : kTurnNs);
    in_flight_.store(driver_.in_flight(), std::memory_order_relaxed);
  }
  driver_.stop();
  for (auto& [id, active] : active_) {
    store_->set_counts(id, active.run->counts());
    driver_.remove(active.run.get());
  }
  active_.clear();
  in_flight_.store(0, std::memory_order_relaxed);
}

void Batches::take_up() {
  for (const StoredBatch& batch : store_->unended()) {
    if (active_.contains(batch.id)) continue;
    if (static_cast<int64_t>(active_.size()) >= kMostActive) return;
    const auto of_owner = std::count_if(active_.begin(), active_.end(), [&](const auto& entry) {
      return entry.second.owner == batch.owner;
    });
    if (of_owner >= kMostActivePerOwner) continue;
    const int64_t now_ns = env_.monotonic_ns();
    const auto retry = retry_ns_.find(batch.id);
    if (retry != retry_ns_.end() && now_ns < retry->second) continue;
    const Status status = open_batch(batch);
    if (status.ok()) {
      retry_ns_.erase(batch.id);
      continue;
    }
    if (retry == retry_ns_.end()) {
      log::warn("batch {} can't go on now: {}", batch.id, status.to_string());
    }
    retry_ns_[batch.id] = now_ns + kRetryNs;
    give_up_if_late(batch, status);
  }
}

void Batches::give_up_if_late(const StoredBatch& batch, const Status& why) {
  if (env_.wall_ns() < batch.expires_ns) return;
  const std::string message =
      fmt::format("The batch's window ended while it could not run: {}.", code_name(why.code()));
  const Status failed = fail(batch.id, Json::array({error_json(kExpiredCode, message, nullptr)}));
  if (failed.ok()) retry_ns_.erase(batch.id);
}

Status Batches::open_batch(const StoredBatch& batch) {
  const std::string path = store_->content_path(batch.input_file_id);
  Result<BatchInput> input = BatchInput::open(env_, path, limits_of(batch.anthropic));
  if (input.code() == Code::kInvalidArgument || input.code() == Code::kOutOfRange ||
      input.code() == Code::kNotFound) {
    const std::string message = without_path(input.status().message(), path, batch.input_file_id);
    return fail(batch.id, Json::array({error_json("invalid_input_file", message, nullptr)}));
  }
  HCACHE_RETURN_IF_ERROR(input.status());
  HCACHE_ASSIGN_OR_RETURN(const bool refused, validate(batch, *input));
  if (refused) return {};
  Active active;
  active.answerer = make_answerer_(batch.owner);
  if (!active.answerer) {
    return failed_precondition("its API key is not one of this server's; start with --api-key");
  }
  active.owner = batch.owner;
  HCACHE_ASSIGN_OR_RETURN(active.output,
                          ResultLog::open(env_, store_->content_path(batch.output_file_id)));
  HCACHE_ASSIGN_OR_RETURN(active.errors,
                          ResultLog::open(env_, store_->content_path(batch.error_file_id)));
  HCACHE_ASSIGN_OR_RETURN(active.run, BatchRun::open(std::move(*input), *active.output,
                                                     *active.errors, *active.answerer));
  active.told = active.run->counts();
  const int64_t now_ns = env_.wall_ns();
  HCACHE_RETURN_IF_ERROR(store_
                             ->change(batch.id,
                                      [&](StoredBatch& b) -> Status {
                                        b.counts = active.run->counts();
                                        if (b.status != BatchStatus::kValidating) return {};
                                        b.status = BatchStatus::kInProgress;
                                        b.in_progress_ns = now_ns;
                                        return {};
                                      })
                             .status());
  driver_.add(active.run.get());
  active_.emplace(batch.id, std::move(active));
  return {};
}

Result<bool> Batches::validate(const StoredBatch& batch, const BatchInput& input) {
  Json errors = Json::array();
  for (const BatchLine& line : input.lines()) {
    if (errors.size() >= kMostErrors) break;
    if (!line.status.ok()) {
      errors.push_back(error_json("invalid_line", line.status.message(), line.number));
    } else if (line.url != batch.endpoint) {
      errors.push_back(error_json(
          "mismatched_url",
          fmt::format("url: '{}' is not the batch's endpoint '{}'", line.url, batch.endpoint),
          line.number));
    }
  }
  if (errors.empty()) return false;
  HCACHE_RETURN_IF_ERROR(fail(batch.id, std::move(errors)));
  return true;
}

Status Batches::fail(const std::string& id, Json errors) {
  return store_
      ->change(id,
               [&](StoredBatch& batch) -> Status {
                 batch.status = BatchStatus::kFailed;
                 batch.errors = std::move(errors);
                 batch.ended_ns = env_.wall_ns();
                 return {};
               })
      .status();
}

void Batches::look_at(const std::string& id, Active& active) {
  BatchRun& run = *active.run;
  const BatchRun::Counts counts = run.counts();
  completed_.fetch_add(static_cast<uint64_t>(counts.completed - active.told.completed),
                       std::memory_order_relaxed);
  failed_.fetch_add(static_cast<uint64_t>(counts.failed - active.told.failed),
                    std::memory_order_relaxed);
  active.told = counts;
  store_->set_counts(id, counts);
  Status status = run.status();
  const int64_t now_ns = env_.monotonic_ns();
  if (status.ok()) {
    status = advance(id, active);
  } else if (active.retry_ns == 0) {
    log::warn("batch {} waits: {}", id, status.to_string());
    active.retry_ns = now_ns + kRetryNs;
    return;
  } else if (now_ns >= active.retry_ns) {
    active.retry_ns = 0;
    run.resume();
    return;
  } else {
    return;
  }
  if (!status.ok()) log::warn("batch {}: {}", id, status.to_string());
}

Status Batches::advance(const std::string& id, Active& active) {
  BatchRun& run = *active.run;
  HCACHE_ASSIGN_OR_RETURN(const StoredBatch batch, store_->batch(id));
  if (run.finished() && batch.status == BatchStatus::kInProgress) {
    return finish(batch, active, BatchStatus::kCompleted);
  }
  if (batch.status == BatchStatus::kCancelling || batch.status == BatchStatus::kFinalizing) {
    run.cancel();
    return run.in_flight() == 0 ? finish(batch, active, batch.ending) : Status();
  }
  if (env_.wall_ns() >= batch.expires_ns) {
    run.cancel();
    return run.in_flight() == 0 ? finish(batch, active, BatchStatus::kExpired) : Status();
  }
  return {};
}

// The ending is on disk before anything is given up for it, so that a restart gives up no more.
Status Batches::finish(const StoredBatch& batch, Active& active, BatchStatus ending) {
  BatchRun& run = *active.run;
  const bool cancelled = ending == BatchStatus::kCancelled;
  HCACHE_RETURN_IF_ERROR(store_
                             ->change(batch.id,
                                      [&](StoredBatch& b) -> Status {
                                        b.ending = ending;
                                        if (!cancelled) b.status = BatchStatus::kFinalizing;
                                        if (b.finalizing_ns == 0) b.finalizing_ns = env_.wall_ns();
                                        return {};
                                      })
                             .status());
  if (!run.finished()) {
    HCACHE_RETURN_IF_ERROR(run.finish_rest(
        cancelled ? BatchError{.code = std::string(kCancelledCode),
                               .message = "The batch was cancelled before this request ran."}
                  : BatchError{.code = std::string(kExpiredCode),
                               .message = "The batch's window ended before this request ran."}));
  }
  HCACHE_RETURN_IF_ERROR(publish(batch, *active.output, "output"));
  HCACHE_RETURN_IF_ERROR(publish(batch, *active.errors, "errors"));
  HCACHE_RETURN_IF_ERROR(store_
                             ->change(batch.id,
                                      [&](StoredBatch& b) -> Status {
                                        b.status = ending;
                                        b.counts = run.counts();
                                        b.output_bytes = active.output->bytes();
                                        b.error_bytes = active.errors->bytes();
                                        b.ended_ns = env_.wall_ns();
                                        return {};
                                      })
                             .status());
  driver_.remove(&run);
  active.run.reset();  // the caller takes it away
  return {};
}

Status Batches::publish(const StoredBatch& batch, const ResultLog& log, const char* what) {
  if (log.bytes() == 0) return {};
  StoredFile file;
  const bool output = std::string_view(what) == "output";
  file.id = output ? batch.output_file_id : batch.error_file_id;
  file.owner = batch.owner;
  file.filename = fmt::format("{}_{}.jsonl", batch.id, what);
  file.purpose = batch.anthropic ? kMessagesPurpose : kOutputPurpose;
  file.bytes = log.bytes();
  file.created_ns = env_.wall_ns();
  if (batch.output_ttl_ns > 0) file.expires_ns = file.created_ns + batch.output_ttl_ns;
  return store_->publish(std::move(file));
}

void Batches::expire() {
  const int64_t now_ns = env_.monotonic_ns();
  if (now_ns < next_expiry_ns_) return;
  next_expiry_ns_ = now_ns + kExpiryNs;
  const int64_t before_ns = options_.ttl_ns > 0 ? env_.wall_ns() - options_.ttl_ns : 0;
  const Status status = store_->expire(before_ns);
  if (!status.ok()) log::warn("batches can't expire: {}", status.to_string());
}

}  // namespace hcache::server
