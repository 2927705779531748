// The thread that reads blocks' pages ahead of the layers that want them, and writes new blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/env.h"
#include "base/status.h"
#include "base/sync.h"

namespace hcache::engine {

// A run of bytes of a file and the host memory that it is read to, or written from.
struct PageTransfer {
  File* file = nullptr;
  uint64_t offset = 0;
  std::span<std::byte> memory;

  friend bool operator==(const PageTransfer& a, const PageTransfer& b) {
    return a.file == b.file && a.offset == b.offset && a.memory.data() == b.memory.data() &&
           a.memory.size() == b.memory.size();
  }
};

// How long a load's reads took, of the link's own time: since the load before it was over.
struct LoadTimes {
  double act_s = 0;
  double kv_s = 0;
};

// Loads are read in the order in which they were asked for, each one's activation rows first;
// writes go when no read waits. Threading: one thread asks (the engine's).
class BlockIo {
 public:
  using Ticket = uint64_t;  // of a load or a write, increasing

  static Result<std::unique_ptr<BlockIo>> create(Env& env);
  // Ends what is under way; its memory is free to use then.
  ~BlockIo();
  BlockIo(const BlockIo&) = delete;
  BlockIo& operator=(const BlockIo&) = delete;

  // Reads a mini-batch's pages of one layer. The memory belongs to the load until wait_kv().
  Ticket load(std::vector<PageTransfer> act, std::vector<PageTransfer> kv);
  // Blocks until the load's activation rows are there. The first error of the load so far.
  Status wait_act(Ticket ticket);
  // Blocks until all of it is there, and forgets it; the times are kept in `times` unless null.
  Status wait_kv(Ticket ticket, LoadTimes* times);

  // Writes a block. The memory stays as it is until take_written() names the ticket.
  Ticket write(std::vector<PageTransfer> pages);
  struct Written {
    Ticket ticket = 0;
    Status status;
  };
  // The writes that have ended since the last call; with `all`, waits for every one.
  std::vector<Written> take_written(bool all);
  // Writes that have not ended.
  [[nodiscard]] size_t n_writing() const;

  // Nanoseconds of the Env's clock in which reads were under way, so far.
  [[nodiscard]] int64_t read_busy_ns() const;
  [[nodiscard]] uint64_t bytes_read() const;

 private:
  struct Job {
    Ticket ticket = 0;
    bool is_write = false;
    size_t left[2] = {0, 0};  // transfers not ended: of activation rows, of K and V (or of a write)
    int64_t begin_ns = 0;
    int64_t act_ns = 0;  // when the activation rows were there
    int64_t kv_ns = 0;
    Status status;
  };
  struct Part {
    Job* job = nullptr;
    int group = 0;
    PageTransfer transfer;
  };
  // Reads and writes are cut into requests of this size.
  static constexpr size_t kRequestBytes = size_t{1} << 20;
  static constexpr size_t kDepth = 32;
  static constexpr size_t kMaxWrites = 4;  // under way at once

  BlockIo(Env& env, std::unique_ptr<IoQueue> queue);
  Ticket add(bool is_write, std::vector<PageTransfer> first, std::vector<PageTransfer> second);
  static void cut(Job* job, int group, const std::vector<PageTransfer>& transfers,
                  std::deque<Part>* parts);
  void run();
  // Gives the queue what it has room for.
  void submit() HCACHE_REQUIRES(mutex_);
  void complete(const IoCompletion& completion) HCACHE_REQUIRES(mutex_);
  static Status check_end(const PageTransfer& transfer);
  void end_part(const Part& part) HCACHE_REQUIRES(mutex_);
  void account_busy() HCACHE_REQUIRES(mutex_);
  [[nodiscard]] bool idle() const HCACHE_REQUIRES(mutex_);

  Env& env_;
  std::unique_ptr<IoQueue> queue_;  // the thread's

  mutable Mutex mutex_;
  CondVar work_;     // for the thread: jobs, or the end
  CondVar changed_;  // for who waits: a job has come further
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  Ticket last_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::map<Ticket, std::unique_ptr<Job>> loads_ HCACHE_GUARDED_BY(mutex_);
  std::map<Ticket, std::unique_ptr<Job>> writes_ HCACHE_GUARDED_BY(mutex_);
  std::vector<Written> written_ HCACHE_GUARDED_BY(mutex_);
  std::deque<Part> reads_waiting_ HCACHE_GUARDED_BY(mutex_);
  std::deque<Part> writes_waiting_ HCACHE_GUARDED_BY(mutex_);
  std::map<uint64_t, Part> under_way_ HCACHE_GUARDED_BY(mutex_);  // by the request's tag
  uint64_t last_tag_ HCACHE_GUARDED_BY(mutex_) = 0;
  size_t n_reads_ HCACHE_GUARDED_BY(mutex_) = 0;  // of those under way
  size_t n_writes_ HCACHE_GUARDED_BY(mutex_) = 0;
  int64_t last_load_end_ns_ HCACHE_GUARDED_BY(mutex_) = 0;
  uint64_t bytes_read_ HCACHE_GUARDED_BY(mutex_) = 0;
  int64_t busy_ns_ HCACHE_GUARDED_BY(mutex_) = 0;
  int64_t busy_since_ns_ HCACHE_GUARDED_BY(mutex_) = 0;  // 0: no read is under way

  std::thread thread_;  // last: it uses the others
};

}  // namespace hcache::engine
