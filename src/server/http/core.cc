#include "core.h"

#include <fmt/format.h>

#include <utility>

namespace hcache::http {
namespace {

// Connections beyond the limit that are told why before they are closed; more are just dropped.
constexpr std::uint64_t kRefusals = 64;

}  // namespace

Core::Core(Env& env_in, Options options_in) : env(env_in), options(std::move(options_in)) {}

ErrorBody Core::error_body(int status, std::string_view message, std::string_view path) const {
  if (options.error_body) return options.error_body(status, message, path);
  return {"text/plain; charset=utf-8",
          fmt::format("{} {}: {}\n", status, reason_phrase(status), message)};
}

Core::EntryResult Core::enter(const std::string& peer) {
  const std::uint32_t per_peer = options.max_connections_per_peer;
  MutexLock lock(mutex_);
  EntryResult out;
  if (open_ >= options.max_connections + kRefusals) {
    out.entry = Entry::kDrop;
    ++live.refused;
    return out;
  }
  const auto known = per_peer_.find(peer);
  if (per_peer > 0 && known != per_peer_.end() && known->second >= per_peer) {
    out.entry = Entry::kRefuse;
    out.refusal = {429, "there are too many connections from this address"};
  } else if (open_ >= options.max_connections) {
    out.evicted = take_oldest_idle();
    if (out.evicted == nullptr) {
      out.entry = Entry::kRefuse;
      out.refusal = {503, "the server has as many connections as it can serve"};
    }
  }
  ++(out.entry == Entry::kServe ? live.accepted : live.refused);
  ++open_;
  if (per_peer > 0) ++per_peer_[peer];
  return out;
}

void Core::leave(const std::string& peer) {
  MutexLock lock(mutex_);
  if (options.max_connections_per_peer > 0) {
    const auto known = per_peer_.find(peer);
    if (--known->second == 0) per_peer_.erase(known);
  }
  if (--open_ == 0) left_.notify_all();
}

std::shared_ptr<Connection> Core::take_oldest_idle() {
  if (idle_.empty()) return nullptr;
  std::shared_ptr<Connection> oldest = std::move(idle_.begin()->second);
  idle_.erase(idle_.begin());
  ++live.evicted;
  return oldest;
}

std::shared_ptr<Connection> Core::pop_idle() {
  MutexLock lock(mutex_);
  return take_oldest_idle();
}

std::uint64_t Core::push_idle(std::shared_ptr<Connection> connection) {
  MutexLock lock(mutex_);
  idle_.emplace(++next_ticket_, std::move(connection));
  return next_ticket_;
}

void Core::remove_idle(std::uint64_t ticket) {
  std::shared_ptr<Connection> removed;  // destroyed outside the lock
  MutexLock lock(mutex_);
  const auto found = idle_.find(ticket);
  if (found == idle_.end()) return;
  removed = std::move(found->second);
  idle_.erase(found);
}

bool Core::wait_until_empty(std::int64_t ns) {
  MutexLock lock(mutex_);
  if (open_ > 0) left_.wait_for_ns(mutex_, ns);
  return open_ == 0;
}

Counters Core::counters() const {
  Counters out;
  out.connections_accepted = live.accepted;
  out.connections_refused = live.refused;
  out.connections_evicted = live.evicted;
  out.requests = live.requests;
  for (std::size_t i = 0; i < out.responses.size(); ++i) out.responses[i] = live.responses[i];
  out.streams_open = live.streams_open;
  out.timeouts = live.timeouts;
  out.slow_clients_cut = live.slow_clients_cut;
  out.disconnects = live.disconnects;
  out.bytes_received = live.bytes_received;
  out.bytes_sent = live.bytes_sent;
  MutexLock lock(mutex_);
  out.connections_open = open_;
  out.connections_idle = idle_.size();
  return out;
}

}  // namespace hcache::http
