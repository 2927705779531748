// The read-ahead of store.h's PageReader: planning, the ring, the I/O thread.
//
// Threading: as PageReader. The I/O thread alone touches the queue.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/env.h"
#include "base/sync.h"
#include "format.h"
#include "page_cache.h"
#include "remote.h"
#include "seal.h"
#include "store/store.h"

namespace hcache::store {

// What a ChunkRef's pin points to. The owner adds the unpinning.
struct PinnedChunk {
  ChunkRecord record;
  const void* store = nullptr;  // identity of the store that gave it out
};

// A page as a reader's list has it.
struct PageJob {
  std::shared_ptr<const PinnedChunk> chunk;
  std::size_t page = 0;  // index in the record
  Status status;         // not ok: delivered as it is, without reading
};

// Whether any reader of a store reads for a request that runs. Threading: any thread.
class Traffic {
 public:
  // A read for a running request begins or ends.
  void begin_urgent() { ++urgent_; }
  void end_urgent() { --urgent_; }
  [[nodiscard]] bool urgent() const { return urgent_ > 0; }

 private:
  std::atomic<std::int64_t> urgent_ = 0;  // requests
};

// What the reader needs of the store. Threading: any thread.
class PageSource {
 public:
  PageSource() = default;
  PageSource(const PageSource&) = delete;
  PageSource& operator=(const PageSource&) = delete;
  virtual ~PageSource() = default;

  // invalid_argument if the chunk is of another store.
  [[nodiscard]] virtual Result<PageJob> job(const PageRequest& page) const = 0;
  [[nodiscard]] virtual Result<std::shared_ptr<File>> segment(const PagePlace& place) = 0;
  [[nodiscard]] virtual std::string segment_path(const PagePlace& place) const = 0;
  // Whether the catalog does not name this place for this page any more.
  [[nodiscard]] virtual bool page_moved(const ChunkRecord& record, std::size_t page) = 0;
  [[nodiscard]] virtual PageCache& cache() = 0;
  [[nodiscard]] virtual Traffic& traffic() = 0;
  // Null: there is none, and no page says that it lies there.
  [[nodiscard]] virtual Remote* remote() = 0;
  [[nodiscard]] virtual const Seal& seal() const = 0;
  // A page did not pass its check.
  virtual void count_checksum_failure() = 0;
};

// For how long something has been going on, all stretches of it together. Times are monotonic
// nanoseconds. Threading: one thread at a time.
class BusyTime {
 public:
  void set(bool busy, std::int64_t now_ns) {
    if (busy == (since_ns_ >= 0)) return;
    if (!busy) ended_ns_ += now_ns - since_ns_;
    since_ns_ = busy ? now_ns : -1;
  }
  [[nodiscard]] std::int64_t until(std::int64_t now_ns) const {
    return ended_ns_ + (since_ns_ >= 0 ? now_ns - since_ns_ : 0);
  }

 private:
  std::int64_t ended_ns_ = 0;
  std::int64_t since_ns_ = -1;  // -1: it is not going on
};

// What a reader reads with: a ring, its mirror if it has one, and a queue that fills both.
struct ReaderParts {
  AlignedBuffer ring;
  std::unique_ptr<RingMirror> mirror;
  std::unique_ptr<IoQueue> queue;
};

// Parts that no reader uses at the moment. A ring of 64 MiB takes as long to fault in as to read
// from a fast disk, and the kernel lets the end of an io_uring wait for milliseconds; both would
// stand between a request and its first token. Threading: any thread.
class ReaderPool {
 public:
  // new_ring and new_mirror of the options, which outlive the pool.
  explicit ReaderPool(const StoreOptions& options) : options_(options) {}

  // A ring of exactly `ring_bytes` and a queue of exactly `depth`.
  [[nodiscard]] Result<ReaderParts> take(Env& env, std::size_t ring_bytes, std::size_t depth)
      HCACHE_EXCLUDES(mutex_);
  // Parts that take() will find, as many of `n` as are kept, their memory there.
  void prepare(Env& env, std::size_t n, std::size_t ring_bytes, std::size_t depth)
      HCACHE_EXCLUDES(mutex_);
  // The queue has nothing in flight.
  void give_back(ReaderParts parts) HCACHE_EXCLUDES(mutex_);

 private:
  // Of four restores at a time, and the smaller rings of readers ahead, of tails and of single
  // pages.
  static constexpr std::size_t kMaxIdle = 8;
  static constexpr std::size_t kMaxIdleBytes = std::size_t{320} << 20;

  const StoreOptions& options_;
  Mutex mutex_;
  std::vector<ReaderParts> idle_ HCACHE_GUARDED_BY(mutex_);
};

class PageReaderImpl final : public PageReader {
 public:
  // `options` have been checked; `disks` bounds how many requests interleave.
  // `parts` go back to the pool.
  PageReaderImpl(Env& env, PageSource& source, ReaderPool& pool, std::uint32_t disks,
                 const ReaderOptions& options, ReaderParts parts);
  ~PageReaderImpl() override;

  [[nodiscard]] Status submit(std::span<const PageRequest> pages) override;
  [[nodiscard]] Result<PageView> next() override HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] Result<std::optional<PageView>> try_next() override HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] Result<std::optional<PageView>> next_within(std::int64_t timeout_ns) override
      HCACHE_EXCLUDES(mutex_);
  void set_ahead(std::uint64_t bytes) override HCACHE_EXCLUDES(wake_mutex_);
  void release(std::size_t index) override HCACHE_EXCLUDES(mutex_);
  void cancel() override HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] ReaderStats stats() const override HCACHE_EXCLUDES(mutex_);

 private:
  [[nodiscard]] Status submit_jobs(std::vector<PageJob> jobs) HCACHE_EXCLUDES(mutex_);

  struct Request;
  struct Item {
    PageJob job;
    Request* request = nullptr;  // once planned; stays null for what needs no reading
    HeldBytes cached;
    bool missed = false;           // not in host memory when it was looked for
    bool remote = false;           // asked of the remote tier
    std::int64_t patience_ns = 0;  // … which has to answer before remote_busy_ reaches this
    std::span<const std::byte> bytes;
    std::int64_t begin_ns = 0;  // of its request
    std::int64_t end_ns = 0;
    bool planned = false;
    bool ready = false;
    // It has to be checked yet; from when it is ready on, the taker's.
    bool unchecked = false;
    bool released = false;
  };
  // One read, and the piece of the ring that it fills.
  struct Request {
    std::shared_ptr<File> file;
    std::uint64_t offset = 0;    // in the file, aligned
    std::size_t length = 0;      // aligned
    std::size_t needed = 0;      // up to the end of the last page
    std::size_t asked_from = 0;  // where the transfer in flight begins
    std::size_t done = 0;        // bytes that are there
    std::size_t ring_at = 0;
    std::vector<Item*> items;
    std::size_t delivered = 0;  // of the items, by the I/O thread
    std::size_t unreleased = 0;
    bool complete = false;
    std::int64_t submitted_ns = 0;
  };

  void run() HCACHE_EXCLUDES(mutex_);
  // Marks the pages from next_plan_ on that host memory holds, up to the first that it does not.
  void take_from_cache() HCACHE_REQUIRES(mutex_);
  // Asks for the page at next_plan_, which the remote tier alone has. False: no room.
  bool start_remote(Item* item) HCACHE_REQUIRES(mutex_);
  void finish_remote(std::size_t index, Result<std::shared_ptr<const AlignedBuffer>> bytes)
      HCACHE_EXCLUDES(mutex_);
  // After a transfer has begun, and after one has ended.
  void note_transfers() HCACHE_REQUIRES(mutex_);
  // Of a background reader: others' reads, or enough of its own, are under way.
  [[nodiscard]] bool must_yield() HCACHE_REQUIRES(mutex_);
  // Plans and submits the next request. False when there is nothing to do or no room.
  bool start_request() HCACHE_REQUIRES(mutex_);
  // Enough has been read that nobody has taken; never when the next page that is wanted is not even
  // planned.
  [[nodiscard]] bool far_ahead() HCACHE_REQUIRES(mutex_);
  [[nodiscard]] bool take_ring(std::size_t length, std::size_t* at) HCACHE_REQUIRES(mutex_);
  void submit_to_queue(Request* request) HCACHE_REQUIRES(mutex_);
  void on_completion(const IoCompletion& completion) HCACHE_EXCLUDES(mutex_);
  // The pages of a request that lie in its first `done` bytes are ready.
  void deliver(Request* request, std::size_t done) HCACHE_EXCLUDES(mutex_);
  // The request transfers nothing more: what has not come of it is read again, page by page.
  void finish(Request* request) HCACHE_EXCLUDES(mutex_);
  // Reads one page again. Returns the bytes it took.
  std::uint64_t read_again(const Request& request, Item* item) const;
  // The I/O thread looks for work (again).
  void wake() HCACHE_EXCLUDES(wake_mutex_);
  // Until wake() has been called since the last time, at most `at_most_ns`; -1: for as long as it
  // takes.
  void wait_for_work(std::int64_t at_most_ns) HCACHE_EXCLUDES(mutex_, wake_mutex_);
  // Takes in what release() was told.
  void take_released() HCACHE_REQUIRES(mutex_) HCACHE_EXCLUDES(wake_mutex_);
  void set_free(std::size_t index) HCACHE_REQUIRES(mutex_);
  // Gives back the ring memory of the oldest requests whose pages are all released.
  void free_requests() HCACHE_REQUIRES(mutex_);
  // Whether the page that was read is the one that was written; in the ring it is decrypted then.
  [[nodiscard]] bool take_in(const Item& item) const;
  void check_page(Item* item) const;
  // Ready pages from the next on that have to be checked before it is taken; none if it was.
  [[nodiscard]] std::vector<Item*> unchecked_pages() HCACHE_REQUIRES(mutex_);
  void check_pages(std::span<Item* const> pages) const HCACHE_EXCLUDES(mutex_);
  // Both; others may have the mutex meanwhile.
  void check_next() HCACHE_REQUIRES(mutex_);
  void keep_in_memory(const Item& item) const;
  void mark_failed(Item* item, Status status) HCACHE_REQUIRES(mutex_);
  // Whether the next page can be had. An error: there will be none.
  [[nodiscard]] Result<bool> has_next() HCACHE_REQUIRES(mutex_);
  [[nodiscard]] PageView take_next() HCACHE_REQUIRES(mutex_);
  [[nodiscard]] Result<std::optional<PageView>> next_if_ready() HCACHE_REQUIRES(mutex_);
  Item& item(std::size_t index) HCACHE_REQUIRES(mutex_) { return items_[index - first_item_]; }

  Env& env_;
  PageSource& source_;
  ReaderPool& pool_;
  const ReaderOptions options_;
  const std::uint32_t disks_;
  const std::size_t request_bytes_;
  const std::size_t window_bytes_;
  const bool check_when_taken_;
  ReaderParts parts_;
  std::byte* const ring_;
  IoQueue* const queue_;

  std::atomic<std::uint64_t> ahead_bytes_;  // set_ahead()'s

  // Held for a moment at most, so that nobody who has others to answer sleeps because of it.
  Mutex wake_mutex_;
  CondVar work_;  // for the I/O thread
  bool woken_ HCACHE_GUARDED_BY(wake_mutex_) = false;
  std::vector<std::size_t> released_ HCACHE_GUARDED_BY(wake_mutex_);

  // Before wake_mutex_. The I/O thread may hold it while it plans.
  mutable Mutex mutex_;
  CondVar ready_;  // for next()
  std::deque<Item> items_ HCACHE_GUARDED_BY(mutex_);
  std::size_t first_item_ HCACHE_GUARDED_BY(mutex_) = 0;  // index of items_.front()
  std::size_t next_plan_ HCACHE_GUARDED_BY(mutex_) = 0;   // everything before is planned
  std::size_t next_out_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::deque<std::unique_ptr<Request>> requests_ HCACHE_GUARDED_BY(mutex_);  // in ring order
  std::size_t ring_tail_ HCACHE_GUARDED_BY(mutex_) = 0;                      // where to take next
  std::uint64_t ahead_ HCACHE_GUARDED_BY(mutex_) = 0;  // bytes of requests' pages, not taken
  bool far_ahead_ HCACHE_GUARDED_BY(mutex_) = false;
  BusyTime busy_ HCACHE_GUARDED_BY(mutex_);                     // anything is in flight
  BusyTime remote_busy_ HCACHE_GUARDED_BY(mutex_);              // pages of the remote tier are
  std::size_t in_flight_ HCACHE_GUARDED_BY(mutex_) = 0;         // in the queue
  std::size_t remote_in_flight_ HCACHE_GUARDED_BY(mutex_) = 0;  // pages
  std::uint64_t remote_bytes_ HCACHE_GUARDED_BY(mutex_) = 0;    // asked for, not released
  ReaderStats stats_ HCACHE_GUARDED_BY(mutex_);
  bool cancelled_ HCACHE_GUARDED_BY(mutex_) = false;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  bool queue_failed_ HCACHE_GUARDED_BY(mutex_) = false;  // it must not be used again
  // What an answer of the remote tier finds when it comes: this reader, or null once it is gone.
  struct Link {
    Mutex mutex;
    PageReaderImpl* reader HCACHE_GUARDED_BY(mutex) = nullptr;
  };
  const std::shared_ptr<Link> link_ = std::make_shared<Link>();
  std::thread thread_;
};

}  // namespace hcache::store
