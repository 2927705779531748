#include "block_io.h"

#include <fmt/format.h>

#include <algorithm>

namespace hcache::engine {

Result<std::unique_ptr<BlockIo>> BlockIo::create(Env& env) {
  HCACHE_ASSIGN_OR_RETURN(auto queue, env.new_io_queue(kDepth));
  return std::unique_ptr<BlockIo>(new BlockIo(env, std::move(queue)));
}

BlockIo::BlockIo(Env& env, std::unique_ptr<IoQueue> queue) : env_(env), queue_(std::move(queue)) {
  thread_ = std::thread([this] { run(); });
}

BlockIo::~BlockIo() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
    work_.notify_one();
  }
  queue_->cancel();
  thread_.join();
}

void BlockIo::cut(Job* job, int group, const std::vector<PageTransfer>& transfers,
                  std::deque<Part>* parts) {
  for (const PageTransfer& t : transfers) {
    for (size_t done = 0; done < t.memory.size(); done += kRequestBytes) {
      const size_t n = std::min(kRequestBytes, t.memory.size() - done);
      parts->push_back({job, group, {t.file, t.offset + done, t.memory.subspan(done, n)}});
      ++job->left[group];
    }
  }
}

BlockIo::Ticket BlockIo::add(bool is_write, std::vector<PageTransfer> first,
                             std::vector<PageTransfer> second) {
  MutexLock lock(mutex_);
  auto job = std::make_unique<Job>();
  job->ticket = ++last_;
  job->is_write = is_write;
  job->begin_ns = job->act_ns = job->kv_ns = env_.monotonic_ns();
  std::deque<Part>& waiting = is_write ? writes_waiting_ : reads_waiting_;
  cut(job.get(), 0, first, &waiting);
  cut(job.get(), 1, second, &waiting);
  const Ticket ticket = job->ticket;
  if (is_write) {
    writes_.emplace(ticket, std::move(job));
  } else {
    loads_.emplace(ticket, std::move(job));
  }
  work_.notify_one();
  return ticket;
}

BlockIo::Ticket BlockIo::load(std::vector<PageTransfer> act, std::vector<PageTransfer> kv) {
  return add(false, std::move(act), std::move(kv));
}

BlockIo::Ticket BlockIo::write(std::vector<PageTransfer> pages) {
  return add(true, {}, std::move(pages));
}

Status BlockIo::wait_act(Ticket ticket) {
  MutexLock lock(mutex_);
  Job& job = *loads_.at(ticket);
  while (job.left[0] > 0) changed_.wait(mutex_);
  return job.status;
}

Status BlockIo::wait_kv(Ticket ticket, LoadTimes* times) {
  MutexLock lock(mutex_);
  Job& job = *loads_.at(ticket);
  while (job.left[0] + job.left[1] > 0) changed_.wait(mutex_);
  if (times != nullptr) {
    times->act_s = static_cast<double>(job.act_ns - job.begin_ns) * 1e-9;
    times->kv_s = static_cast<double>(job.kv_ns - job.act_ns) * 1e-9;
  }
  const Status status = job.status;
  loads_.erase(ticket);
  return status;
}

std::vector<BlockIo::Written> BlockIo::take_written(bool all) {
  MutexLock lock(mutex_);
  while (all && !writes_.empty()) changed_.wait(mutex_);
  return std::exchange(written_, {});
}

size_t BlockIo::n_writing() const {
  MutexLock lock(mutex_);
  return writes_.size();
}

uint64_t BlockIo::bytes_read() const {
  MutexLock lock(mutex_);
  return bytes_read_;
}

int64_t BlockIo::read_busy_ns() const {
  MutexLock lock(mutex_);
  return busy_ns_ + (busy_since_ns_ == 0 ? 0 : env_.monotonic_ns() - busy_since_ns_);
}

bool BlockIo::idle() const {
  return reads_waiting_.empty() && writes_waiting_.empty() && under_way_.empty();
}

void BlockIo::run() {
  std::vector<IoCompletion> completions;
  while (true) {
    {
      MutexLock lock(mutex_);
      while (idle() && !stop_) work_.wait(mutex_);
      if (stop_) {
        reads_waiting_.clear();
        writes_waiting_.clear();
        if (under_way_.empty()) return;
      }
      submit();
    }
    completions.clear();
    if (const Status status = queue_->reap(true, &completions); !status.ok()) {
      die("the I/O queue of the block files failed: " + status.to_string());
    }
    MutexLock lock(mutex_);
    for (const IoCompletion& completion : completions) {
      if (!completion.partial) complete(completion);
    }
    account_busy();
    if (!completions.empty()) changed_.notify_all();
  }
}

void BlockIo::submit() {
  const auto give = [&](std::deque<Part>& waiting, bool is_write) HCACHE_REQUIRES(mutex_) {
    const Part part = waiting.front();
    waiting.pop_front();
    const uint64_t tag = ++last_tag_;
    const Status status = queue_->submit({.op = is_write ? IoOp::kWrite : IoOp::kRead,
                                          .file = part.transfer.file,
                                          .offset = part.transfer.offset,
                                          .buffer = part.transfer.memory,
                                          .tag = tag});
    under_way_.emplace(tag, part);
    ++(is_write ? n_writes_ : n_reads_);
    if (!status.ok()) complete({.tag = tag, .status = status, .bytes = 0, .partial = false});
  };
  while (queue_->in_flight() < queue_->depth()) {
    if (!reads_waiting_.empty()) {
      give(reads_waiting_, false);
    } else if (!writes_waiting_.empty() && n_writes_ < kMaxWrites) {
      give(writes_waiting_, true);
    } else {
      break;
    }
  }
  account_busy();
  changed_.notify_all();
}

void BlockIo::account_busy() {
  if ((n_reads_ > 0) == (busy_since_ns_ != 0)) return;
  const int64_t now_ns = env_.monotonic_ns();
  if (n_reads_ > 0) {
    busy_since_ns_ = now_ns;
  } else {
    busy_ns_ += now_ns - busy_since_ns_;
    busy_since_ns_ = 0;
  }
}

void BlockIo::complete(const IoCompletion& completion) {
  const auto found = under_way_.find(completion.tag);
  Part part = found->second;
  under_way_.erase(found);
  --(part.job->is_write ? n_writes_ : n_reads_);
  PageTransfer& t = part.transfer;
  Status status = completion.status;
  if (status.ok() && completion.bytes == 0 && !part.job->is_write) status = check_end(t);
  if (status.ok() && !part.job->is_write) bytes_read_ += completion.bytes;
  if (status.ok() && completion.bytes < t.memory.size() && !stop_) {
    // Direct transfers must begin at aligned addresses; what is transferred again is the same.
    size_t done = completion.bytes;
    if (t.file->direct()) done -= done % kDirectAlignment;
    t.offset += done;
    t.memory = t.memory.subspan(done);
    (part.job->is_write ? writes_waiting_ : reads_waiting_).push_front(part);
    return;
  }
  if (!status.ok() && part.job->status.ok()) part.job->status = status;
  end_part(part);
}

// A read of no bytes: the end of the file, unless there is more of it.
Status BlockIo::check_end(const PageTransfer& transfer) {
  HCACHE_ASSIGN_OR_RETURN(const uint64_t size, transfer.file->size());
  if (size > transfer.offset) return {};
  return data_loss(fmt::format("{} ends before byte {}: it was cut while a batch used it",
                               transfer.file->path(), transfer.offset + transfer.memory.size()));
}

void BlockIo::end_part(const Part& part) {
  Job& job = *part.job;
  if (--job.left[part.group] > 0) return;
  const int64_t now_ns = env_.monotonic_ns();
  if (job.is_write) {
    written_.push_back({job.ticket, job.status});
    writes_.erase(job.ticket);
    return;
  }
  if (part.group == 0) {
    job.begin_ns = std::max(job.begin_ns, last_load_end_ns_);
    job.act_ns = job.kv_ns = std::max(now_ns, job.begin_ns);
  } else {
    if (job.act_ns == job.begin_ns) {  // no activation rows
      job.begin_ns = job.act_ns = std::max(job.begin_ns, last_load_end_ns_);
    }
    job.kv_ns = std::max(now_ns, job.act_ns);
  }
  last_load_end_ns_ = now_ns;
}

}  // namespace hcache::engine
