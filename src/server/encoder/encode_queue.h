// The thread that computes: it owns the encoder and takes the texts of all waiting requests in
// turns, several to a batch.
//
// Threading: start() and stop() from one thread, everything else from any.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"
#include "libllama/llama_encoder.h"

namespace hcache::encoder {

// The texts of one request.
struct EncodeJob {
  std::vector<std::vector<int32_t>> texts;
  // Called once, on the queue's thread, unless the job is dropped.
  std::function<void(Result<std::vector<libllama::EncodedText>>)> done;
  std::atomic<bool> gone = false;  // nobody waits for it any more: it is dropped

  // The queue's.
  std::vector<libllama::EncodedText> rows;
  size_t n_taken = 0;
};
using EncodeJobPtr = std::shared_ptr<EncodeJob>;

struct EncodeCounts {
  int64_t waiting = 0;  // requests now, those that are computed among them
  int64_t done = 0;     // requests
  int64_t failed = 0;
  int64_t refused = 0;  // the queue was full
  int64_t dropped = 0;  // their clients left
  int64_t texts = 0;
  int64_t tokens = 0;
  int64_t batches = 0;
  double seconds = 0;  // of computing
};

class EncodeQueue {
 public:
  using Load = std::function<Result<std::unique_ptr<libllama::LlamaEncoder>>()>;

  // Runs `load` on its thread and waits for it.
  [[nodiscard]] static Result<std::unique_ptr<EncodeQueue>> start(Env& env, int64_t max_queued,
                                                                  Load load);
  ~EncodeQueue() { stop(); }
  EncodeQueue(const EncodeQueue&) = delete;
  EncodeQueue& operator=(const EncodeQueue&) = delete;

  // Texts that the encoder takes, at least one. kResourceExhausted: as many wait as may.
  Status submit(EncodeJobPtr job);
  // After the batch in hand; jobs that wait are dropped.
  void stop();

  [[nodiscard]] EncodeCounts counts() const;
  // What of it never changes.
  [[nodiscard]] const libllama::LlamaEncoder& encoder() const { return *encoder_; }

 private:
  EncodeQueue(Env& env, int64_t max_queued) : env_(env), max_queued_(max_queued) {}

  // Of which job each text of a batch is.
  struct Batch {
    std::vector<EncodeJobPtr> jobs;
    std::vector<std::vector<int32_t>> texts;
  };

  void run(const Load& load);
  // One text of each job that waits, then the next one of each, as long as they fit.
  Batch next_batch() HCACHE_REQUIRES(mutex_);
  void drop_gone() HCACHE_REQUIRES(mutex_);
  void compute(const Batch& batch);
  // Takes out what has ended; outside of the lock they are told.
  void finish(const Batch& batch, Result<std::vector<libllama::EncodedText>> rows, double seconds);

  Env& env_;
  const int64_t max_queued_;
  std::unique_ptr<libllama::LlamaEncoder> encoder_;  // the thread's; const from any

  mutable Mutex mutex_;
  CondVar wake_;
  std::deque<EncodeJobPtr> jobs_ HCACHE_GUARDED_BY(mutex_);  // that have texts to compute
  EncodeCounts counts_ HCACHE_GUARDED_BY(mutex_);
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  bool loaded_ HCACHE_GUARDED_BY(mutex_) = false;
  Status load_status_ HCACHE_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace hcache::encoder
