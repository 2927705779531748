#include "state/held_match.h"

#include <algorithm>
#include <vector>

namespace hcache::state {
namespace {

// No chunk has rows of both sides of a cut.
static_assert(policy::kCutTokens % store::kChunkTokens == 0);

// Positions [from, to) of the chain, whose rows have moved alike.
struct Stretch {
  int64_t from = 0;
  int64_t to = 0;
  const std::vector<int64_t>* moves = nullptr;  // null: as moves_since() says
};

// What is held, in ascending order. Neighbours among the blocks that have moved alike are one.
std::vector<Stretch> stretches_of(const policy::HeldRows& held, std::span<const ChosenBlock> chosen,
                                  int64_t length) {
  static const std::vector<int64_t> kNever;
  std::vector<Stretch> stretches = {{.from = 0, .to = held.kept, .moves = &kNever}};
  for (const ChosenBlock& block : chosen) {
    Stretch& last = stretches.back();
    const int64_t end = block.first + policy::kChosenBlock;
    if (last.to == block.first && *last.moves == block.moves) {
      last.to = end;
    } else {
      stretches.push_back({.from = block.first, .to = end, .moves = &block.moves});
    }
  }
  stretches.push_back({.from = held.resumed, .to = length});
  return stretches;
}

}  // namespace

store::Match held_match(const store::Match& chain, std::span<const policy::HeldRows> cuts,
                        int64_t length, std::span<const ChosenBlock> chosen) {
  const auto made = std::count_if(cuts.begin(), cuts.end(),
                                  [&](const policy::HeldRows& cut) { return cut.cut_at < length; });
  const policy::HeldRows held = policy::held_at(cuts, length);
  const std::vector<Stretch> stretches = stretches_of(held, chosen, length);
  store::Match part;
  auto next = stretches.begin();
  int64_t begin = 0;  // of the chunk, in the chain
  for (const store::MatchedChunk& chunk : chain.chunks) {
    const int64_t end = std::min<int64_t>(begin + chunk.usable_rows, length);
    while (next != stretches.end() && next->to <= begin) ++next;
    for (auto each = next; each != stretches.end() && each->from < end; ++each) {
      const int64_t from = std::max(begin, each->from);
      const int64_t to = std::min(end, each->to);
      if (from >= to) continue;
      part.chunks.push_back(
          {.chunk = chunk.chunk,
           .usable_rows = static_cast<uint32_t>(to - from),
           .first_row = static_cast<uint32_t>(from - begin),
           .moves = each->moves != nullptr
                        ? *each->moves
                        : moves_since(cuts.first(static_cast<size_t>(made)), begin)});
      part.n_tokens += static_cast<uint64_t>(to - from);
    }
    begin += chunk.usable_rows;
  }
  return part;
}

}  // namespace hcache::state
