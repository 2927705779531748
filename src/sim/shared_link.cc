#include "shared_link.h"

#include <algorithm>

namespace hcache::sim {

namespace {

// So few bytes are none: after a day of simulated time a double of seconds is coarser than that.
constexpr double kCrumb = 64;

}  // namespace

void SharedLink::Stream::skip_empty() {
  while (active() && left < kCrumb) {
    if (++arrived < pieces.size()) left = pieces[arrived];
  }
}

SharedLink::Id SharedLink::open(double now_s, std::span<const double> pieces) {
  advance(now_s);
  Stream stream{.pieces = {pieces.begin(), pieces.end()}};
  if (!stream.pieces.empty()) stream.left = stream.pieces[0];
  stream.skip_empty();
  streams_.emplace(++last_id_, std::move(stream));
  return last_id_;
}

void SharedLink::close(Id id, double now_s) {
  advance(now_s);
  streams_.erase(id);
}

size_t SharedLink::arrived(Id id, double now_s) {
  advance(now_s);
  const auto found = streams_.find(id);
  return found == streams_.end() ? 0 : found->second.arrived;
}

std::optional<double> SharedLink::next_arrival_s(double now_s) {
  advance(now_s);
  const std::optional<double> bytes = least_left();
  if (!bytes) return std::nullopt;
  return time_s_ + *bytes * active_count() / bytes_per_s_;
}

std::optional<double> SharedLink::least_left() const {
  std::optional<double> least;
  for (const auto& [id, stream] : streams_) {
    if (stream.active()) least = least ? std::min(*least, stream.left) : stream.left;
  }
  return least;
}

double SharedLink::active_count() const {
  return static_cast<double>(std::count_if(streams_.begin(), streams_.end(),
                                           [](const auto& s) { return s.second.active(); }));
}

// From one arrival to the next: between them every stream moves at the same speed.
void SharedLink::advance(double now_s) {
  while (time_s_ < now_s) {
    const std::optional<double> least = least_left();
    if (!least) {
      time_s_ = now_s;
      return;
    }
    const double share = bytes_per_s_ / active_count();
    const double until = time_s_ + *least / share;
    const bool arrives = until <= now_s;
    const double moved = arrives ? *least : (now_s - time_s_) * share;
    busy_s_ += (arrives ? until : now_s) - time_s_;
    time_s_ = arrives ? until : now_s;
    for (auto& [id, stream] : streams_) {
      if (!stream.active()) continue;
      stream.left -= moved;
      stream.skip_empty();
    }
  }
}

}  // namespace hcache::sim
