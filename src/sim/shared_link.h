// A link whose streams share its bandwidth evenly: what every restore and every write gets of a
// disk or a bus when others use it too.
//
// A stream moves its pieces one after the other, back to back. Fluid: with n streams under way each
// moves at bytes_per_s / n, and that changes when one begins or ends, not before. Streams in the
// background move while no others do.
// Threading: plain values. Times in seconds on a clock that does not go back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

namespace hcache::sim {

class SharedLink {
 public:
  using Id = uint64_t;

  // bytes_per_s > 0.
  explicit SharedLink(double bytes_per_s) : bytes_per_s_(bytes_per_s) {}

  // Begins to move the pieces (bytes, >= 0; the first of them from now_s on).
  Id open(double now_s, std::span<const double> pieces, bool background = false);
  // Forgets a stream; what is under way stops.
  void close(Id id, double now_s);

  // Pieces of the stream that have arrived by now_s.
  [[nodiscard]] size_t arrived(Id id, double now_s);
  // When the next piece of any stream arrives if nothing changes; none: nothing is under way.
  [[nodiscard]] std::optional<double> next_arrival_s(double now_s);
  // Seconds in which something moved, up to the last time it was told.
  [[nodiscard]] double busy_s() const { return busy_s_; }

 private:
  struct Stream {
    std::vector<double> pieces;
    bool background = false;
    size_t arrived = 0;
    double left = 0;  // bytes of the piece under way
    [[nodiscard]] bool active() const { return arrived < pieces.size(); }
    void skip_empty();
  };

  void advance(double now_s);
  // The streams that move: how many, and the bytes until the first of them ends its piece.
  struct Moving {
    bool background = false;
    double count = 0;
    double least_left = 0;
    [[nodiscard]] bool has(const Stream& stream) const {
      return stream.active() && stream.background == background;
    }
  };
  [[nodiscard]] Moving moving() const;

  double bytes_per_s_;
  std::map<Id, Stream> streams_;
  Id last_id_ = 0;
  double time_s_ = 0;
  double busy_s_ = 0;
};

}  // namespace hcache::sim
