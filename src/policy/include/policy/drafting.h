// Drafting: tokens are guessed to come next, and a step computes them along with the next one. Each
// is kept as long as it is what would have been sampled, so the answer is that of one token a step,
// to the bit. Guesses come from the conversation itself (prompt look-up decoding: what followed the
// last tokens where they stood before is guessed to follow again) or from a small model
// (speculative decoding).
//
// Pure functions but for Acceptance and StepPace, which are running means. Threading: plain
// values.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <vector>

namespace hcache::policy {

struct DraftLimits {
  int32_t most = 0;         // tokens guessed for a step; 0: none is
  int32_t least = 0;        // where any are, at least so many, whatever they cost
  int32_t least_match = 3;  // so many tokens must have stood there before
};

struct Draft {
  std::vector<int32_t> tokens;
  int32_t matched = 0;  // tokens before it that stand in both places; kMostMatched at most
};
inline constexpr int32_t kMostMatched = 32;

// What followed the chain's last tokens before, at most `most` of it: behind the longest match, of
// equal ones the latest. Takes as long as reading the chain once.
[[nodiscard]] Draft look_up(std::span<const int32_t> chain, const DraftLimits& limits);

// How often guesses of a request came true lately.
class Acceptance {
 public:
  // Of a draft's tokens `kept` were what was sampled, and then one was not, unless `all` were.
  void note(int32_t kept, bool all);
  // That the next guessed token comes true, where so many before it match.
  [[nodiscard]] double probability(int32_t matched) const;

 private:
  double kept_ = 0;
  double looked_at_ = 0;
};

// What steps took lately, by their rows.
class StepPace {
 public:
  void note(int64_t rows, double seconds);
  [[nodiscard]] bool known() const { return !seconds_.empty(); }
  // Between known ones by interpolation. Beyond them half of what one row takes is for every row,
  // and the rest for the step, about as on CPUs; of nothing known in units of a row's time.
  [[nodiscard]] double at(int64_t rows) const;

 private:
  std::map<int64_t, double> seconds_;
};

// How many tokens to draft, and how many tokens then come a second, all sequences' together.
struct DraftLength {
  int32_t tokens = 0;
  double rate = 0;  // 0: none is drafted
};

// What steps and drafts take, in one unit of time.
struct DraftCosts {
  std::function<double(int64_t rows)> step_s;
  double token_s = 0;  // of drafting one token
  int64_t others = 0;  // rows of other sequences in the step
};

// Of a draft each token of which comes true with this probability if those before did, how many to
// compute so that most tokens come a second.
[[nodiscard]] DraftLength draft_length(const DraftCosts& costs, double probability,
                                       const DraftLimits& limits);

}  // namespace hcache::policy
