// One request's answer on its way: what handlers write into from any thread and a connection takes
// bytes out of.
//
// Threading: Responder's part from any thread; the rest belongs to the connection's I/O thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "base/sync.h"
#include "core.h"
#include "http/message.h"
#include "http/server.h"
#include "response.h"

namespace hcache::http {

class Exchange final : public Responder {
 public:
  // What the answer has to know of the request.
  struct Client {
    bool http_1_0 = false;
    bool head = false;        // wants no body
    bool keep_alive = false;  // would like to send more
    std::string allowed_origin;
    std::string path;  // for error bodies
  };

  // `notify` asks the connection to call take(): from any thread, never blocking.
  Exchange(std::shared_ptr<Core> core, Client client, std::function<void()> notify);
  ~Exchange() override = default;

  // The reference for a handler: when it and its copies are gone without an answer, one is made up.
  [[nodiscard]] static std::shared_ptr<Responder> handle(const std::shared_ptr<Exchange>& exchange);

  bool send(int status, const Headers& headers, std::string body) override HCACHE_EXCLUDES(mutex_);
  bool send_error(int status, std::string_view message, const Headers& headers) override;
  bool start_stream(int status, const Headers& headers) override HCACHE_EXCLUDES(mutex_);
  bool write(std::string_view bytes) override HCACHE_EXCLUDES(mutex_);
  bool finish() override HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] bool writable() const override HCACHE_EXCLUDES(mutex_);
  [[nodiscard]] std::size_t unsent_bytes() const override HCACHE_EXCLUDES(mutex_);
  void on_disconnect(std::function<void()> callback) override HCACHE_EXCLUDES(mutex_);

  // ---- The connection's part ---------------------------------------------------------------

  struct Output {
    bool cut = false;   // the connection must be closed at once
    bool done = false;  // `bytes` are the last of the answer
    bool keep_alive = false;
  };
  // Moves what is queued into `bytes` (empty before); memory is passed on, not copied. Null: only
  // tells how things stand.
  [[nodiscard]] Output take(std::string* bytes) HCACHE_EXCLUDES(mutex_);
  // The operating system took n of the bytes given out.
  void sent(std::size_t n) HCACHE_EXCLUDES(mutex_);
  // Tells a client that waits for it to send its body.
  void send_continue() HCACHE_EXCLUDES(mutex_);
  // The answer's head will say that the connection ends after it.
  void end_connection() HCACHE_EXCLUDES(mutex_);
  // The client stopped sending: a stream is cut, the callback called; a send() is still delivered.
  // Whether the answer was not complete yet.
  bool peer_left() HCACHE_EXCLUDES(mutex_);
  // The connection is closed: nothing is delivered any more.
  void close() HCACHE_EXCLUDES(mutex_);
  // What the access log gets, as far as it is known here.
  [[nodiscard]] AccessRecord& record() { return record_; }
  [[nodiscard]] int status() const HCACHE_EXCLUDES(mutex_);

 private:
  enum class Phase { kWaiting, kStreaming, kDone, kCut };

  void abandon();
  [[nodiscard]] Head new_head(int status) const;
  // Queues an answer's head and counts it.
  void begin(Head head, const Headers& headers) HCACHE_REQUIRES(mutex_);
  void queue(std::string_view bytes) HCACHE_REQUIRES(mutex_);
  void enter(Phase phase) HCACHE_REQUIRES(mutex_);
  // Tells the connection that there is something to take, unless it knows.
  void tell() HCACHE_REQUIRES(mutex_);

  const std::shared_ptr<Core> core_;
  const Client client_;
  const std::function<void()> notify_;
  AccessRecord record_;

  mutable Mutex mutex_;
  Phase phase_ HCACHE_GUARDED_BY(mutex_) = Phase::kWaiting;
  Framing framing_ HCACHE_GUARDED_BY(mutex_) = Framing::kLength;
  bool keep_alive_ HCACHE_GUARDED_BY(mutex_);
  bool peer_left_ HCACHE_GUARDED_BY(mutex_) = false;
  bool notified_ HCACHE_GUARDED_BY(mutex_) = false;
  int status_ HCACHE_GUARDED_BY(mutex_) = 0;
  std::string output_ HCACHE_GUARDED_BY(mutex_);
  std::size_t unsent_ HCACHE_GUARDED_BY(mutex_) = 0;  // output_ and what take() gave out
  std::function<void()> on_disconnect_ HCACHE_GUARDED_BY(mutex_);
};

}  // namespace hcache::http
