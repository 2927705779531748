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

SharedLink::Id SharedLink::open(double now_s, std::span<const double> pieces, bool background) {
  advance(now_s);
  Stream stream{.pieces = {pieces.begin(), pieces.end()}, .background = background};
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
  const Moving now = moving();
  if (now.count == 0) return std::nullopt;
  return time_s_ + now.least_left * now.count / bytes_per_s_;
}

SharedLink::Moving SharedLink::moving() const {
  Moving found{.background = std::none_of(streams_.begin(), streams_.end(), [](const auto& s) {
                 return s.second.active() && !s.second.background;
               })};
  for (const auto& [id, stream] : streams_) {
    if (!found.has(stream)) continue;
    found.least_left = found.count == 0 ? stream.left : std::min(found.least_left, stream.left);
    found.count += 1;
  }
  return found;
}

// From one arrival to the next: between them every stream that moves does so at the same speed.
void SharedLink::advance(double now_s) {
  while (time_s_ < now_s) {
    const Moving now = moving();
    if (now.count == 0) {
      time_s_ = now_s;
      return;
    }
    const double share = bytes_per_s_ / now.count;
    const double until = time_s_ + now.least_left / share;
    const bool arrives = until <= now_s;
    const double moved = arrives ? now.least_left : (now_s - time_s_) * share;
    busy_s_ += (arrives ? until : now_s) - time_s_;
    time_s_ = arrives ? until : now_s;
    for (auto& [id, stream] : streams_) {
      if (!now.has(stream)) continue;
      stream.left -= moved;
      stream.skip_empty();
    }
  }
}

}  // namespace hcache::sim
