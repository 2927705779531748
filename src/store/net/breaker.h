// Circuit breaker of one server: after a few requests that nobody answered it opens, then nothing
// is sent but probes, in pauses that double, until one of them is answered.
//
// It holds no clock: the caller passes monotonic nanoseconds. Threading: one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

namespace hcache::store {

class Breaker {
 public:
  struct Limits {
    int unanswered = 2;  // requests or connections without an answer since the last one: opens
    std::int64_t first_pause_ns = 0;    // from the opening to the first probe
    std::int64_t longest_pause_ns = 0;  // between two probes
    std::int64_t probe_ns = 0;          // that a probe may take
    std::int64_t least_wait_ns = 0;     // a request that was given up sooner says nothing
  };

  explicit Breaker(const Limits& limits) : limits_(limits) {}

  // Open: requests fail at once.
  [[nodiscard]] bool open() const { return open_; }

  // The server has said something, to whatever request.
  void answered(std::int64_t now_ns) {
    silent_ = 0;
    last_answer_ns_ = now_ns;
  }
  // A request that was sent at `sent_ns` got no answer. It counts only if no other one was answered
  // since: slow is not gone. True: the limit is reached, the caller trips the breaker.
  [[nodiscard]] bool unanswered(std::int64_t sent_ns) {
    return !open_ && last_answer_ns_ < sent_ns && ++silent_ >= limits_.unanswered;
  }
  // The same of one whose caller has given it up by now, as its deadline came: that may have come
  // long before an answer could.
  [[nodiscard]] bool given_up(std::int64_t sent_ns, std::int64_t now_ns) {
    return now_ns - sent_ns >= limits_.least_wait_ns && unanswered(sent_ns);
  }
  // The same of a connection that broke.
  [[nodiscard]] bool lost() { return !open_ && ++silent_ >= limits_.unanswered; }

  // Opens it, or notes that a probe failed. True: it was closed.
  bool trip(std::int64_t now_ns) {
    const int doublings = std::min(failures_, 30);
    const std::int64_t pause =
        std::min(limits_.longest_pause_ns, limits_.first_pause_ns << doublings);
    ++failures_;
    silent_ = 0;
    probing_ = false;
    probe_at_ns_ = now_ns + pause;
    return !std::exchange(open_, true);
  }
  // Closes it: a probe was answered. True: it was open.
  bool close() {
    failures_ = 0;
    probing_ = false;
    return std::exchange(open_, false);
  }

  [[nodiscard]] bool probing() const { return probing_; }
  [[nodiscard]] bool probe_due(std::int64_t now_ns) const {
    return open_ && !probing_ && now_ns >= probe_at_ns_;
  }
  void probe_begins(std::int64_t now_ns) {
    probing_ = true;
    probe_at_ns_ = now_ns + limits_.probe_ns;
  }
  // The probe has had its time without an answer: the caller trips the breaker.
  [[nodiscard]] bool probe_overdue(std::int64_t now_ns) const {
    return open_ && probing_ && now_ns >= probe_at_ns_;
  }

 private:
  Limits limits_;
  bool open_ = false;
  bool probing_ = false;
  int silent_ = 0;    // requests and connections without an answer since the last one
  int failures_ = 0;  // trips since it was closed
  std::int64_t last_answer_ns_ = 0;
  std::int64_t probe_at_ns_ = 0;  // the next probe's begin, or this one's end
};

}  // namespace hcache::store
