#include "exchange.h"

#include <utility>

namespace hcache::http {

Exchange::Exchange(std::shared_ptr<Core> core, Client client, std::function<void()> notify)
    : core_(std::move(core)),
      client_(std::move(client)),
      notify_(std::move(notify)),
      keep_alive_(client_.keep_alive) {}

std::shared_ptr<Responder> Exchange::handle(const std::shared_ptr<Exchange>& exchange) {
  return {exchange.get(), [exchange](Responder*) { exchange->abandon(); }};
}

Head Exchange::new_head(int status) const {
  Head head;
  head.status = status;
  head.http_1_0 = client_.http_1_0;
  head.wall_ns = core_->env.wall_ns();
  head.allowed_origin = client_.allowed_origin;
  return head;
}

void Exchange::queue(std::string_view bytes) {
  output_.append(bytes);
  unsent_ += bytes.size();
}

void Exchange::begin(Head head, const Headers& headers) {
  if (core_->draining || head.framing == Framing::kToEnd) keep_alive_ = false;
  head.keep_alive = keep_alive_;
  queue(head_text(head, headers));
  framing_ = head.framing;
  status_ = head.status;
  ++core_->live.responses[static_cast<std::size_t>(head.status / 100) % 6];
}

void Exchange::enter(Phase phase) {
  if (phase_ == Phase::kStreaming) --core_->live.streams_open;
  if (phase == Phase::kStreaming) ++core_->live.streams_open;
  phase_ = phase;
}

void Exchange::tell() {
  if (!std::exchange(notified_, true)) notify_();
}

bool Exchange::send(int status, const Headers& headers, std::string body) {
  Head head = new_head(status);
  head.framing = has_body(status) ? Framing::kLength : Framing::kNone;
  head.content_length = body.size();
  std::function<void()> dropped;  // outside the lock
  MutexLock lock(mutex_);
  if (phase_ != Phase::kWaiting) return false;
  begin(std::move(head), headers);
  if (!client_.head && has_body(status)) queue(body);
  enter(Phase::kDone);
  dropped.swap(on_disconnect_);
  tell();
  return true;
}

bool Exchange::send_error(int status, std::string_view message, const Headers& headers) {
  ErrorBody body = core_->error_body(status, message, client_.path);
  Headers all = headers;
  all.emplace_back("Content-Type", std::move(body.content_type));
  return send(status, all, std::move(body.content));
}

bool Exchange::start_stream(int status, const Headers& headers) {
  Head head = new_head(status);
  head.framing = client_.http_1_0 ? Framing::kToEnd : Framing::kChunked;
  MutexLock lock(mutex_);
  if (phase_ != Phase::kWaiting) return false;
  const bool open = !peer_left_;
  if (open) begin(std::move(head), headers);
  enter(open ? Phase::kStreaming : Phase::kCut);
  tell();
  return open;
}

bool Exchange::write(std::string_view bytes) {
  MutexLock lock(mutex_);
  if (phase_ != Phase::kStreaming) return false;
  if (bytes.empty() || client_.head) return true;
  const bool open = unsent_ <= core_->options.max_unsent_bytes;
  if (!open) {
    ++core_->live.slow_clients_cut;
    enter(Phase::kCut);
  } else if (framing_ == Framing::kChunked) {
    const std::size_t before = output_.size();
    append_chunk(bytes, &output_);
    unsent_ += output_.size() - before;
  } else {
    queue(bytes);
  }
  tell();
  return open;
}

bool Exchange::finish() {
  std::function<void()> dropped;  // outside the lock
  MutexLock lock(mutex_);
  if (phase_ != Phase::kStreaming) return false;
  if (framing_ == Framing::kChunked && !client_.head) queue(kLastChunk);
  enter(Phase::kDone);
  dropped.swap(on_disconnect_);
  tell();
  return true;
}

bool Exchange::writable() const {
  MutexLock lock(mutex_);
  return phase_ == Phase::kStreaming && unsent_ <= core_->options.max_unsent_bytes;
}

std::size_t Exchange::unsent_bytes() const {
  MutexLock lock(mutex_);
  return unsent_;
}

void Exchange::on_disconnect(std::function<void()> callback) {
  MutexLock lock(mutex_);
  if (phase_ == Phase::kDone) return;
  if (phase_ != Phase::kCut && !peer_left_) {
    callback.swap(on_disconnect_);  // the old one, if any, goes outside the lock
    lock.unlock();
    return;
  }
  lock.unlock();
  if (callback) callback();
}

void Exchange::abandon() {
  {
    MutexLock lock(mutex_);
    if (phase_ == Phase::kStreaming) {
      enter(Phase::kCut);
      tell();
    }
    if (phase_ != Phase::kWaiting) return;
  }
  send_error(500, "the server gave no answer to this request", {});
}

Exchange::Output Exchange::take(std::string* bytes) {
  MutexLock lock(mutex_);
  notified_ = false;
  if (bytes != nullptr) bytes->swap(output_);
  return {phase_ == Phase::kCut, phase_ == Phase::kDone, keep_alive_};
}

void Exchange::sent(std::size_t n) {
  record_.bytes += n;
  MutexLock lock(mutex_);
  unsent_ -= n;
}

void Exchange::send_continue() {
  MutexLock lock(mutex_);
  queue(kContinue);
  tell();
}

void Exchange::end_connection() {
  MutexLock lock(mutex_);
  keep_alive_ = false;
}

bool Exchange::peer_left() {
  std::function<void()> callback;
  MutexLock lock(mutex_);
  if (phase_ == Phase::kDone || peer_left_) return false;
  peer_left_ = true;
  if (phase_ == Phase::kStreaming) enter(Phase::kCut);
  callback.swap(on_disconnect_);
  lock.unlock();
  if (callback) callback();
  return true;
}

void Exchange::close() {
  std::function<void()> callback;
  MutexLock lock(mutex_);
  const bool done = phase_ == Phase::kDone;
  if (!done) enter(Phase::kCut);
  peer_left_ = true;
  std::string().swap(output_);
  unsent_ = 0;
  callback.swap(on_disconnect_);
  lock.unlock();
  if (callback) callback();
}

int Exchange::status() const {
  MutexLock lock(mutex_);
  return status_;
}

}  // namespace hcache::http
