#include "state/held_match.h"

#include <algorithm>

namespace hcache::state {

// No chunk has rows of both sides of a cut.
static_assert(policy::kCutTokens % store::kChunkTokens == 0);

store::Match held_match(const store::Match& chain, std::span<const policy::HeldRows> cuts,
                        int64_t length) {
  const policy::HeldRows held = policy::held_at(cuts, length);
  store::Match part;
  int64_t begin = 0;  // of the chunk, in the chain
  for (const store::MatchedChunk& chunk : chain.chunks) {
    const int64_t end = std::min<int64_t>(begin + chunk.usable_rows, length);
    const int64_t dropped_then = policy::held_at(cuts, begin + 1).dropped();
    const auto take = [&](int64_t from, int64_t to, int64_t dropped_now) {
      if (from >= to) return;
      part.chunks.push_back({.chunk = chunk.chunk,
                             .usable_rows = static_cast<uint32_t>(to - from),
                             .first_row = static_cast<uint32_t>(from - begin),
                             .moved = dropped_then - dropped_now});
      part.n_tokens += static_cast<uint64_t>(to - from);
    };
    take(begin, std::min(end, held.kept), 0);
    take(std::max(begin, held.resumed), end, held.dropped());
    begin += chunk.usable_rows;
  }
  return part;
}

}  // namespace hcache::state
