#include "state/read_ahead.h"

#include <deque>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/sync.h"
#include "planned_pages.h"

namespace hcache::state {
namespace {

class ReadAheadImpl : public ReadAhead {
 public:
  ReadAheadImpl(store::Store& store, const ReadAheadOptions& options)
      : store_(store), options_(options), thread_([this] { run(); }) {}

  ~ReadAheadImpl() override {
    {
      MutexLock lock(mutex_);
      stop_ = true;
      if (reader_ != nullptr) reader_->cancel();
      work_.notify_one();
    }
    thread_.join();
  }

  Status add(uint64_t id, engine::Engine& engine, const store::Match& match,
             const policy::Plan& plan, double remote_timeout_s) override {
    HCACHE_ASSIGN_OR_RETURN(const PlannedPages pages,
                            planned_pages(engine, &match, plan, /*devices_at_once=*/true));
    List list{.id = id, .pages = requests_of(pages), .remote_timeout_s = remote_timeout_s};
    if (list.pages.empty()) return {};
    MutexLock lock(mutex_);
    waiting_.push_back(std::move(list));
    work_.notify_one();
    return {};
  }

  void drop(uint64_t id) override {
    MutexLock lock(mutex_);
    std::erase_if(waiting_, [&](const List& list) { return list.id == id; });
    if (reading_ != id) return;
    reading_.reset();
    if (reader_ != nullptr) reader_->cancel();
  }

  [[nodiscard]] size_t pending() const override {
    MutexLock lock(mutex_);
    return waiting_.size() + (reading_ ? 1 : 0);
  }

  [[nodiscard]] uint64_t bytes_read() const override {
    MutexLock lock(mutex_);
    return bytes_read_;
  }

 private:
  struct List {
    uint64_t id = 0;
    std::vector<store::PageRequest> pages;
    double remote_timeout_s = 0;
  };

  void run() {
    MutexLock lock(mutex_);
    while (true) {
      while (!stop_ && waiting_.empty()) work_.wait(mutex_);
      if (stop_) return;
      const List list = std::move(waiting_.front());
      waiting_.pop_front();
      reading_ = list.id;
      lock.unlock();
      read(list);
      lock.lock();
      if (reading_ == list.id) reading_.reset();
    }
  }

  void read(const List& list) {
    store::ReaderOptions options;
    options.ring_bytes = options_.ring_bytes;
    options.remote_timeout_s = list.remote_timeout_s;
    options.background = true;
    const auto reader = open_reader(&store_, list.pages, options);
    if (!reader.ok()) {
      log::warn("nothing is read ahead for a request: {}", reader.status().to_string());
      return;
    }
    {
      MutexLock lock(mutex_);
      if (stop_ || reading_ != list.id) return;
      reader_ = reader->get();
    }
    // Nothing but the end of a cancelled reader is an error here.
    for (size_t i = 0; i < list.pages.size(); ++i) {
      const Result<store::PageView> view = (*reader)->next();
      if (!view.ok()) break;
      (*reader)->release(view->index);
    }
    const store::ReaderStats stats = (*reader)->stats();
    MutexLock lock(mutex_);
    bytes_read_ += stats.disk_bytes + stats.remote_bytes;
    reader_ = nullptr;
  }

  store::Store& store_;
  const ReadAheadOptions options_;
  mutable Mutex mutex_;
  CondVar work_;
  std::deque<List> waiting_ HCACHE_GUARDED_BY(mutex_);
  std::optional<uint64_t> reading_ HCACHE_GUARDED_BY(mutex_);
  store::PageReader* reader_ HCACHE_GUARDED_BY(mutex_) = nullptr;  // of what is being read
  uint64_t bytes_read_ HCACHE_GUARDED_BY(mutex_) = 0;
  bool stop_ HCACHE_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace

std::unique_ptr<ReadAhead> ReadAhead::begin(store::Store& store, const ReadAheadOptions& options) {
  return std::make_unique<ReadAheadImpl>(store, options);
}

}  // namespace hcache::state
