#include "encode_queue.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace hcache::encoder {
namespace {

constexpr double kSecondsPerNs = 1e-9;

}  // namespace

Result<std::unique_ptr<EncodeQueue>> EncodeQueue::start(Env& env, int64_t max_queued, Load load) {
  std::unique_ptr<EncodeQueue> queue(new EncodeQueue(env, max_queued));
  queue->thread_ = std::thread([self = queue.get(), load = std::move(load)] { self->run(load); });
  MutexLock lock(queue->mutex_);
  while (!queue->loaded_) queue->wake_.wait(queue->mutex_);
  Status status = queue->load_status_;
  lock.unlock();
  if (!status.ok()) return status;
  return queue;
}

Status EncodeQueue::submit(EncodeJobPtr job) {
  MutexLock lock(mutex_);
  if (stop_) return unavailable("the server is stopping");
  if (counts_.waiting >= max_queued_) {
    ++counts_.refused;
    return resource_exhausted(
        fmt::format("{} requests wait already (--max-queued); try again", counts_.waiting));
  }
  ++counts_.waiting;
  jobs_.push_back(std::move(job));
  wake_.notify_all();
  return {};
}

void EncodeQueue::stop() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

EncodeCounts EncodeQueue::counts() const {
  MutexLock lock(mutex_);
  return counts_;
}

void EncodeQueue::run(const Load& load) {
  auto loaded = load();
  const bool ok = loaded.ok();
  {
    MutexLock lock(mutex_);
    load_status_ = loaded.status();
    if (ok) encoder_ = std::move(*loaded);
    loaded_ = true;
    wake_.notify_all();
  }
  while (ok) {
    MutexLock lock(mutex_);
    while (jobs_.empty() && !stop_) wake_.wait(mutex_);
    if (stop_) {
      jobs_.clear();
      return;
    }
    drop_gone();
    const Batch batch = next_batch();
    lock.unlock();
    if (!batch.texts.empty()) compute(batch);
  }
}

void EncodeQueue::drop_gone() {
  const auto dropped =
      std::erase_if(jobs_, [](const EncodeJobPtr& job) { return job->gone.load(); });
  counts_.dropped += static_cast<int64_t>(dropped);
  counts_.waiting -= static_cast<int64_t>(dropped);
}

EncodeQueue::Batch EncodeQueue::next_batch() {
  const libllama::EncoderOptions& limits = encoder_->options();
  Batch batch;
  int64_t tokens = 0;
  while (!jobs_.empty() && batch.texts.size() < static_cast<size_t>(limits.max_batch_texts)) {
    EncodeJobPtr job = jobs_.front();
    std::vector<int32_t>& text = job->texts[job->n_taken];
    tokens += static_cast<int64_t>(text.size());
    if (!batch.texts.empty() && tokens > limits.max_batch_tokens) break;
    batch.texts.push_back(std::move(text));
    batch.jobs.push_back(job);
    jobs_.pop_front();
    if (++job->n_taken < job->texts.size()) jobs_.push_back(std::move(job));
  }
  return batch;
}

void EncodeQueue::compute(const Batch& batch) {
  const int64_t begin_ns = env_.monotonic_ns();
  auto rows = encoder_->encode(batch.texts);
  const double seconds = static_cast<double>(env_.monotonic_ns() - begin_ns) * kSecondsPerNs;
  finish(batch, std::move(rows), seconds);
}

void EncodeQueue::finish(const Batch& batch, Result<std::vector<libllama::EncodedText>> rows,
                         double seconds) {
  std::vector<EncodeJobPtr> ended;
  for (size_t i = 0; rows.ok() && i < batch.jobs.size(); ++i) {
    EncodeJob& job = *batch.jobs[i];
    job.rows.push_back(std::move((*rows)[i]));  // its texts are taken in their order
    if (job.rows.size() == job.texts.size()) ended.push_back(batch.jobs[i]);
  }
  if (!rows.ok()) {
    for (const EncodeJobPtr& job : batch.jobs) {
      if (std::ranges::find(ended, job) == ended.end()) ended.push_back(job);
    }
  }
  {
    MutexLock lock(mutex_);
    ++counts_.batches;
    counts_.seconds += seconds;
    counts_.texts += static_cast<int64_t>(batch.texts.size());
    for (const auto& text : batch.texts) counts_.tokens += static_cast<int64_t>(text.size());
    counts_.waiting -= static_cast<int64_t>(ended.size());
    (rows.ok() ? counts_.done : counts_.failed) += static_cast<int64_t>(ended.size());
    if (!rows.ok()) {
      std::erase_if(jobs_, [&](const EncodeJobPtr& job) {
        return std::ranges::find(ended, job) != ended.end();
      });
    }
  }
  for (const EncodeJobPtr& job : ended) {
    if (rows.ok()) {
      job->done(std::move(job->rows));
    } else {
      job->done(rows.status());
    }
  }
}

}  // namespace hcache::encoder
