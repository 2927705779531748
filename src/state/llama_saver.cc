#include "state/llama_saver.h"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/sync.h"
#include "state/snapshot_pages.h"

namespace hcache::state {
namespace {

// Written together at most.
constexpr size_t kBatchBytes = size_t{64} << 20;

size_t bytes_of(const LlamaChunk& chunk) { return chunk.rows.size() + chunk.snapshot.size(); }

class LlamaSaverImpl final : public LlamaSaver {
 public:
  LlamaSaverImpl(store::Store& store, const Fingerprint& fingerprint,
                 const libllama::StateLayout& layout, size_t backlog_bytes)
      : store_(store), fingerprint_(fingerprint), layout_(layout), backlog_bytes_(backlog_bytes) {
    thread_ = std::thread([this] { work(); });
  }
  ~LlamaSaverImpl() override {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      wake_.notify_all();
    }
    thread_.join();
  }

  bool add(LlamaChunk chunk) override;
  Status flush() override {
    MutexLock lock(mutex_);
    while (!waiting_.empty() || writing_) idle_.wait(mutex_);
    return std::exchange(error_, Status());
  }
  SaverStats stats() const override {
    MutexLock lock(mutex_);
    return stats_;
  }

 private:
  void work();
  void write(std::vector<LlamaChunk> batch) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] store::ChunkWrite write_of(const LlamaChunk& chunk,
                                           std::span<const std::byte> snapshot) const;

  store::Store& store_;
  const Fingerprint fingerprint_;
  const libllama::StateLayout layout_;
  const size_t backlog_bytes_;
  mutable Mutex mutex_;
  CondVar wake_;
  CondVar idle_;
  std::deque<LlamaChunk> waiting_ HCACHE_GUARDED_BY(mutex_);
  bool writing_ HCACHE_GUARDED_BY(mutex_) = false;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  Status error_ HCACHE_GUARDED_BY(mutex_);
  SaverStats stats_ HCACHE_GUARDED_BY(mutex_);
  std::thread thread_;
};

bool LlamaSaverImpl::add(LlamaChunk chunk) {
  if (chunk.length->failed) return false;
  const uint64_t bytes = bytes_of(chunk);
  MutexLock lock(mutex_);
  if (stats_.backlog_bytes > 0 && stats_.backlog_bytes + bytes > backlog_bytes_) {
    chunk.length->failed = true;
    stats_.rows_skipped += chunk.tokens.size();
    return false;
  }
  stats_.rows_captured += chunk.tokens.size();
  stats_.backlog_bytes += bytes;
  stats_.ring_peak_bytes = std::max(stats_.ring_peak_bytes, stats_.backlog_bytes);
  waiting_.push_back(std::move(chunk));
  wake_.notify_one();
  return true;
}

void LlamaSaverImpl::work() {
  MutexLock lock(mutex_);
  for (;;) {
    while (waiting_.empty() && !stop_) wake_.wait(mutex_);
    if (waiting_.empty()) return;
    std::vector<LlamaChunk> batch;
    for (size_t bytes = 0; !waiting_.empty() && bytes < kBatchBytes;) {
      // The same chunk again, with a snapshot perhaps, goes into the next batch.
      const ChunkId next = waiting_.front().id;
      const bool twice = std::any_of(batch.begin(), batch.end(),
                                     [&](const LlamaChunk& other) { return other.id == next; });
      if (twice) break;
      bytes += bytes_of(waiting_.front());
      batch.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    writing_ = true;
    lock.unlock();
    write(std::move(batch));
    lock.lock();
    writing_ = false;
    idle_.notify_all();
  }
}

store::ChunkWrite LlamaSaverImpl::write_of(const LlamaChunk& chunk,
                                           std::span<const std::byte> snapshot) const {
  store::ChunkWrite write;
  write.id = chunk.id;
  write.parent = chunk.parent;
  write.fingerprint = fingerprint_;
  write.salt = chunk.salt.id;
  write.owner = chunk.salt.owner;
  write.first_position = chunk.first_position;
  write.tokens = chunk.tokens;
  const size_t n = chunk.tokens.size();
  std::span<const std::byte> rows(chunk.rows);
  for (size_t i = 0; !rows.empty(); ++i) {
    const size_t bytes = n * layout_.row_bytes[i];
    write.pages.push_back({static_cast<uint16_t>(i), store::Encoding::kRows, rows.first(bytes)});
    rows = rows.subspan(bytes);
  }
  for (const store::PageWrite& page : snapshot_pages(snapshot, n)) write.pages.push_back(page);
  return write;
}

void LlamaSaverImpl::write(std::vector<LlamaChunk> batch) {
  std::vector<std::vector<std::byte>> snapshots;
  std::vector<store::ChunkWrite> writes;
  uint64_t bytes = 0;
  for (const LlamaChunk& chunk : batch) {
    bytes += bytes_of(chunk);
    snapshots.push_back(chunk.snapshot.empty()
                            ? std::vector<std::byte>()
                            : framed_snapshot(chunk.snapshot, chunk.tokens.size()));
    if (!chunk.length->failed) writes.push_back(write_of(chunk, snapshots.back()));
  }
  const Result<store::PutReport> put = store_.put(writes);
  for (const LlamaChunk& chunk : batch) {
    if (!put.ok() || put->chunks_without_parent > 0) chunk.length->failed = true;
    if (chunk.length->failed) continue;
    const auto end = static_cast<int64_t>(chunk.first_position + chunk.tokens.size());
    chunk.length->durable = std::max(chunk.length->durable.load(), end);
  }
  MutexLock lock(mutex_);
  stats_.backlog_bytes -= bytes;
  if (put.ok()) {
    stats_.chunks_written += put->chunks_new + put->chunks_extended;
    stats_.bytes_written += put->page_bytes;
    return;
  }
  if (stats_.last_error.ok()) {
    log::warn("conversations are not saved any more: {}", put.status().to_string());
  }
  stats_.last_error = put.status();
  if (error_.ok()) error_ = put.status();
}

}  // namespace

std::unique_ptr<LlamaSaver> LlamaSaver::create(store::Store& store, const Fingerprint& fingerprint,
                                               const libllama::StateLayout& layout,
                                               size_t backlog_bytes) {
  return std::make_unique<LlamaSaverImpl>(store, fingerprint, layout, backlog_bytes);
}

bool has_rows(const store::ChunkInfo& chunk, const libllama::StateLayout& layout) {
  for (size_t i = 0; i < layout.row_bytes.size(); ++i) {
    const store::PageInfo* page = chunk.find_page(static_cast<uint16_t>(i), store::Encoding::kRows);
    if (page == nullptr || page->bytes != layout.row_bytes[i] * chunk.tokens.size()) return false;
  }
  return true;
}

}  // namespace hcache::state
