#include "events.h"

#include <utility>

namespace hcache::server {
namespace {

constexpr size_t kMaxListeners = 64;
constexpr int64_t kPeriodNs = 1'000'000'000;

}  // namespace

Events::Events(std::function<std::string()> snapshot)
    : snapshot_(std::move(snapshot)), thread_([this] { run(); }) {}

Events::~Events() { stop(); }

void Events::stop() {
  {
    MutexLock lock(mutex_);
    stop_ = true;
    wake_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  MutexLock lock(mutex_);
  for (const auto& listener : listeners_) listener->finish();
  listeners_.clear();
}

void Events::subscribe(std::shared_ptr<http::Responder> responder) {
  MutexLock lock(mutex_);
  if (stop_ || listeners_.size() >= kMaxListeners) {
    responder->send_error(
        503, stop_ ? "the server is shutting down" : "too many clients listen to /events",
        {{"Retry-After", "10"}});
    return;
  }
  responder->start_stream(200, http::stream_headers());
  listeners_.push_back(std::move(responder));
  wake_.notify_all();
}

void Events::run() {
  MutexLock lock(mutex_);
  while (!stop_) {
    if (listeners_.empty()) {
      wake_.wait(mutex_);
      continue;
    }
    lock.unlock();
    publish();
    lock.lock();
    if (!stop_) wake_.wait_for_ns(mutex_, kPeriodNs);
  }
}

void Events::publish() {
  const std::string event = http::event_text(snapshot_());
  MutexLock lock(mutex_);
  std::erase_if(listeners_, [&](const auto& listener) { return !listener->write(event); });
}

}  // namespace hcache::server
