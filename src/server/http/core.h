// What the connections of one server share: options, routes, counters, and who is idle.
//
// Threading: any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/env.h"
#include "base/sync.h"
#include "http/server.h"
#include "request_parser.h"

namespace hcache::http {

class Connection;

// Counters as they are counted; see http::Counters.
struct LiveCounters {
  std::atomic<std::uint64_t> accepted{0};
  std::atomic<std::uint64_t> refused{0};
  std::atomic<std::uint64_t> evicted{0};
  std::atomic<std::uint64_t> requests{0};
  std::array<std::atomic<std::uint64_t>, 6> responses{};
  std::atomic<std::uint64_t> streams_open{0};
  std::atomic<std::uint64_t> timeouts{0};
  std::atomic<std::uint64_t> slow_clients_cut{0};
  std::atomic<std::uint64_t> disconnects{0};
  std::atomic<std::uint64_t> bytes_received{0};
  std::atomic<std::uint64_t> bytes_sent{0};
};

class Core {
 public:
  Core(Env& env, Options options);

  // The routes; null until there are some.
  [[nodiscard]] const Router* router() const { return router_.load(std::memory_order_acquire); }
  // Once.
  void set_router(Router router) {
    owned_router_ = std::make_unique<const Router>(std::move(router));
    router_.store(owned_router_.get(), std::memory_order_release);
  }

  [[nodiscard]] ErrorBody error_body(int status, std::string_view message,
                                     std::string_view path) const;

  enum class Entry { kServe, kRefuse, kDrop };
  struct EntryResult {
    Entry entry = Entry::kServe;
    HttpError refusal;                    // of kRefuse
    std::shared_ptr<Connection> evicted;  // to be closed if it is still idle; may be null
  };
  // Counts a new connection in, except with kDrop.
  [[nodiscard]] EntryResult enter(const std::string& peer) HCACHE_EXCLUDES(mutex_);
  void leave(const std::string& peer) HCACHE_EXCLUDES(mutex_);

  // The connection that has been idle for longest, taken off the list; null where none is.
  [[nodiscard]] std::shared_ptr<Connection> pop_idle() HCACHE_EXCLUDES(mutex_);
  // Puts a connection on the list of idle ones; the ticket takes it off again. remove_idle() of one
  // that pop_idle() or enter() took does nothing.
  [[nodiscard]] std::uint64_t push_idle(std::shared_ptr<Connection> connection)
      HCACHE_EXCLUDES(mutex_);
  void remove_idle(std::uint64_t ticket) HCACHE_EXCLUDES(mutex_);

  // Waits until no connection is left, for at most `ns` of real time. Whether none is.
  bool wait_until_empty(std::int64_t ns) HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] Counters counters() const HCACHE_EXCLUDES(mutex_);

  Env& env;
  const Options options;
  LiveCounters live;
  std::atomic<bool> draining{false};         // no connection is kept alive any more
  std::atomic<std::uint64_t> body_bytes{0};  // of bodies being received

 private:
  std::shared_ptr<Connection> take_oldest_idle() HCACHE_REQUIRES(mutex_);

  std::unique_ptr<const Router> owned_router_;
  std::atomic<const Router*> router_{nullptr};

  mutable Mutex mutex_;
  CondVar left_;
  std::uint64_t open_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::unordered_map<std::string, std::uint32_t> per_peer_ HCACHE_GUARDED_BY(mutex_);
  std::uint64_t next_ticket_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, std::shared_ptr<Connection>> idle_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::http
